"""Runs of test files in a separate process that loads a stub of the CUDA driver."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.lab.stub_cuda import build_stub, with_stub

ROOT = Path(__file__).parents[2]


def run_stub_cases(cases: Path, folder: Path, *, with_device: bool = True) -> None:
    """Run a test file with a stub of libcuda.so.1. Skips the test if kvikio or a C compiler is missing.

    Args:
        cases: the file.
        folder: an empty folder for the stub and the files of the cases.
        with_device: whether the stub has a device, whose memory is host memory.
    """
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("KVIKIO WAS NOT TESTED: it is not installed (make install)")
    stub = build_stub(folder, with_device=with_device)
    if stub is None:
        pytest.skip("KVIKIO WAS NOT TESTED: there is no C compiler for the stand-in of libcuda.so.1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'cases'}", str(cases)],
        env=with_stub(stub) | {"PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
