"""Checksums: xxh3-64 (seed 0) of each layer block, as slot headers, catalogs and the data plane carry them.

A block's checksums are ``layers`` unsigned 64-bit integers; packed, they are little-endian. Larger blocks are hashed by the
native kernel without the interpreter lock, and tiny ones by xxhash, whose call is cheaper. Golden vectors:
``tests/core/golden/checksums.json``.

Range digests compare key sets without sending the keys. Key space has 4,096 ranges, by the first 12 bits of the key. The digest
of a range is the XOR of xxh3-64 (seed 0) over the 16-byte keys held in it: order does not matter, and each added or removed key
changes it by one XOR. The number of keys is sent with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.buffers import BlockBuffer, DenseBlocks, ScatteredBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, BlockShape
from kvstore.native import CopyBatch, address_of, hash_parts, run

ChecksumArray = npt.NDArray[np.uint64]
"""``[blocks, layers]``."""

_digest = xxhash.xxh3_64_intdigest
_NATIVE_FROM_BYTES: Final = 16 << 10


def layer_checksums(view: memoryview, shape: BlockShape) -> bytes:
    """Checksums of a full block, packed: little-endian uint64 a layer.

    Args:
        view: the full block, contiguous.
        shape: its shape.

    Raises:
        InvalidArgument: the view is not the size of one block.
    """
    return _packer(shape.layers)(*_block_digests(view, shape))


def verify(view: memoryview, shape: BlockShape, checksums: bytes) -> bool:
    """Whether a full block matches its packed checksums. Checksums of another length never match.

    Raises:
        InvalidArgument: the view is not the size of one block.
    """
    return layer_checksums(view, shape) == checksums


def block_checksums(buffer: BlockBuffer, blocks: Sequence[int]) -> ChecksumArray:
    """Checksums of some blocks of a buffer.

    Args:
        buffer: the memory.
        blocks: positions in it, e.g. ``range(8)``.

    Returns:
        uint64 ``[len(blocks), layers]``.
    """
    shape = buffer.shape
    found = np.empty((len(blocks), shape.layers), np.uint64)
    if isinstance(buffer, DenseBlocks) and shape.block_bytes and len(blocks) and min(buffer.array.strides) >= 0:
        which = np.asarray(blocks, np.int64)
        if not 0 <= int(which.min()) <= int(which.max()) < buffer.count:
            raise InvalidArgument("no such block in the buffer", blocks=(int(which.min()), int(which.max())), count=buffer.count)
        return _dense_checksums(buffer, which, found)
    if isinstance(buffer, ScatteredBlocks) and shape.block_bytes and len(blocks):
        views = [buffer.segments(block, 0, shape.layers)[0] for block in blocks]
        sources = np.fromiter(map(address_of, views), np.uint64, len(views))
        bounds = int(sources.min()), int(sources.max()) + shape.block_bytes
        run(CopyBatch(sources, None, bounds, size=shape.layer_block_bytes, parts=shape.layers), found.reshape(-1))
        return found
    pieces = [piece for block in blocks for piece in buffer.segments(block, 0, shape.layers)]
    return piece_checksums(pieces, shape.layer_block_bytes).reshape(found.shape)


def _dense_checksums(buffer: DenseBlocks, blocks: npt.NDArray[np.int64], found: ChecksumArray) -> ChecksumArray:
    shape, (block_stride, layer_stride, _) = buffer.shape, buffer.array.strides
    base = int(buffer.array.__array_interface__["data"][0])
    sources, parts = base + blocks * block_stride, shape.layers
    if shape.layers > 1 and layer_stride != shape.layer_block_bytes:
        sources, parts = (sources[:, None] + np.arange(shape.layers) * layer_stride).reshape(-1), 1
    end = base + (buffer.count - 1) * block_stride + (shape.layers - 1) * layer_stride + shape.layer_block_bytes
    run(CopyBatch(sources.view(np.uint64), None, (base, end), size=shape.layer_block_bytes, parts=parts), found.reshape(-1))
    return found


@cache
def _packer(layers: int) -> Callable[..., bytes]:
    """Return a function that packs that many checksums. Cached: making it costs more than packing (at most ``MAX_LAYERS``)."""
    return struct.Struct(f"<{layers}Q").pack


def _block_digests(view: memoryview, shape: BlockShape) -> list[int]:
    size, total = shape.layer_block_bytes, shape.block_bytes
    if view.nbytes != total:
        raise InvalidArgument("the view is not one block", bytes=view.nbytes, expected=total)
    if total >= _NATIVE_FROM_BYTES:
        found: list[int] = hash_parts(view, size).tolist()
        return found
    if shape.layers == 1:
        return [_digest(view)]
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    digest = _digest
    return [digest(view[start : start + size]) for start in range(0, total, size)]


def piece_checksums(pieces: Sequence[memoryview], size: int) -> npt.NDArray[np.uint64]:
    """Checksums of consecutive layer blocks that are already in memory, in one call of the native kernel.

    If a layer block consists of several pieces, xxhash computes all of them, and keeps the interpreter lock for short ones.

    Args:
        pieces: memory of whole layer blocks, in order; split anywhere.
        size: bytes of a layer block.
    """
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    if (lengths % size).any():
        hasher = LayerHasher(size, int(lengths.sum()) // size)
        hasher.update(pieces)
        return hasher.digests()
    counts = lengths // size
    found = np.empty(int(counts.sum()), np.uint64)
    if not len(found):
        return found
    starts = np.fromiter(map(address_of, pieces), np.int64, len(pieces))
    # position of each layer block in its piece
    inside = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    sources = (np.repeat(starts, counts) + inside * size).view(np.uint64)
    run(CopyBatch(sources, None, (int(sources.min()), int(sources.max()) + size), size=size), found)
    return found


_NATIVE_FROM_PARTS: Final = 16
"""Pieces of fewer layer blocks, such as the segments of a TCP connection that carries long ones, are hashed by xxhash. It keeps
the interpreter lock for microseconds. A call of the native kernel gives the lock up and has to wait for it, which costs about as
much as it saves until so many calls of xxhash are replaced.
"""


class LayerHasher:
    """Makes xxh3-64 checksums of consecutive layer blocks.

    Args:
        size: bytes of a layer block.
        count: expected number of layer blocks.
    """

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        self._digests = np.empty(count, np.uint64)
        self._done = 0
        self._partial = xxhash.xxh3_64()
        self._partial_bytes = 0

    def update(self, pieces: Sequence[memoryview]) -> None:
        """Hash the next bytes of the stream."""
        size = self._size
        for piece in pieces:
            at = 0
            if self._partial_bytes == 0 and (whole := len(piece) // size):
                at = whole * size
                self._add_whole(piece[:at], whole)
            while at < len(piece):
                part = piece[at : at + size - self._partial_bytes]
                self._partial.update(part)
                at += len(part)
                self._partial_bytes += len(part)
                if self._partial_bytes == size:
                    self._append(self._partial.intdigest())
                    self._partial.reset()
                    self._partial_bytes = 0

    def _add_whole(self, piece: memoryview, count: int) -> None:
        if count < _NATIVE_FROM_PARTS:
            for at in range(0, len(piece), self._size):
                self._append(_digest(piece[at : at + self._size]))
            return
        assert self._done + count <= len(self._digests), "the pieces are longer than the layer blocks"
        self._digests[self._done : self._done + count] = hash_parts(piece, self._size)
        self._done += count

    def _append(self, digest: int) -> None:
        self._digests[self._done] = digest
        self._done += 1

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return one checksum per layer block, after all bytes have been hashed."""
        assert self._done == len(self._digests), "the pieces must be as long as the layer blocks"
        assert not self._partial_bytes, "the last layer block is incomplete"
        return self._digests


def key_range(key: BlockKey) -> int:
    """Range of key space (0 to 4,095) that contains a key."""
    return key[0] << 4 | key[1] >> 4


def digest_keys(keys: Iterable[BlockKey]) -> int:
    """Digest of one range: XOR of xxh3-64 over its keys; 0 for an empty range."""
    digest = 0
    for key in keys:
        digest ^= _digest(key)
    return digest
