"""A batch of pieces of memory, and the contract of the kernels that work on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.uint64]

STREAM_FROM_BYTES: Final = 32 << 20
"""Copies of this size or more are stored past the caches, most of which would not hold them. At 16 MiB, both ways are about as
fast; a shorter copy is faster if it stays in the cache.
"""
THREAD_BYTES: Final = 4 << 20
"""Minimum share of a thread: starting one takes as long as copying half a megabyte."""


class Rejected(ValueError):
    """A batch is wrong; no byte was moved."""


@dataclass(slots=True)
class CopyBatch:
    """Pieces of memory. The caller keeps all of it allocated until the call returns.

    The caller also ensures that no target shares a byte with another target or with the source of another piece: threads copy
    pieces in any order, so such bytes would be undefined. Buffers of callers are checked before they become tables
    (``kvclient/memory/buffers.py``), and slots of an arena do not overlap. The kernels reject only a piece that overlaps its
    own copy: to compare all pieces, they would have to sort them in each call.

    Attributes:
        sources: address of each piece.
        targets: address of its copy; None: the pieces are only hashed.
        source_bounds: lowest address of the sources, and the first one after them. A piece outside is rejected.
        target_bounds: the same for the targets.
        size: bytes of each part.
        parts: consecutive parts of each piece, with one checksum each.
        lengths: bytes of each piece, in place of ``parts * size``; only for copies without checksums.
        threads: maximum number of threads, including the caller's.
        stream_from: a copy of so many bytes or more is stored past the caches.
    """

    sources: Addresses
    targets: Addresses | None
    source_bounds: tuple[int, int]
    target_bounds: tuple[int, int] = (0, 0)
    size: int = 0
    parts: int = 1
    lengths: Addresses | None = None
    threads: int = 1
    stream_from: int = STREAM_FROM_BYTES

    def __post_init__(self) -> None:
        for table in (self.sources, self.targets, self.lengths):
            if table is not None and (table.dtype != np.uint64 or table.shape != self.sources.shape or table.ndim != 1):
                raise Rejected("the tables of a batch must be uint64 arrays of one length")
        if self.parts < 1 or self.size < 0 or self.parts * self.size >= 1 << 63 or (self.lengths is not None and self.parts != 1):
            raise Rejected(f"parts={self.parts} must be at least 1, or 1 with lengths; size={self.size} must not be negative")


class Kernel(Protocol):
    """Does the work of a batch."""

    @property
    def name(self) -> str:
        """Short name, for logs and metrics."""

    def hash(self, view: memoryview, size: int) -> Sums:
        """Return the checksums of consecutive parts of ``size`` bytes of contiguous memory, which has at least one part."""

    def run(self, batch: CopyBatch, sums: Sums | None = None) -> None:
        """Copy the pieces, fill ``sums`` (``[pieces * parts]``, contiguous) with checksums of the copied bytes, or both.

        Raises:
            Rejected: a piece is outside its bounds or overlaps its own copy, or there is nothing to do. No byte was moved.
        """


def check_sums(batch: CopyBatch, sums: Sums | None) -> None:
    """Raise ``Rejected`` if the checksums do not fit the batch."""
    if sums is None:
        if batch.targets is None:
            raise Rejected("neither copies nor checksums are requested")
        return
    if batch.lengths is not None:
        raise Rejected("checksums require parts of one size")
    if sums.dtype != np.uint64 or sums.shape != (len(batch.sources) * batch.parts,) or not sums.flags.c_contiguous:
        raise Rejected("one uint64 checksum per part is required")
    if not sums.flags.writeable:
        raise Rejected("the checksums are read-only")


def address_of(memory: memoryview) -> int:
    """Return the address of contiguous memory. It is valid only while the memory is referenced."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]) if memory.nbytes else 0


def bounds_of(memory: memoryview) -> tuple[int, int]:
    """Return the bounds of contiguous memory."""
    at = address_of(memory)
    return at, at + memory.nbytes
