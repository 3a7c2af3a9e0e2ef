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

Bytes = npt.NDArray[np.uint8]


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
        self._shape = BlockShape(array.shape[1], array.shape[2])
        self._whole = array.shape[1] == 1 or array.strides[1] == array.shape[2]
        # one memoryview over everything makes a piece one cheap slice, where memory is plain
        plain = self._whole and array.flags.c_contiguous and array.size > 0
        self._flat: memoryview | None = array.reshape(-1).data if plain else None

    @property
    def count(self) -> int:
        return int(self.array.shape[0])

    @property
    def shape(self) -> BlockShape:
        return self._shape

    @property
    def flat(self) -> memoryview | None:
        """All blocks as one contiguous piece; None: they are not contiguous."""
        return self._flat

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        size = self._shape.layer_block_bytes
        if self._flat is not None:
            at = block * self._shape.block_bytes + first_layer * size
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
        self._shape = shape

    @property
    def count(self) -> int:
        return len(self._blocks)

    @property
    def shape(self) -> BlockShape:
        return self._shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        view = self._blocks[block]
        if layer_count == self._shape.layers:
            return (view,)
        size = self._shape.layer_block_bytes
        return (view[first_layer * size : (first_layer + layer_count) * size],)
