"""The kernel of this process: chosen once, at import.

``KVSTORE_NATIVE`` names a kernel (``python``, ``portable``, ``avx2``, ``neon``), to compare them or to exclude one.
"""

from __future__ import annotations

import os

import numpy as np
import xxhash

from kvstore.native.batch import CopyBatch, Kernel, Sums, address_of
from kvstore.native.c_kernel import CKernel
from kvstore.native.python_kernel import PythonKernel

_SAMPLE = bytes(range(256)) * 17
_fallback = PythonKernel()


def _choose() -> Kernel:
    wanted = os.environ.get("KVSTORE_NATIVE") or None
    if wanted == _fallback.name:
        return _fallback
    try:
        kernel = CKernel(variant=wanted)
    except OSError:
        return _fallback
    view = memoryview(_SAMPLE)
    # a library that was built wrongly must not decide which bytes are right
    good = (_hashed(kernel, view, len(view)) == xxhash.xxh3_64_intdigest(view)).all()
    return kernel if good else _fallback


def _hashed(kernel: Kernel, view: memoryview, size: int) -> Sums:
    at = address_of(view)
    sums = np.empty(view.nbytes // size, np.uint64)
    kernel.run(CopyBatch(np.array([at], np.uint64), None, (at, at + view.nbytes), size=size, parts=len(sums)), sums)
    return sums


_chosen = _choose()


def kernel_name() -> str:
    """Name of this process's kernel: ``avx2``, ``neon``, ``portable`` or ``python`` (the slow one)."""
    return _chosen.name


def fallback_calls() -> int:
    """Calls of the Python kernel since the start."""
    return _fallback.calls


def run(batch: CopyBatch, sums: Sums | None = None) -> None:
    """Copy the pieces of a batch, compute checksums of their parts, or both; see ``Kernel.run``.

    Raises:
        Rejected: the batch is wrong; no byte was moved.
    """
    _chosen.run(batch, sums)


def hash_parts(view: memoryview, size: int) -> Sums:
    """Return the checksums of consecutive parts of ``size`` bytes of contiguous memory, which is not empty."""
    return _hashed(_chosen, view, size)
