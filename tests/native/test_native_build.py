"""The kernel is compiled if a compiler exists; otherwise the store works more slowly, and reports it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import build_kernel
import make_wheels
import pytest

import kvstore.native
from kvstore.native.batch import STREAM_FROM_BYTES

CHECK = """
import numpy as np, sys, xxhash
sys.path.insert(0, {tests!r})
from batches import random_case, reject_broken, run_and_compare
from kvstore.native.c_kernel import CKernel
from pathlib import Path
first = CKernel(Path({library!r}))
for variant in first.variants:
    kernel, random = CKernel(Path({library!r}), variant), np.random.default_rng(3)
    for _ in range(200):
        run_and_compare(kernel, random_case(random))
        reject_broken(kernel, random)
print("compared", first.variants)
"""


def in_python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["", "/no/such/compiler", "false"])
def test_build_without_compiler_tells_why(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    assert build_kernel.build(tmp_path / "_kernel.so")
    assert not list(tmp_path.iterdir())


needs_ziglang = pytest.mark.skipif(
    find_spec("ziglang") is None,
    reason="NO CROSS COMPILER: wheels are not tested (make .venv/.stamp-ziglang fetches it)",
)


@needs_ziglang
@pytest.mark.parametrize("machine", make_wheels.MACHINES)
def test_kernel_cross_compiled_is_right(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own target is run as well, with each of its instruction sets."""
    library = tmp_path / "_kernel.so"
    monkeypatch.setenv("CC", make_wheels.compiler(machine))
    reason = build_kernel.build(library)
    assert not reason, reason
    if platform.machine() == machine:
        code = CHECK.format(tests=str(Path(__file__).parent), library=str(library))
        assert "compared" in in_python(code)


@needs_ziglang
@pytest.mark.thorough
def test_make_wheels_builds_all_machines(tmp_path: Path) -> None:
    subprocess.run([sys.executable, make_wheels.__file__, "--out", str(tmp_path)], check=True, timeout=200)
    wheels = {path.stem.rsplit("_2_17_", 1)[-1]: path for path in tmp_path.glob("*.whl")}
    assert set(wheels) == set(make_wheels.MACHINES)
    for path in wheels.values():
        assert "kvstore/native/_kernel.so" in zipfile.ZipFile(path).namelist()


def test_store_without_library_uses_python(tmp_path: Path) -> None:
    ours = Path(kvstore.native.__file__).parents[1]
    for package in ("native", "core"):
        shutil.copytree(ours / package, tmp_path / "kvstore" / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "kvstore" / "__init__.py").touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from kvstore import native
from kvstore.core.checksum import layer_checksums
from kvstore.core.types import BlockShape
assert layer_checksums(memoryview(bytes(65536)), BlockShape(2, 32768))
print(native.kernel_name(), native.fallback_calls())
"""
    assert in_python(code, PYTHONPATH="", KVSTORE_NATIVE="").split() == ["python", "1"]


def test_docs_name_the_size_stored_past_the_caches() -> None:
    page = Path(build_kernel.REPOSITORY, "docs/explanation/data-plane.md").read_text(encoding="utf-8")
    assert f"stores batches of {STREAM_FROM_BYTES >> 20} MiB or more past the caches" in page


def test_kernel_named_by_the_environment() -> None:
    assert in_python("import kvstore.native as native; print(native.kernel_name())", KVSTORE_NATIVE="python").strip() == "python"


def test_kernel_clean_under_sanitizers(tmp_path: Path) -> None:
    """Random batches, and those that must be rejected, with the address and undefined-behaviour sanitizers of gcc."""
    library = tmp_path / "_kernel.so"
    command = build_kernel.compiler()
    if command is None:
        pytest.skip(build_kernel.NO_COMPILER)
    reason = build_kernel.build(library, ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    if "cannot find" in reason or "libclang" in reason:
        pytest.skip("the compiler's sanitizers are not installed here")
    assert not reason, reason
    preloaded = subprocess.run(
        [*command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    code = CHECK.format(tests=str(Path(__file__).parent), library=str(library))
    assert "compared" in in_python(code, LD_PRELOAD=preloaded, ASAN_OPTIONS="detect_leaks=0")
