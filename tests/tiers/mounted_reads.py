"""Reads of a node's volume into device memory, as an engine does them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.types import BlockShape, Outcome
from kvstore.testing.volume_suite import Item, items_for
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab


def stored(slab: NvmeSlab, shape: BlockShape, count: int) -> list[Item]:
    """Store blocks as their node does."""
    items = items_for(slab.allocate(shape, count) or [], range(count), shape)
    assert slab.write(items) == [None] * count
    return items


def read_into(
    mounted: MountedSlab, items: Sequence[Item], memories: Sequence[DeviceMemory], *, verify: bool = True
) -> list[Outcome]:
    """Read stored blocks, each into its memory."""
    record = items[0][1]
    wanted = [(other.key, slot, memory) for (slot, other, _), memory in zip(items, memories, strict=True)]
    return [outcome for outcome, _ in mounted.read_device(record.namespace, record.shape, wanted, verify=verify)]
