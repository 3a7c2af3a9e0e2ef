"""Eviction on request: a volume down to a fill level, a tier or a namespace.

The table frees space without requests; these are requests of operators, and of engines for their pools. The table's rules hold:
no block in use is evicted, children are evicted before their parents, and a block leaves its volume's catalog before its slot is
used again. To *evict* keeps dirty blocks in DRAM. To *invalidate* drops them too, because the blocks are wrong.

If one durable volume is named, only its blocks are evicted: children on other volumes stay, as their parents may be stored again.
The table's lock is held for ``BATCH`` blocks at a time, so loads and stores continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvstore.core.cancel_scope import current
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NamespaceId, Tier
from kvstore.node.base.volume_guard import ignore
from kvstore.node.eviction.volume_commits import evict_from_volume
from kvstore.node.state.block_states import VolumeReplica
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable

BATCH = 1_024
BATCHES_AMONG_SEVERAL = 64
"""Batches per search if there are several volumes: each search skips colder blocks of the others."""


class EvictionResult(NamedTuple):
    """Numbers of replicas that were evicted, and of those that were to be evicted and stayed."""

    blocks: int
    kept: int


def evict_down_to(table: BlockTable, node_volume: NodeVolume | None, down_to_bytes: int) -> EvictionResult:
    """Evict the coldest blocks of the arena (``node_volume`` None) or a volume until it has at most ``down_to_bytes`` in use.

    Raises:
        OSError, KVStoreError: the volume's catalog could not be changed; those blocks stay.
    """
    volume = table.dram if node_volume is None else node_volume.volume
    restore_hinted(table, node_volume)
    batch = BATCH if node_volume is None or len(table.node_volumes) == 1 else BATCHES_AMONG_SEVERAL * BATCH
    evicted = 0
    while (excess := volume.usage().used_bytes - down_to_bytes) > 0 and not current().cancelled:  # stores may fill it as fast
        with table.residency.lock:
            victims = []
            for key, slot in islice(
                table.residency.arena_evictor.coldest()
                if node_volume is None
                else table.residency.volume_evictor.coldest(node_volume, table.residency.is_idle),
                batch,
            ):
                if excess <= 0:
                    break
                victims.append(table.residency.blocks[key])
                excess -= slot.size
            if node_volume is None:
                _evict_and_notify(table, victims)
            else:
                table.residency.mark_evicting(victims)
        if not victims:
            return EvictionResult(evicted, volume.usage().blocks)
        if node_volume is not None:
            evict_from_volume(table, node_volume, victims)
        evicted += len(victims)
    return EvictionResult(evicted, volume.usage().blocks if excess > 0 else 0)


def restore_hinted(table: BlockTable, node_volume: NodeVolume | None) -> None:
    """Put blocks that hints protect back into the order of eviction of the arena (``node_volume`` None) or of the volumes.

    A search that met them while they were protected has taken them out.
    """
    residency = table.residency
    evictor = residency.arena_evictor if node_volume is None else residency.volume_evictor
    with residency.lock:
        held = residency.arena_evictor.held_blocks if node_volume is None else residency.volume_evictor.held_on(node_volume)
        found = [(namespace, list(namespace.hinted)) for namespace, blocks in held.items() if blocks and namespace.hinted]
    for namespace, keys in found:
        for first in range(0, len(keys), BATCH):
            with residency.lock:
                evictor.restore(namespace, keys[first : first + BATCH])


def evict_tier(table: BlockTable, tier: Tier) -> int:
    """Evict all idle clean blocks from DRAM, or all idle blocks from the durable volumes. Returns the number of replicas.

    Raises:
        OSError, KVStoreError: a volume's catalog could not be changed; those blocks stay.
    """
    volumes: Sequence[NodeVolume | None] = [None] if tier is Tier.DRAM else table.node_volumes
    return sum(evict_down_to(table, node_volume, 0).blocks for node_volume in volumes)


def evict_namespace(
    table: BlockTable, namespace: NodeNamespace, only: NodeVolume | None, *, dram: bool, nvme: bool
) -> EvictionResult:
    """Evict a namespace's blocks from the tiers named: from DRAM first, while their durable copies make them clean.

    Whether the namespace is kept was checked by the caller: this node may not know yet that the rule has changed.

    Args:
        table: the blocks.
        namespace: the namespace.
        only: of durable volumes only this one; None: all.
        dram: from the arena.
        nvme: from durable volumes.

    Raises:
        OSError, KVStoreError: a volume's catalog could not be changed; those blocks stay.
    """
    mine = _of(table, namespace)
    volumes: list[NodeVolume | None] = [None] if dram else []
    volumes += [node_volume for node_volume in table.node_volumes if nvme and (only is None or node_volume is only)]
    parts = [_evict_each(table, [block for block in mine if _lies_in(block, volume)], volume) for volume in volumes]
    return EvictionResult(sum(part.blocks for part in parts), sum(part.kept for part in parts))


def invalidate(table: BlockTable, namespace: NodeNamespace, deadline_s: float) -> EvictionResult:
    """Drop all blocks of a namespace from all tiers, durable or not.

    Waits until the deadline for blocks in use or in write-back. Blocks stored during the call stay, unless the catalog of their
    volume is lost and rebuilt later. Blocks that are only in a catalog, because the table could not use them, are dropped when
    their volume is opened again. A volume that fails keeps no other from dropping its blocks.

    Raises:
        OSError, KVStoreError: a volume's catalog could not be changed; those blocks stay. Or it could not note the call
            (``note_invalid``).
    """
    begun = generations(table)
    doomed = _of(table, namespace)
    dropped = 0
    failed: dict[NodeVolume | None, Exception] = {}
    while doomed:
        for first in range(0, len(doomed), BATCH):
            batch = doomed[first : first + BATCH]
            for node_volume in table.node_volumes:
                if node_volume in failed:
                    continue
                with table.residency.lock:
                    victims = [block for block in batch if block.nvme_volume is node_volume and table.residency.is_idle(block)]
                    table.residency.mark_evicting(victims)
                try:
                    evict_from_volume(table, node_volume, victims)
                except (OSError, KVStoreError) as error:
                    failed[node_volume] = error
            with table.residency.lock:
                idle = [
                    block for block in batch if block.nvme is None and block.dram is not None and table.residency.is_idle(block)
                ]
                for block in idle:
                    if block.durable_remotely:  # the storage node drops its own blocks
                        table.residency.set_replica(block, VolumeReplica.ABSENT)
                _evict_and_notify(table, idle)
        with table.residency.lock:
            left = [block for block in doomed if table.residency.blocks.get(block.key) is block]
            dropped += len(doomed) - len(left)
            doomed = [block for block in left if block.nvme_volume not in failed]
            # blocks on a volume that is being adopted can be dropped only after the table has the volume
            ready = any(table.residency.is_idle(block) and block.nvme_volume in (None, *table.node_volumes) for block in doomed)
            if table.clock.now_s() >= deadline_s or (doomed and not ready and not table.wait_changed(deadline_s)):
                break
    note_invalid(table, namespace.namespace_id, begun)
    for failure in failed.values():
        raise failure
    return EvictionResult(dropped, len(doomed))


def generations(table: BlockTable) -> dict[NodeVolume, int]:
    """``next_generation`` of each durable volume."""
    return {node_volume: node_volume.volume.next_generation for node_volume in table.node_volumes}


def note_invalid(table: BlockTable, namespace_id: NamespaceId, begun: Mapping[NodeVolume, int]) -> None:
    """Have all volumes note that what they stored of a namespace is invalid, also blocks that were evicted before.

    Args:
        table: the blocks.
        namespace_id: the namespace.
        begun: ``next_generation`` of each volume when the invalidation began. A volume that is not named was attached
            since; all its entries are invalid.

    Raises:
        OSError, KVStoreError: a volume could not note it, and a restart or a repair may bring blocks back. The first error is
            raised after all volumes were tried.
    """
    errors: list[Exception] = []
    for node_volume in list(table.node_volumes):
        try:
            node_volume.guard.change(partial(node_volume.volume.note_invalid, namespace_id, begun.get(node_volume)), ignore)
        except (OSError, KVStoreError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _of(table: BlockTable, namespace: NodeNamespace) -> list[Block]:
    """The blocks of a namespace, children before their parents."""
    return sorted((block for block in table.snapshot() if block.namespace is namespace), key=lambda block: -block.depth)


def _evict_each(table: BlockTable, held: Sequence[Block], node_volume: NodeVolume | None) -> EvictionResult:
    """Evict blocks, given children first, from the arena or a durable volume; the parents of a kept block are kept too."""
    staying: set[BlockKey | None] = set()
    evicted = kept = 0
    for first in range(0, len(held), BATCH):
        with table.residency.lock:
            victims = []
            for block in held[first : first + BATCH]:
                if not _lies_in(block, node_volume):  # evicted by another thread
                    continue
                if block.key in staying or not table.residency.is_idle(block) or (node_volume is None and not block.clean):
                    staying.add(block.parent)
                    kept += 1
                else:
                    victims.append(block)
            if node_volume is None:
                _evict_and_notify(table, victims)
            else:
                table.residency.mark_evicting(victims)
        if node_volume is not None:
            evict_from_volume(table, node_volume, victims)
        evicted += len(victims)
    return EvictionResult(evicted, kept)


def _lies_in(block: Block, node_volume: NodeVolume | None) -> bool:
    """Whether a block is on a durable volume, or (None) in the arena."""
    return block.dram is not None if node_volume is None else block.nvme_volume is node_volume


def _evict_and_notify(table: BlockTable, victims: Sequence[Block]) -> None:
    """Evict blocks from DRAM. Called under the table's lock."""
    table.residency.evict_from_dram(victims)
    table.residency.changed.notify_all()
