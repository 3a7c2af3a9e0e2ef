"""Slots for new blocks: evicts and writes back as needed. Called under the table's lock, except ``allocate_nvme``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.core.types import BlockShape, StoreOutcome, Tier
from kvstore.node.eviction.kept import count_protected
from kvstore.node.eviction.quotas import (
    evict_over_quota,
    make_room_in_quota,
    mark_over_quota_evicting,
    quota_is_full,
    share_below_one_block,
    space_may_free_up,
)
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.residency import Residency
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import Slot

PIECE_BLOCKS: Final = 64
"""Maximum number of blocks to free space for in one step: enough for contiguous slots, and few enough to grant what is free."""


def allocate_dram(residency: Residency, shape: BlockShape, count: int) -> list[Slot] | None:
    """Allocate slots of the arena for ``count`` blocks. None: no space can be freed now, or the table is closed.

    Dirty blocks that occupy the space are sent to write-back, so that they can be evicted later.
    """
    if residency.closed:
        return None
    while (slots := residency.dram.allocate(shape, count)) is None:
        if residency.accounts.has_rules and evict_over_quota(residency):
            continue
        victims, dirty = residency.arena_evictor.victims(shape, count)
        if residency.cascades_chains:
            dirty = residency.with_parents(dirty, max(PIECE_BLOCKS, 2 * count))
        for block in dirty:
            residency.enqueue_writeback(block)
        residency.counters.add(node_metrics.CASCADED_BLOCKS, len(dirty))
        if not victims:
            return None
        residency.evict_from_dram(victims)
        count_protected(residency, victims, Tier.DRAM)
    return slots


def grant_slots(residency: Residency, grant: SlotGrant, positions: Sequence[int], wait: Callable[[], bool]) -> None:
    """Grant slots of the arena for admitted blocks of a store, the first ones first. The others are SKIPPED.

    Args:
        residency: the blocks.
        grant: a store's.
        positions: of the admitted blocks in its run.
        wait: waits until space may have changed; False: no longer. Called only while the store has no slot.
    """
    namespace, keys = grant.namespace, grant.run.keys
    granted = 0
    piece = PIECE_BLOCKS
    while granted < len(positions):
        count = min(piece, len(positions) - granted)
        queue_full = residency.writes.nbytes > residency.pending_limit_bytes  # the queue of write-back
        quota_full = not queue_full and not make_room_in_quota(residency, namespace, count)
        slots = None if queue_full or quota_full else allocate_dram(residency, namespace.shape, count)
        if slots is not None:
            grant.slots.update(zip((keys[position] for position in positions[granted : granted + count]), slots, strict=True))
            granted += count
            namespace.granted += count
        elif piece > 1 and not queue_full:
            piece = max(1, count // 2)
        # never wait for more slots while holding some (two large stores would deadlock), nor if none is needed
        elif (
            granted
            or share_below_one_block(namespace)
            or not space_may_free_up(residency, grant, own_only=quota_full)
            or not wait()
        ):
            break
        else:
            piece = PIECE_BLOCKS
    if skipped := positions[granted:]:
        for position in skipped:
            del residency.preparing[keys[position]]
            grant.outcomes[position] = StoreOutcome.SKIPPED
        full = not queue_full and quota_is_full(residency, namespace)
        metric = node_metrics.STORE_SKIPPED_QUOTA_BLOCKS if full else node_metrics.STORE_SKIPPED_NO_SPACE_BLOCKS
        residency.counters.add(metric, len(skipped))


def allocate_nvme(
    residency: Residency, node_volume: NodeVolume, shape: BlockShape, count: int, ahead: int
) -> tuple[list[Slot] | None, list[Block]]:
    """Return slots in a durable volume, or (None, victims): blocks that are now marked as evicting. Takes the lock.

    Evict the victims with ``evict_from_volume``, and call again. Victims may be on any durable volume. They free space for
    ``ahead`` times the count if enough blocks are evictable, so that few commits only remove. If blocks of other sizes occupy the
    space, there may be space for a part of the count: then call again.
    """
    with residency.lock:
        slots = node_volume.volume.allocate(shape, count)
        if slots is not None or not residency.evicts_nvme:
            return slots, []
        victims = mark_over_quota_evicting(residency) if residency.accounts.has_rules else []
        if not victims:
            rules = (residency.leaves_no_orphans, residency.is_idle)
            victims = residency.volume_evictor.victims(node_volume, shape, (count * ahead, count), *rules)
            residency.mark_evicting(victims)
            count_protected(residency, victims, Tier.NVME)
        return None, victims
