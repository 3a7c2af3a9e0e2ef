"""The next demo removes files of a killed demo, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.embedded.temp_dirs import TempDir, sweep

OWNER = """
import sys
from pathlib import Path
from kvstore.embedded.temp_dirs import TempDir
folder = TempDir(sys.argv[1], Path(sys.argv[2]))
(folder.path / "volume").mkdir()
(folder.path / "volume" / "slab.kv").write_bytes(bytes(4096))
print(folder.path, flush=True)
sys.stdin.read()
"""


def owner(prefix: str, place: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", OWNER, prefix, str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("prefix", ["kvstore-", "kvstore-dual-", "kvs-"])
def test_scratch_of_killed_run_is_removed(tmp_path: Path, prefix: str) -> None:
    process, left = owner(prefix, tmp_path)
    with process:
        assert sweep(tmp_path) == [], "its owner lives"
        assert (left / "volume" / "slab.kv").exists()
        process.kill()
        process.wait(30)
    folder = TempDir(prefix, tmp_path)
    assert not left.exists()
    assert sweep(tmp_path) == [], "this process lives"
    folder.close()
    assert not folder.path.exists()


def test_scratch_other_files_are_kept(tmp_path: Path) -> None:
    process, left = owner("kvstore-", tmp_path)
    process.kill()
    process.communicate(timeout=30)
    strangers = [tmp_path / name for name in ("kvstore-abcdefgh", "kvs-12345678", "kvstore-notes", "mine")]
    for folder in strangers:
        folder.mkdir()
        (folder / "kept").touch()
    for name in ("kvstore-notes", "mine"):  # foreign names, even with the marker file
        (tmp_path / name / ".kvstore-owner").touch()
    (strangers[1] / ".kvstore-owner").symlink_to(left / ".kvstore-owner")
    linked = tmp_path / "kvstore-linked__"
    linked.symlink_to(left)
    if os.getuid() == 0:
        theirs = tmp_path / "kvstore-theirs__"
        theirs.mkdir()
        (theirs / ".kvstore-owner").touch()
        os.chown(theirs, 65_534, 65_534)
        strangers.append(theirs)
    assert sweep(tmp_path) == [left]
    assert linked.is_symlink()
    assert all(folder.is_dir() for folder in strangers)
    assert all((folder / "kept").exists() for folder in strangers[:4])
