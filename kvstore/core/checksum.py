"""Checksums: xxh3-64 (seed 0) of each Layer Block, as slot headers, catalogs and the data plane carry them.

A block's checksums are ``layers`` unsigned 64-bit integers; packed, they are little-endian. xxhash lets go of the GIL for
buffers of some size, so that large blocks are checked by several threads at once; for tiny ones the loops below are what costs.
Golden vectors: ``tests/core/golden/checksums.json``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape

ChecksumArray = npt.NDArray[np.uint64]
"""``[blocks, layers]``."""

_digest = xxhash.xxh3_64_intdigest


def layer_checksums(view: memoryview, shape: BlockShape) -> bytes:
    """Checksums of a Full Block, packed: little-endian uint64 a layer.

    Args:
        view: the Full Block, contiguous.
        shape: its shape.

    Raises:
        InvalidArgument: the view is not the size of one block.
    """
    return _packer(shape.layers)(*_block_digests(view, shape))


def verify(view: memoryview, shape: BlockShape, checksums: bytes) -> bool:
    """Whether a Full Block matches its packed checksums. Checksums of another length never match.

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
    size = shape.layer_block_bytes
    digest = _digest
    digests: list[int] = []
    if isinstance(buffer, DenseBlocks) and (flat := buffer.flat) is not None:
        block_bytes = shape.block_bytes
        for block in blocks:
            at = block * block_bytes
            if not 0 <= at < flat.nbytes:
                raise InvalidArgument("no such block in the buffer", block=block, count=buffer.count)
            digests += [digest(flat[start : start + size]) for start in range(at, at + block_bytes, size)]
    else:
        for block in blocks:
            pieces = buffer.segments(block, 0, shape.layers)
            if len(pieces) == 1:
                digests += _block_digests(pieces[0], shape)
            else:
                digests += [_digest_of(buffer.segments(block, layer, 1)) for layer in range(shape.layers)]
    return np.array(digests, np.uint64).reshape(len(blocks), shape.layers)


@cache
def _packer(layers: int) -> Callable[..., bytes]:
    """Packs that many checksums; kept, for making the packer costs more than packing (at most ``MAX_LAYERS`` of them)."""
    return struct.Struct(f"<{layers}Q").pack


def _block_digests(view: memoryview, shape: BlockShape) -> list[int]:
    size, total = shape.layer_block_bytes, shape.block_bytes
    if view.nbytes != total:
        raise InvalidArgument("the view is not one Full Block", bytes=view.nbytes, expected=total)
    if shape.layers == 1:
        return [_digest(view)]
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    digest = _digest
    return [digest(view[start : start + size]) for start in range(0, total, size)]


def _digest_of(pieces: Sequence[memoryview]) -> int:
    """Checksum of one Layer Block, which may consist of several pieces."""
    if len(pieces) == 1:
        return _digest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()
