"""A compiled kernel is used only if it is of this version and its copies and checksums are right. A warning names the cause."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_kernel
import pytest

import kvstore.native
from kvstore.native.batch import Kernel
from kvstore.native.c_kernel import CKernel
from kvstore.native.choice import failed_check

BROKEN = {
    "cached": ("lanes.h", "STORE(to + v * WIDTH, data[v])", "STORE(to + v * WIDTH, acc[v])"),
    "streamed": ("lanes.h", "STREAM(to + v * WIDTH, data[v])", "STREAM(to + v * WIDTH, acc[v])"),
    "quarters": ("lanes.h", "STREAM_QUARTERS(to + v * WIDTH, data[v])", "STREAM_QUARTERS(to + v * WIDTH, acc[v])"),
    "unhashed": ("lanes.h", "STREAM(to + at + v * WIDTH, data[v])", "STREAM(to, data[v])"),
    "short": ("kernel.c", "memcpy(to, copied, batch->size)", "memcpy(to, copied, batch->size / 2)"),
    "checksum": ("kernel.c", "avalanche(h + mixed(", "avalanche(h ^ mixed("),
}


def library_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str, str]) -> Path:
    """Compile the kernel with changes of its source, given as (file, old text, new text)."""
    for name in ("kernel.c", "lanes.h"):
        shutil.copy(build_kernel.SOURCE.with_name(name), folder)
    for name, old, new in changes:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    monkeypatch.setattr(build_kernel, "SOURCE", folder / "kernel.c")
    reason = build_kernel.build(folder / "_kernel.so")
    if reason == build_kernel.NO_COMPILER:
        pytest.skip(reason)
    assert not reason, reason
    return folder / "_kernel.so"


def chosen_with(library: Path | None, folder: Path, named: str = "") -> tuple[str, str]:
    """Return the name of the kernel that a new process chooses with a library in its package, and the log lines."""
    package = folder / "installed" / "kvstore"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(kvstore.native.__file__).parent, package / "native", ignore=ignored)
    (package / "__init__.py").touch()
    if library is not None:
        shutil.copy(library, package / "native" / "_kernel.so")
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); from kvstore import native; print(native.kernel_name())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": "", "KVSTORE_NATIVE": named},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_self_check_accepts_right_kernels(kernel: Kernel) -> None:
    assert not failed_check(kernel)


@pytest.mark.parametrize("broken", BROKEN)
def test_self_check_finds_a_wrong_kernel(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wrong" in failed_check(CKernel(library_of(tmp_path, monkeypatch, BROKEN[broken])))


def test_choice_wrong_copy_falls_back_to_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, line = chosen_with(library_of(tmp_path, monkeypatch, BROKEN["cached"]), tmp_path)
    assert name == "python"
    assert "native kernel not used: wrong copy" in line


@pytest.mark.parametrize("change", [("VERSION = 2", "VERSION = 3"), ("kvn_version", "kvn_other")], ids=["newer", "unversioned"])
def test_choice_other_version_falls_back_to_python(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, line = chosen_with(library_of(tmp_path, monkeypatch, ("kernel.c", *change)), tmp_path)
    assert name == "python"
    assert "another version" in line


def test_choice_unknown_name_falls_back_to_python(library: Path, tmp_path: Path) -> None:
    name, line = chosen_with(library, tmp_path, named="unknown")
    assert name == "python"
    assert "no kernel 'unknown'" in line


def test_choice_without_library_logs_a_warning(tmp_path: Path) -> None:
    name, line = chosen_with(None, tmp_path)
    assert name == "python"
    assert "native kernel not used" in line
