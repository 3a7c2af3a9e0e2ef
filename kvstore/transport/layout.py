"""Memory layout of a block buffer: the bytes of some blocks, in as few contiguous pieces as possible.

Transports ask for thousands of blocks per call, so the layout of dense buffers is computed with arrays instead of block by block.
There are two views of the same memory: ``pieces`` are memoryviews, for sockets; ``addresses`` are numbers, for ``memmove``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

Positions = npt.NDArray[np.int64]


class Layout:
    """Memory layout of one block buffer.

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
        self._memory = memoryview(cast("Buffer", region))

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


def address_of(piece: memoryview) -> int:
    """Return the address of a piece of memory. It is valid only while the piece is referenced."""
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0]) if len(piece) else 0


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
