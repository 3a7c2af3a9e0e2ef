"""The I/O engines pass their suite: posix here; gds in separate processes, with a stand-in for the CUDA driver."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.lab.stub_cuda import build_stub, with_stub
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import IoEngineSuite
from kvstore.tiers.io_engines.contract import IoEngine
from kvstore.tiers.io_engines.posix import PosixFile

HERE = Path(__file__).parent


class TestPosixFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        return PosixFile(path, direct=True, writable=False, counters=counters)


class TestBufferedPosixFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        return PosixFile(path, direct=False, writable=True, counters=counters)


@pytest.mark.parametrize(("cases", "with_device"), [("gds_stub_cases.py", False), ("gds_device_cases.py", True)])
def test_kvikio_without_gpu_passes_suite(cases: str, with_device: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("THE GDS ENGINE WAS NOT TESTED: kvikio is not installed (make install)")
    stub = build_stub(tmp_path, with_device=with_device)
    if stub is None:
        pytest.skip("THE GDS ENGINE WAS NOT TESTED: there is no C compiler for the stand-in of libcuda.so.1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cases'}", str(HERE / cases)],
        env=with_stub(stub) | {"PYTEST_ADDOPTS": ""},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
