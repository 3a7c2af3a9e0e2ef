"""The limit of NVMe through the store: threads that move as many bytes between a caller's memory, space of their own and a file.

A store copies each block into space that is aligned, sums it before and after, writes it with O_DIRECT, and ends with one
fdatasync; client and node share this work. A load reads each block into the space, sums it, and copies it to the
caller. As many threads as the volume has. No keys, slots, catalog, processes or outcomes, and the sums are compared with nothing:
the figure is the cost of disk, memory and sums.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash


class SummedFile:
    """A file of ``nbytes``, as much space, and as much memory of a caller's.

    Args:
        file: made here, on the filesystem that is measured; removed by ``close``.
        nbytes: its size, a multiple of all block sizes.
        piece_bytes: bytes per sum, one layer block.
        threads: that many blocks are under way.

    Raises:
        OSError: the filesystem does not support O_DIRECT, or is full.
    """

    def __init__(self, file: Path, nbytes: int, piece_bytes: int, threads: int) -> None:
        self._file = file
        self._piece_bytes = piece_bytes
        self._caller = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
        # huge pages, as in the node's arena: scattered pages would cut the requests into small ones. Shared memory gets none so.
        self._pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.space = np.frombuffer(self._pages, np.uint8)
        """Memory that the file is read into and written from."""
        self.space[:] = 0
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._pool = ThreadPoolExecutor(threads)
        self.write_durable(nbytes)  # laid out, as a slab is

    def write_durable(self, block_bytes: int) -> None:
        """Write all blocks."""
        self._each(block_bytes, self._write)
        os.fdatasync(self._fd)

    def read(self, block_bytes: int) -> None:
        """Read all blocks."""
        self._each(block_bytes, self._read)

    def _each(self, block_bytes: int, work: Callable[[int, int], None]) -> None:
        starts = range(0, self._caller.nbytes, block_bytes)
        for _ in self._pool.map(work, starts, [block_bytes] * len(starts)):
            pass

    def _write(self, start: int, length: int) -> None:
        space = self.space[start : start + length]
        self._sum(self._caller[start : start + length])
        np.copyto(space, self._caller[start : start + length])
        self._sum(space)
        if os.pwrite(self._fd, space.data, start) != length:
            raise OSError(f"a block at {start} was not written whole")

    def _read(self, start: int, length: int) -> None:
        space = self.space[start : start + length]
        if os.preadv(self._fd, [space.data], start) != length:
            raise OSError(f"a block at {start} was not read whole")
        self._sum(space)
        np.copyto(self._caller[start : start + length], space)

    def _sum(self, block: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        view = block.data
        for at in range(0, len(view), self._piece_bytes):
            xxhash.xxh3_64_intdigest(view[at : at + self._piece_bytes])

    def close(self) -> None:
        """Stop the threads and remove the file."""
        self._pool.shutdown()
        os.close(self._fd)
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
