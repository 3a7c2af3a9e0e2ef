"""Slots of the arena for new blocks: evicts and writes back as needed. Called under the table's lock."""

from __future__ import annotations

from typing import Final

from kvstore.core.types import BlockShape
from kvstore.node.eviction.chain_cascade import with_parents
from kvstore.node.eviction.quotas import count_kept, evict_over_quota
from kvstore.node.state.residency import Residency
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import Slot

PIECE_BLOCKS: Final = 64
"""Maximum number of blocks to free space for in one step: enough for contiguous slots, and few enough to grant what is free."""


def allocate_dram(residency: Residency, shape: BlockShape, count: int, *, cascades_chains: bool) -> list[Slot] | None:
    """Allocate slots for ``count`` blocks. None: no space can be freed now.

    Dirty blocks that occupy the space are sent to write-back, so that they can be evicted later.
    """
    while (slots := residency.dram.allocate(shape, count)) is None:
        if residency.accounts.has_rules and evict_over_quota(residency):
            continue
        victims, dirty = residency.arena_evictor.victims(shape, count)
        if cascades_chains:
            dirty = with_parents(residency.blocks, dirty, residency.is_idle, max(PIECE_BLOCKS, 2 * count))
        for block in dirty:
            residency.enqueue_writeback(block)
        residency.counters.add(node_metrics.CASCADED_BLOCKS, len(dirty))
        if not victims:
            return None
        residency.evict_from_dram(victims)
        count_kept(residency, victims)
    return slots
