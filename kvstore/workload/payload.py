"""Self-checking payloads: the bytes of a block are derived from its key, so every loaded byte can be checked.

Word ``j`` (8 bytes) of a block is ``PAD[j] xor word (j mod 2) of the key``, with PAD a fixed pseudo-random sequence. Bytes of
another block differ by the key, bytes of another position in the block by PAD: shifted, swapped, foreign, stale or torn content
is always detected. Filling and checking are one pass each over cache-sized tiles, in numpy, without the interpreter lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import KEY_BYTES, BlockKey

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]

MIN_BLOCK_BYTES = KEY_BYTES
_PAD_SEED = 0x6B76_7374_6F72_6531
_TILE_WORDS = 32 << 10
"""Words per tile: with its scratch copy a tile fits into the second-level cache."""
_PATTERN_WORDS = 64
"""The key is repeated to this many words, so that inner loops are long."""


class Payloads:
    """Payloads of blocks of one size.

    Args:
        block_bytes: bytes of a full block, at least 16, any number.
    """

    def __init__(self, block_bytes: int) -> None:
        if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES:
            raise InvalidArgument(
                "block size is out of range", block_bytes=block_bytes, at_least=MIN_BLOCK_BYTES, at_most=MAX_BLOCK_BYTES
            )
        self.block_bytes = block_bytes
        self._words = block_bytes // KEY_BYTES * 2
        pad = _pad(block_bytes)
        self._pad = pad[: self._words]
        self._tail_pad = pad[self._words :].view(np.uint8)[: block_bytes - self._words * 8]

    def fill(self, keys: Sequence[BlockKey] | bytes, out: Bytes) -> None:
        """Write the payloads of ``keys`` into ``out [len(keys), block_bytes]``."""
        words, tails = self._parts(out)
        key_words = self._key_words(keys, len(out))
        for rows, columns, width in self._tiles(len(out)):
            pattern = np.tile(key_words[rows], (1, width // 2))
            tile = words[rows, columns]
            shape = (tile.shape[0], -1, width)
            if tile.flags.c_contiguous or tile.shape[0] == 1:
                np.bitwise_xor(self._pad[columns].reshape(-1, width), pattern[:, None, :], out=tile.reshape(shape))
            else:  # reshaping strided rows would write into a copy
                tile[...] = np.bitwise_xor(self._pad[columns].reshape(-1, width), pattern[:, None, :]).reshape(tile.shape)
        if tails.shape[1]:
            np.bitwise_xor(self._tail_pad, key_words.view(np.uint8)[:, : tails.shape[1]], out=tails)

    def wrong_blocks(self, keys: Sequence[BlockKey] | bytes, data: Bytes) -> list[int]:
        """Positions, ascending, of the blocks in ``data [len(keys), block_bytes]`` that differ from their payload in any byte."""
        words, tails = self._parts(data)
        key_words = self._key_words(keys, len(data))
        wrong = np.zeros(len(data), dtype=bool)
        scratch = np.empty(_TILE_WORDS, dtype=np.uint64)
        for rows, columns, width in self._tiles(len(data)):
            pattern = np.tile(key_words[rows], (1, width // 2))
            tile = words[rows, columns]
            bare = scratch[: tile.size].reshape(tile.shape)
            np.bitwise_xor(tile, self._pad[columns], out=bare)
            differs = bare.reshape(tile.shape[0], -1, width) != pattern[:, None, :]
            if differs.any():
                wrong[rows] |= differs.any(axis=(1, 2))
        if tails.shape[1]:
            expected = np.bitwise_xor(self._tail_pad, key_words.view(np.uint8)[:, : tails.shape[1]])
            wrong |= (tails != expected).any(axis=1)
        return [int(position) for position in np.flatnonzero(wrong)]

    def wrong_bytes(self, keys: Sequence[BlockKey] | bytes, data: Bytes) -> int:
        """Number of wrong bytes in ``data``. Slower than ``wrong_blocks``: the bytes of wrong blocks are counted."""
        wrong = self.wrong_blocks(keys, data)
        packed = _packed(keys)
        expected = np.empty((1, self.block_bytes), dtype=np.uint8)
        total = 0
        for position in wrong:
            self.fill(packed[position * KEY_BYTES : (position + 1) * KEY_BYTES], expected)
            total += int(np.count_nonzero(expected[0] != data[position]))
        return total

    def _parts(self, data: Bytes) -> tuple[_Words, Bytes]:
        """Split blocks into words, in whole multiples of the width of a key, and the up to 15 bytes after them."""
        if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] != self.block_bytes or (data.size and data.strides[1] != 1):
            raise InvalidArgument(
                "payloads must be a uint8 array [blocks, block_bytes] whose last axis is contiguous",
                shape=data.shape,
                block_bytes=self.block_bytes,
            )
        whole = self._words * 8
        return data[:, :whole].view(np.uint64), data[:, whole:]

    @staticmethod
    def _key_words(keys: Sequence[BlockKey] | bytes, count: int) -> _Words:
        packed = _packed(keys)
        if len(packed) != count * KEY_BYTES:
            raise InvalidArgument("the number of keys must equal the number of blocks", key_bytes=len(packed), blocks=count)
        return np.frombuffer(packed, dtype=np.uint64).reshape(count, 2)

    def _tiles(self, count: int) -> Iterator[tuple[slice, slice, int]]:
        """Divide ``[count, words]`` into tiles: rows, columns, and the words over which the key is repeated."""
        even = self._words - self._words % _PATTERN_WORDS
        for first, last in ((0, even), (even, self._words)):
            if first == last:
                continue
            columns = min(last - first, _TILE_WORDS)
            width = math.gcd(columns, _PATTERN_WORDS)
            rows = max(1, _TILE_WORDS // columns)
            for row in range(0, count, rows):
                for column in range(first, last, columns):
                    yield slice(row, min(row + rows, count)), slice(column, min(column + columns, last)), width


def _packed(keys: Sequence[BlockKey] | bytes) -> bytes:
    return keys if isinstance(keys, bytes) else b"".join(keys)


@lru_cache(maxsize=4)
def _pad(block_bytes: int) -> _Words:
    """The first words of PAD; a longer block's PAD begins with a shorter one's."""
    pad = np.random.Generator(np.random.PCG64(_PAD_SEED)).integers(0, 1 << 64, size=block_bytes // 8 + 2, dtype=np.uint64)
    pad.setflags(write=False)
    return pad
