"""Checksums of Layer Blocks in a stream of bytes that arrives in pieces."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

_SMALL_BYTES = 32 << 10
_digest = xxhash.xxh3_64_intdigest
_small_hashes = threading.Lock()
"""Threads that hash short Layer Blocks take turns. xxhash releases the interpreter lock for every call, however short, and
several threads would spend their time on passing the lock around (measured: seven times slower with two threads)."""


class LayerHasher:
    """Makes xxh3-64 checksums of consecutive Layer Blocks.

    Args:
        size: bytes of a Layer Block.
        count: expected number of Layer Blocks.
    """

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        self._count = count
        self._digests: list[int] = []
        self._partial = xxhash.xxh3_64()
        self._partial_bytes = 0

    def update(self, pieces: Sequence[memoryview]) -> None:
        """Hash the next bytes of the stream."""
        if self._size < _SMALL_BYTES:
            with _small_hashes:
                self._update(pieces)
        else:
            self._update(pieces)

    def _update(self, pieces: Sequence[memoryview]) -> None:
        size, digest = self._size, _digest
        for piece in pieces:
            if self._partial_bytes == 0 and len(piece) % size == 0:
                if len(piece) == size:
                    self._digests.append(digest(piece))
                else:
                    self._digests += [digest(piece[at : at + size]) for at in range(0, len(piece), size)]
                continue
            at = 0
            while at < len(piece):
                part = piece[at : at + size - self._partial_bytes]
                self._partial.update(part)
                at += len(part)
                self._partial_bytes += len(part)
                if self._partial_bytes == size:
                    self._digests.append(self._partial.intdigest())
                    self._partial.reset()
                    self._partial_bytes = 0

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return one checksum per Layer Block, after all bytes have been hashed."""
        assert len(self._digests) == self._count, "the pieces must be as long as the Layer Blocks"
        return np.array(self._digests, np.uint64)
