"""Addresses of blocks as numbers that can be sent to another process: one address per block, and the stride between layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import Layout
from kvstore.native import CopyBatch, run

Addresses = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint64]
"""``[pieces, 3]``: address, length, device. NIXL calls this a descriptor list."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    """Memory of some blocks. Layer ``l`` of block ``i`` begins at ``addresses[i] + l * layer_stride``.

    Attributes:
        addresses: ``[blocks]``: address of each block's first layer.
        layer_stride: bytes from the start of one layer to the next; ``layer_bytes`` if layers are contiguous.
        layer_bytes: bytes of a layer block.
    """

    addresses: Addresses
    layer_stride: int
    layer_bytes: int

    @property
    def contiguous(self) -> bool:
        """Whether the layers of a block are contiguous."""
        return self.layer_stride == self.layer_bytes

    def select(self, blocks: npt.NDArray[np.int64], first_layer: int) -> AddressTable:
        """Return the table of some blocks, from ``first_layer`` on."""
        return AddressTable(
            self.addresses[blocks] + np.uint64(first_layer * self.layer_stride), self.layer_stride, self.layer_bytes
        )  # fmt: skip

    def extent(self, layers: int) -> tuple[int, int]:
        """Return begin and end of the address range that holds the first ``layers`` layers of all blocks."""
        if not len(self.addresses):
            return 0, 0
        span = (layers - 1) * self.layer_stride + self.layer_bytes
        return int(self.addresses.min()), int(self.addresses.max()) + span

    def rows(self, layers: int, *, contiguous: bool) -> Rows:
        """Return descriptors of the first ``layers`` layers: one per block if ``contiguous``, else one per layer."""
        if contiguous:
            starts, length = self.addresses, layers * self.layer_bytes
        else:
            steps = np.arange(layers, dtype=np.uint64) * np.uint64(self.layer_stride)
            starts, length = (self.addresses[:, None] + steps).reshape(-1), self.layer_bytes
        rows = np.zeros((len(starts), 3), np.uint64)
        rows[:, 0] = starts
        rows[:, 1] = length
        return rows


def paired_rows(ours: AddressTable, theirs: AddressTable, layers: int) -> tuple[Rows, Rows]:
    """Return descriptors of the same bytes on both sides, with equal lengths."""
    contiguous = ours.contiguous and theirs.contiguous
    return ours.rows(layers, contiguous=contiguous), theirs.rows(layers, contiguous=contiguous)


def address_table_of(layout: Layout, count: int, first_layer: int, layer_count: int) -> AddressTable | None:
    """Return the table of layers ``[first_layer, first_layer + layer_count)`` of the first ``count`` blocks of a buffer.

    None: the layer stride of the buffer is not constant.
    """
    size = layout.shape.layer_block_bytes
    addresses, lengths = layout.addresses(np.arange(count, dtype=np.int64), first_layer, layer_count)
    found = addresses.astype(np.uint64)
    if len(found) == count and bool((lengths == layer_count * size).all()):
        return AddressTable(found, size, size)
    if len(found) == count * layer_count and bool((lengths == size).all()):
        grid = addresses.reshape(count, layer_count)
        stride = int(grid[0, 1] - grid[0, 0])
        if stride > 0 and bool((np.diff(grid, axis=1) == stride).all()):
            return AddressTable(np.ascontiguousarray(grid[:, 0]).astype(np.uint64), stride, size)
    return None


def consecutive_blocks(address: int, count: int, layers: int, layer_bytes: int) -> AddressTable:
    """Return the table of blocks that are contiguous in memory from ``address`` on."""
    return AddressTable(
        np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(layers * layer_bytes), layer_bytes, layer_bytes
    )  # fmt: skip


def copy_rows(targets: Rows, sources: Rows) -> None:
    """Copy within this process, in one call of the native kernel. Both sides must have equal lengths."""
    if not len(targets):
        return
    lengths = np.ascontiguousarray(sources[:, 1])
    (to, target_bounds), (start, source_bounds) = _ends(targets), _ends(sources)
    run(CopyBatch(start, to, source_bounds, target_bounds, lengths=lengths))


def _ends(rows: Rows) -> tuple[Addresses, tuple[int, int]]:
    """Return the addresses of descriptors, and their lowest address with the first one after them."""
    return np.ascontiguousarray(rows[:, 0]), (int(rows[:, 0].min()), int((rows[:, 0] + rows[:, 1]).max()))
