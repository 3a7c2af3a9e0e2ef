"""Host memory of vLLM's offloading that a killed engine leaves behind is removed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.connector.engine_process import EngineProcess
from kvstore.testing.connector.offload_files import FOLDER, OffloadFiles
from rig import engine_child


@dataclass(frozen=True)
class MappingDriver:
    """Opens engines that only map host memory as vLLM does."""

    path: Path
    fails: bool = False
    block_tokens: int = 32

    def open(self, _store: StoreAddress | None, _options: Mapping[str, object]) -> Any:
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR)
        os.ftruncate(fd, mmap.PAGESIZE)
        memory = mmap.mmap(fd, mmap.PAGESIZE)
        globals()["kept"] = memory
        if self.fails:
            raise OSError("the engine does not start")
        return memory


@pytest.fixture
def path() -> Path:
    return FOLDER / f"vllm_offload_{uuid4()}.mmap"


@pytest.mark.parametrize("ends", ["kill", "close"])
def test_engine_process_ended_leaves_no_host_memory(path: Path, ends: str) -> None:
    process = EngineProcess(MappingDriver(path), None, {})
    assert path.exists()
    getattr(process, ends)()
    assert not path.exists()


def test_engine_process_failed_start_leaves_no_host_memory(path: Path) -> None:
    with pytest.raises(Exception, match="does not start"):
        EngineProcess(MappingDriver(path, fails=True), None, {})
    assert not path.exists()


def test_engine_child_dead_leaves_no_host_memory(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has mapped host memory, answers once and is killed by something else."""
    script = tmp_path / "child.py"
    script.write_text(
        f"import mmap, os\nfd = os.open({str(path)!r}, os.O_CREAT | os.O_RDWR)\n"
        "os.ftruncate(fd, 4096)\nmemory = mmap.mmap(fd, 4096)\ninput()\nprint('{}', flush=True)\ninput()\nos.abort()\n"
    )
    monkeypatch.setattr(engine_child, "HERE", script)
    with engine_child.EngineChild(tmp_path, None, tmp_path / "log") as child:
        child.ask("nothing")
        assert path.exists()
        with pytest.raises(RuntimeError, match="exited"):
            child.ask("nothing")
    assert not path.exists()


def test_offload_files_of_others_stay(path: Path) -> None:
    files = OffloadFiles()
    path.touch()
    try:
        files.note(os.getpid())
        assert files.remove() == 0
        assert path.exists()
    finally:
        path.unlink()
    files.note(2**22 + 1)  # no such process
