"""Where blocks lie, as numbers that another process can be told: one address a block and the stride from layer to layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.transport.layout import Layout

Addresses = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint64]
"""``[pieces, 3]``: address, length, device: what NIXL calls a descriptor list."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory of some blocks; layer ``l`` of block ``i`` begins at ``addresses[i] + l * layer_stride``.

    Attributes:
        addresses: ``[blocks]``, of each block's first layer.
        layer_stride: bytes from one layer to the next; ``layer_bytes`` where they follow each other.
        layer_bytes: length of a Layer Block.
    """

    addresses: Addresses
    layer_stride: int
    layer_bytes: int

    @property
    def whole(self) -> bool:
        """Whether a block's layers follow each other."""
        return self.layer_stride == self.layer_bytes

    def pick(self, blocks: npt.NDArray[np.int64], first_layer: int) -> Landing:
        """Some of the blocks, from a layer on."""
        return Landing(
            self.addresses[blocks] + np.uint64(first_layer * self.layer_stride), self.layer_stride, self.layer_bytes
        )  # fmt: skip

    def extent(self, layers: int) -> tuple[int, int]:
        """First byte, and the one behind the last, of so many layers of all blocks."""
        if not len(self.addresses):
            return 0, 0
        span = (layers - 1) * self.layer_stride + self.layer_bytes
        return int(self.addresses.min()), int(self.addresses.max()) + span

    def rows(self, layers: int, *, whole: bool) -> Rows:
        """Descriptors of the first ``layers`` layers: one a block if ``whole``, else one a layer."""
        if whole:
            starts, length = self.addresses, layers * self.layer_bytes
        else:
            steps = np.arange(layers, dtype=np.uint64) * np.uint64(self.layer_stride)
            starts, length = (self.addresses[:, None] + steps).reshape(-1), self.layer_bytes
        rows = np.zeros((len(starts), 3), np.uint64)
        rows[:, 0] = starts
        rows[:, 1] = length
        return rows


def paired_rows(ours: Landing, theirs: Landing, layers: int) -> tuple[Rows, Rows]:
    """Descriptors of the same bytes on both sides, cut alike."""
    whole = ours.whole and theirs.whole
    return ours.rows(layers, whole=whole), theirs.rows(layers, whole=whole)


def landing_of(layout: Layout, count: int, first_layer: int, layer_count: int) -> Landing | None:
    """Where layers ``[first_layer, first_layer + layer_count)`` of a buffer's first ``count`` blocks lie; None: too irregular."""
    size = layout.shape.layer_block_bytes
    addresses, lengths = layout.addresses(np.arange(count, dtype=np.int64), first_layer, layer_count)
    found = addresses.astype(np.uint64)
    if len(found) == count and bool((lengths == layer_count * size).all()):
        return Landing(found, size, size)
    if len(found) == count * layer_count and bool((lengths == size).all()):
        grid = addresses.reshape(count, layer_count)
        stride = int(grid[0, 1] - grid[0, 0])
        if stride > 0 and bool((np.diff(grid, axis=1) == stride).all()):
            return Landing(np.ascontiguousarray(grid[:, 0]).astype(np.uint64), stride, size)
    return None


def row_after_row(address: int, count: int, layers: int, layer_bytes: int) -> Landing:
    """Blocks of so many layers that follow each other in memory."""
    return Landing(
        np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(layers * layer_bytes), layer_bytes, layer_bytes
    )  # fmt: skip


def move_rows(targets: Rows, sources: Rows) -> None:
    """Copies within this process, without the interpreter lock; both sides are cut alike."""
    for target, source, length in zip(targets[:, 0].tolist(), sources[:, 0].tolist(), sources[:, 1].tolist(), strict=True):
        ctypes.memmove(target, source, length)
