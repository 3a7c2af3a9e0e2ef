"""Removal of blocks from durable volumes: a block leaves the catalog of its volume before its slot is used again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.state.block_states import DramState, VolumeReplica
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import Slot

log = logging.getLogger(__name__)

RETRIED: Final = 1_024
"""Maximum number of corrupt replicas per repeated commit."""


def by_volume(victims: Sequence[Block]) -> Iterator[tuple[NodeVolume, list[Block]]]:
    """Victims of each durable volume, also of one that is being adopted."""
    for node_volume in dict.fromkeys(block.nvme_volume for block in victims):
        if node_volume is not None:
            yield node_volume, [block for block in victims if block.nvme_volume is node_volume]


def evict_from_volume(table: BlockTable, node_volume: NodeVolume, victims: Sequence[Block]) -> None:
    """Evict blocks, marked as evicting, from a durable volume.

    Raises:
        VolumeStalled: it does not answer; the blocks leave or stay once its catalog has ended the commit.
        OSError, KVStoreError: its catalog could not be changed; they stay.
    """
    if not victims:
        return

    residency = table.residency

    def settle(error: BaseException | None) -> None:
        if error is None:
            finish_eviction(residency, node_volume, victims)
            return
        with residency.lock:
            residency.cancel_eviction(victims)
            residency.changed.notify_all()

    keys = [block.key for block in victims]
    try:
        node_volume.guard.change(lambda: node_volume.volume.commit([], keys), settle)
    except VolumeStalled:
        raise  # settled once the commit has ended; until then the victims stay marked as evicting
    except BaseException as error:  # also after a bug: no block may stay marked
        settle(error)
        raise
    settle(None)


def finish_eviction(residency: Residency, node_volume: NodeVolume, victims: Sequence[Block]) -> None:
    """Note that the catalog no longer names ``victims``: their slots may be reused. Takes the lock."""
    with residency.lock:
        for block in victims:
            slot = block.nvme
            if slot is None or block.nvme_volume is not node_volume:
                continue
            for_quota = block.volume_replica is VolumeReplica.EVICTING_FOR_QUOTA
            try:
                residency.remove_from_volume(block, node_volume)
                if block.clean:
                    residency.set_dram_state(block, DramState.DIRTY)  # it is written again before it leaves DRAM
                if for_quota:
                    block.produced_here = False
                residency.drop_if_nowhere(block)
                node_volume.volume.free((slot,))  # last: if it fails, only the slot is lost
            except Exception as bug:  # noqa: BLE001  # the others must leave
                residency.set_apart(block, bug)
        residency.counters.add(node_metrics.EVICTED_NVME_BLOCKS, len(victims))
        residency.changed.notify_all()


def quarantine(table: BlockTable, node_volume: NodeVolume, block: Block, slot: Slot, counters: Counters) -> None:
    """Remove a replica whose bytes in ``slot`` are corrupt, unless it is removed or being evicted.

    The slot stays out of use until the next start, which does not find it in the catalog. The entry is removed from the catalog
    first: after it is removed from the table, a good copy may be committed under the same key, and would be removed instead.
    """
    with table.residency.lock:
        if block.nvme != slot or block.nvme_volume is not node_volume or block.evicting:
            return
        table.residency.mark_evicting([block])
    counters.add(node_metrics.QUARANTINED_BLOCKS)
    try:
        node_volume.guard.change(lambda: node_volume.volume.commit([], [block.key]), ignore)
    except Exception as error:
        counters.add(node_metrics.QUARANTINES_UNCOMMITTED)
        log.warning("quarantine not committed: %s (key=%s, error=%s)", node_volume.volume_id, block.key.hex(), error)
        node_volume.uncommitted.append((block.key, slot))
        if not isinstance(error, (OSError, KVStoreError)):
            raise
    finally:
        with table.residency.lock:
            node_volume.quarantined += 1
            table.residency.remove_from_volume(block, node_volume)
            table.residency.drop_if_nowhere(block)
            table.residency.changed.notify_all()


def retry_quarantine(node_volume: NodeVolume, now_s: float) -> None:
    """Remove corrupt replicas from the catalog of a volume that did not take the change before. Call from one thread.

    A good copy under the same key may have been committed meanwhile. It is in another slot, so it stays.

    Raises:
        OSError, KVStoreError: the catalog could not be changed this time either, and the volume is not read-only.
    """
    if not node_volume.uncommitted or node_volume.resting_until_s > now_s or not node_volume.guard.takes_changes:
        return
    replicas = node_volume.uncommitted[:RETRIED]
    try:
        node_volume.guard.change(lambda: node_volume.volume.remove_replicas(replicas), ignore)
    except Unavailable:
        if node_volume.volume.read_only is None:
            raise
        return  # some read-only volumes accept removals
    del node_volume.uncommitted[: len(replicas)]
