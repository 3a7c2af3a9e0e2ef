"""The I/O engines pass their suite: posix here; gds in separate processes, with a stand-in for the CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import IoEngineSuite
from kvstore.tiers.io_engines.contract import IoEngine
from kvstore.tiers.io_engines.posix import PosixFile
from support.stub_cases import run_stub_cases

HERE = Path(__file__).parent


class TestPosixFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        return PosixFile(path, direct=True, writable=False, counters=counters)


class TestBufferedPosixFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        return PosixFile(path, direct=False, writable=True, counters=counters)


@pytest.mark.parametrize(("cases", "with_device"), [("gds_stub_cases.py", False), ("gds_device_cases.py", True)])
def test_kvikio_without_gpu_passes_suite(cases: str, with_device: bool, tmp_path: Path) -> None:
    run_stub_cases(HERE / cases, tmp_path, with_device=with_device)
