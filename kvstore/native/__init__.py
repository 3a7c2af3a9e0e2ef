"""Copies and checksums of many pieces of memory in one call, without the interpreter lock.

A ``CopyBatch`` names pieces by address. ``run`` copies them, computes the xxh3-64 of their parts, or does both in one pass over
the bytes. A batch that is wrong is rejected before any byte moves.

The kernel is C (``kernel.c``), compiled when the package is built or installed. Without it, ``PythonKernel`` does the same,
slower, and counts its calls. Why not a library: none of awscrt, isal and numba fuses xxh3 with a copy, and
xxhash for Python hashes one piece per call and keeps the interpreter lock for pieces of up to 64 KiB.
"""

from kvstore.native.batch import CopyBatch, Kernel, Rejected, address_of, bounds_of
from kvstore.native.choice import describe, fallback_calls, hash_parts, kernel_name, run

__all__ = [
    "CopyBatch",
    "Kernel",
    "Rejected",
    "address_of",
    "bounds_of",
    "describe",
    "fallback_calls",
    "hash_parts",
    "kernel_name",
    "run",
]
