"""Caller-owned memory as blocks: the destination of a load and the source of a store.

A *block buffer* gives, for block ``i`` and a range of layers, the contiguous pieces of memory that hold those bytes, in
order. All transfers (shared-memory copies, the data plane, NVMe) use this one protocol, so they do not depend on the layout:
one large tensor, a list of pages, or a layer-major cache.

The caller owns the memory and must keep it allocated, at the same address, until the operation has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.native import address_of

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


@runtime_checkable
class BlockBuffer(Protocol):
    """Memory for ``count`` blocks of one shape."""

    @property
    def count(self) -> int:
        """How many blocks there is memory for."""

    @property
    def shape(self) -> BlockShape:
        """The size of each."""

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        """Memory of layers ``[first_layer, first_layer + layer_count)`` of a block: contiguous pieces in order, few as can be."""


class DenseBlocks:
    """Blocks in one array ``[blocks, layers, layer_block_bytes]``, uint8, last axis contiguous, the others of any stride.

    A plain ``[blocks * block_bytes]`` buffer is the common case; a layer-major cache is the transposed view of
    ``[layers, blocks, bytes]``.
    """

    def __init__(self, array: Bytes) -> None:
        if array.ndim != 3 or array.dtype != np.uint8 or (array.size and array.shape[2] > 1 and array.strides[2] != 1):
            raise InvalidArgument(
                "blocks must be a uint8 array [blocks, layers, layer_block_bytes] whose last axis is contiguous",
                shape=array.shape,
                strides=array.strides,
                dtype=array.dtype,
            )
        self.array = array
        self.count = int(array.shape[0])
        self.shape = BlockShape(array.shape[1], array.shape[2])
        self._whole = array.shape[1] == 1 or array.strides[1] == array.shape[2]
        # one memoryview over everything makes a piece one cheap slice, where memory is plain
        plain = self._whole and array.flags.c_contiguous and array.size > 0
        self._flat: memoryview | None = array.reshape(-1).data if plain else None

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        size = self.shape.layer_block_bytes
        if self._flat is not None:
            at = block * self.shape.block_bytes + first_layer * size
            return (self._flat[at : at + layer_count * size],)
        layers = self.array[block, first_layer : first_layer + layer_count]
        if self._whole:
            return (layers.reshape(-1).data,)
        return [layer.data for layer in layers]


class ScatteredBlocks:
    """Blocks in separate pieces of memory, each one contiguous full block."""

    def __init__(self, blocks: Sequence[memoryview], shape: BlockShape) -> None:
        for position, view in enumerate(blocks):
            if view.nbytes != shape.block_bytes or view.format != "B" or not view.c_contiguous:
                raise InvalidArgument(
                    "each block must be one contiguous byte view of a full block",
                    position=position,
                    nbytes=view.nbytes,
                    expected=shape.block_bytes,
                )
        self._blocks = blocks
        self.count = len(blocks)
        self.shape = shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        view = self._blocks[block]
        if layer_count == self.shape.layers:
            return (view,)
        size = self.shape.layer_block_bytes
        return (view[first_layer * size : (first_layer + layer_count) * size],)


class Layout:
    """Memory layout of one block buffer: the bytes of some blocks, in as few contiguous pieces as possible.

    Transports ask for thousands of blocks per call, so the layout of dense buffers is computed with arrays instead of block by
    block. There are two views of the same memory: ``pieces`` are memoryviews, for sockets; ``addresses`` are numbers, for
    ``memmove``.

    Args:
        buffer: the memory.
        writable: whether the memory will be written to.

    Raises:
        InvalidArgument: the memory is read-only but must be writable.
    """

    def __init__(self, buffer: BlockBuffer, *, writable: bool) -> None:
        self.buffer = buffer
        self.shape = buffer.shape
        self._dense: _Strided | None = None
        if isinstance(buffer, DenseBlocks):
            if writable and not buffer.array.flags.writeable:
                raise InvalidArgument("the buffer is read-only")
            if buffer.array.size and min(buffer.array.strides) >= 0:
                self._dense = _Strided(buffer)

    @property
    def region(self) -> tuple[int, int] | None:
        """Address and length of the contiguous region that holds all blocks; None: there are several regions."""
        return None if self._dense is None else self._dense.region

    def pieces(self, blocks: Positions, first_layer: int, layer_count: int) -> list[memoryview]:
        """Return layers ``[first_layer, first_layer + layer_count)`` of some blocks, in order; adjacent memory is joined."""
        if not len(blocks):
            return []
        if self._dense is not None:
            return self._dense.pieces(blocks, first_layer, layer_count)
        found: list[memoryview] = []
        for block in blocks.tolist():
            found += self.buffer.segments(block, first_layer, layer_count)
        expected = len(blocks) * layer_count * self.shape.layer_block_bytes
        if sum(map(len, found)) != expected:
            raise InvalidArgument("the buffer's segments have another size than the layers", expected=expected)
        return found

    def addresses(self, blocks: Positions, first_layer: int, layer_count: int) -> tuple[Positions, Positions]:
        """Return addresses and lengths of the same bytes, not joined: no piece reaches from one block into the next."""
        if self._dense is not None:
            return self._dense.addresses(blocks, first_layer, layer_count)
        found = self.pieces(blocks, first_layer, layer_count)
        return np.fromiter(map(address_of, found), np.int64, len(found)), np.fromiter(map(len, found), np.int64, len(found))


class _Strided:
    """Offsets of blocks within the contiguous region of a dense array with positive strides."""

    def __init__(self, buffer: DenseBlocks) -> None:
        array = buffer.array
        self._block_stride, self._layer_stride, _ = array.strides
        self._layer_bytes = array.shape[2]
        self._contiguous = array.shape[1] == 1 or self._layer_stride == self._layer_bytes
        extent = (
            sum((size - 1) * stride for size, stride in zip(array.shape[:2], array.strides[:2], strict=True)) + self._layer_bytes
        )
        # the region includes bytes between the array's rows, to which no offset points
        region = np.lib.stride_tricks.as_strided(
            array.reshape(-1)[:1] if array.flags.c_contiguous else array[0, 0, :1], (extent,), (1,)
        )
        self._base = int(region.__array_interface__["data"][0])
        self.region = (self._base, extent)
        self._memory = region.data

    def _offsets(self, blocks: Positions, first_layer: int, layer_count: int) -> tuple[Positions, int]:
        starts = blocks * self._block_stride + first_layer * self._layer_stride
        if self._contiguous:
            return starts, layer_count * self._layer_bytes
        return (starts[:, None] + np.arange(layer_count) * self._layer_stride).reshape(-1), self._layer_bytes

    def addresses(self, blocks: Positions, first_layer: int, layer_count: int) -> tuple[Positions, Positions]:
        offsets, size = self._offsets(blocks, first_layer, layer_count)
        return offsets + self._base, np.full(len(offsets), size, np.int64)

    def pieces(self, blocks: Positions, first_layer: int, layer_count: int) -> list[memoryview]:
        offsets, size = self._offsets(blocks, first_layer, layer_count)
        heads = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - size - 1) != size)
        starts = offsets[heads]
        ends = offsets[np.append(heads[1:], len(offsets)) - 1] + size
        memory = self._memory
        return [memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def positions(blocks: Sequence[int] | Positions | None, count: int) -> Positions:
    """Return block positions as an array; None means all blocks.

    Raises:
        InvalidArgument: a position is outside the buffer.
    """
    if blocks is None:
        return np.arange(count, dtype=np.int64)
    found = np.asarray(blocks, np.int64)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise InvalidArgument("block position outside the buffer", count=count)
    return found
