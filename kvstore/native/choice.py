"""The kernel of this process: chosen once, at import.

``KVSTORE_NATIVE`` names a kernel (``python``, ``portable``, ``avx2``, ``avx512``, ``neon``), to compare them or to exclude one. A
library that cannot be loaded, is of another version or fails the self-check is not used. The kernel in Python replaces it, and a
warning names the cause.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.native.batch import CopyBatch, Kernel, Rejected, Sums, bounds_of
from kvstore.native.c_kernel import CKernel
from kvstore.native.python_kernel import PythonKernel

_STREAM_FROM_BYTES: Final = 1 << 20
CASES: Final = ((1, 1), (100, 1), (240, 2), (241, 2), (4352, 1), (4352, 242), (_STREAM_FROM_BYTES + 1, 1))
"""Bytes of a part, and number of parts: each way to hash, and copies within the caches and past them."""
SHIFTS: Final = (0, 16, 1)
"""Distance of the copy from an address that is a multiple of ``ALIGNMENT``: each way to store."""
ALIGNMENT: Final = 64
MARGIN: Final = 256
"""Bytes before and after a copy, which must not change."""
POISON: Final = 0xA5


def failed_check(kernel: Kernel) -> str:
    """Return what a kernel does wrong in the self-check, or an empty text."""
    largest = max(size * parts for size, parts in CASES)
    sample = (np.arange(largest, dtype=np.uint32) * np.uint32(2_654_435_761) >> np.uint32(13)).astype(np.uint8)
    space = np.empty(largest + 2 * MARGIN + 2 * ALIGNMENT, np.uint8)
    first = -bounds_of(space.data)[0] % ALIGNMENT + MARGIN
    for size, parts in CASES:
        total = size * parts
        source = sample[:total]
        expected = [xxhash.xxh3_64_intdigest(source[at : at + size].data) for at in range(0, total, size)]
        for shift in SHIFTS:
            around = space[first + shift - MARGIN : first + shift + total + MARGIN]
            for sums in (None, np.zeros(parts, np.uint64)):
                what = f"{parts} parts of {size} bytes, shift {shift}"
                around[:] = POISON
                try:
                    kernel.run(_copy(source, around[MARGIN : MARGIN + total], size, parts), sums)
                except Rejected as error:
                    return f"rejected a right batch: {what}: {error}"
                if sums is not None and sums.tolist() != expected:
                    return f"wrong checksum: {what}"
                copied = np.array_equal(around[MARGIN : MARGIN + total], source)
                if not copied or (around[:MARGIN] != POISON).any() or (around[MARGIN + total :] != POISON).any():
                    return f"wrong copy: {what}"
        hashed: Sums = np.zeros(parts, np.uint64)
        bounds = bounds_of(source.data)
        kernel.run(CopyBatch(np.array([bounds[0]], np.uint64), None, bounds, size=size, parts=parts), hashed)
        if hashed.tolist() != expected or kernel.hash(source.data, size).tolist() != expected:
            return f"wrong checksum without a copy: {parts} parts of {size} bytes"
    return ""


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], size: int, parts: int) -> CopyBatch:
    (low, high), (to, end) = bounds_of(source.data), bounds_of(target.data)
    sources, targets = np.array([low], np.uint64), np.array([to], np.uint64)
    bounds = (low, high), (to, end)
    return CopyBatch(sources, targets, *bounds, size=size, parts=parts, stream_from=_STREAM_FROM_BYTES)


_log = logging.getLogger(__name__)
_fallback = PythonKernel()


def _choose() -> Kernel:
    wanted = os.environ.get("KVSTORE_NATIVE") or None
    if wanted == _fallback.name:
        return _fallback
    try:
        kernel = CKernel(variant=wanted)
        failure = failed_check(kernel)
    except (OSError, ValueError) as error:
        failure = str(error)
    if not failure:
        return kernel
    _log.warning("native kernel not used: %s (kernel=%s)", failure, _fallback.name)
    return _fallback


_chosen = _choose()


def kernel_name() -> str:
    """Name of this process's kernel: ``avx512``, ``avx2``, ``neon``, ``portable`` or ``python`` (the slow one)."""
    return _chosen.name


def fallback_calls() -> int:
    """Calls of the Python kernel since the start."""
    return _fallback.calls


def describe() -> str:
    """One line about this process's kernel, for the lists of I/O paths that servers show."""
    if _chosen is _fallback:
        return f"copies and checksums: in Python, several times slower ({fallback_calls():,} batches so far)"
    return f"copies and checksums: native kernel {kernel_name()}"


run = _chosen.run
"""Copy the pieces of a batch, compute checksums of their parts, or both; see ``Kernel.run``."""
hash_parts = _chosen.hash
"""Return the checksums of consecutive parts of contiguous memory; see ``Kernel.hash``."""
