"""Kernels under test: the one in Python and each variant of the compiled one that this processor runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import build_kernel
import pytest

from kvstore.native.batch import Kernel
from kvstore.native.c_kernel import CKernel
from kvstore.native.python_kernel import PythonKernel


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel, compiled for these tests only: its variant is chosen per library, not per object."""
    made = tmp_path_factory.mktemp("kernel") / "_kernel.so"
    reason = build_kernel.build(made)
    if reason == build_kernel.NO_COMPILER:
        pytest.skip(reason)
    assert not reason, reason
    return made


@pytest.fixture(params=["python", "portable", *(["neon"] if platform.machine() == "aarch64" else ["avx2", "avx512"])])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Each kernel in turn; variants that this processor lacks are skipped."""
    if request.param == "python":
        yield PythonKernel()
        return
    library = request.getfixturevalue("library")
    if request.param not in CKernel(library).variants:
        pytest.skip(f"this processor has no {request.param}")
    yield CKernel(library, request.param)
