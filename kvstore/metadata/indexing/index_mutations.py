"""Changes of the index by registration and publishing, as plain functions that one thread runs in order.

They decide on the contents of the index itself, never on a cache, so that other servers and restarts cannot make them act on
stale data. Each function may be repeated: after a crash between two writes, the caller's retry completes the change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import VolumeNeed
from kvstore.core.checksum import key_range
from kvstore.core.errors import Conflict, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, BlockRun, BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.records import (
    decode_removed,
    drain_note,
    encode_volume_epoch,
    left_note,
    node_note,
    refused_note,
    removed_note,
    report_note,
    synced_note,
)
from kvstore.rpc.errors import NOT_EXECUTED


@dataclass(frozen=True, slots=True)
class PublishBatch:
    """One checked publish message."""

    sequence: int
    volume_id: VolumeId
    volume_epoch: VolumeEpoch
    stored: Sequence[BlockRun]
    removed: Sequence[BlockKey]
    sync_end: bool

    @property
    def key_count(self) -> int:
        """Number of stored and removed keys."""
        return sum(len(run.keys) for run in self.stored) + len(self.removed)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Outcome of some batches: all batches up to ``sequence`` are in the index. ``error`` is about the next batch."""

    sequence: int
    blocks_stored: int
    blocks_removed: int
    error: KVStoreError | None


# ---- registration ----
def register_node(index: PrefixIndex, info: NodeInfo) -> list[VolumeNeed]:
    """Open the volume epochs of a boot, and close those that it replaces.

    Returns:
        For each registered volume, in order, whether its inventory is needed.

    Raises:
        Conflict: this boot was removed while it was alive.
    """
    node_id, boot_id = NodeId(info.node_id), BootId(info.boot_id)
    removed = decode_removed(index.note(removed_note(node_id)))
    if removed is not None and removed[0] == boot_id:
        raise Conflict("this node was removed: stop it, or restart it to register it again", node_id=node_id)
    encoded = info.SerializeToString(deterministic=True)
    if index.note(node_note(node_id)) != encoded:
        index.put_note(node_note(node_id), encoded)
    if index.note(left_note(node_id)) is not None:
        index.put_note(left_note(node_id), None)
    if removed is not None:
        index.put_note(removed_note(node_id), None, announce=False)
    tiers = {VolumeId(volume.volume_id): Tier(volume.tier) for volume in info.volumes}
    opened = {volume_id: index.open_volume_epoch(volume_id, node_id, tier, boot_id) for volume_id, tier in tiers.items()}
    for other in index.volume_epochs():
        if other.volume_id not in opened:
            ended = other.node_id == node_id  # the node no longer has this volume
        else:
            # blocks in DRAM were lost with their boot; blocks on NVMe stay visible until the new inventory is complete
            durable = other.tier is Tier.NVME and tiers[other.volume_id] is Tier.NVME and other.node_id == node_id
            ended = other.volume_epoch != opened[other.volume_id] and not durable
        if ended:
            index.close_volume_epoch(other.volume_epoch)
            if other.volume_id not in opened:
                index.put_note(synced_note(other.volume_id), None)
    return [
        VolumeNeed(volume_id=volume_id, inventory_needed=index.note(synced_note(volume_id)) != encode_volume_epoch(volume_epoch))
        for volume_id, volume_epoch in opened.items()
    ]


def forget_node(index: PrefixIndex, node_id: NodeId, boot_id: BootId) -> None:
    """Drop a boot: close its volume epochs, which hides all its blocks, and delete its notes. No effect on another boot."""
    note = index.note(node_note(node_id))
    if note is None or NodeInfo.FromString(note).boot_id != boot_id:
        return
    for info in index.volume_epochs():
        if info.node_id == node_id:
            index.close_volume_epoch(info.volume_epoch)
            index.put_note(synced_note(info.volume_id), None)
    index.put_beats({node_id: None})
    index.put_notes(dict.fromkeys((report_note(node_id), refused_note(node_id))), announce=False)
    index.put_notes(dict.fromkeys((drain_note(node_id), left_note(node_id))))
    index.put_note(node_note(node_id), None)  # last: after a crash before it, the next tick repeats the whole change


# ---- publishing ----
def apply_batches(index: PrefixIndex, node_id: NodeId, last: int | None, batches: Sequence[PublishBatch]) -> PublishOutcome:
    """Apply batches of one node in order, in as few index transactions as their contents allow.

    A stream begins where the node's acknowledgements ended. So batches may be applied again, in the same order as before, which
    changes nothing. A number that is skipped within a stream means that a batch was lost: the node must register again.

    Args:
        index: the index.
        node_id: the node.
        last: number of the stream's last batch; None: the stream begins.
        batches: at least one.
    """
    expected = batches[0].sequence if last is None else last + 1
    error = None
    admitted: list[PublishBatch] = []
    for batch in batches:
        if batch.sequence != expected:
            error = Conflict("a publish batch is missing: register again", got=batch.sequence, expected=expected)
            _request_inventories(index, node_id)
            break
        admitted.append(batch)
        expected += 1
    stored = removed = 0
    for group in _groups(admitted):
        runs = [run for batch in group for run in batch.stored]
        keys = [key for batch in group for key in batch.removed]
        if runs or keys:
            index.publish(group[0].volume_epoch, runs, keys)
        stored += sum(len(run.keys) for run in runs)
        removed += len(keys)
        if group[-1].sync_end:
            _end_sync(index, group[-1])
    return PublishOutcome(expected - 1, stored, removed, error)


def _groups(batches: Sequence[PublishBatch]) -> list[list[PublishBatch]]:
    """Group batches that one ``publish`` may apply: first all removals, then all stores.

    A batch joins the previous group if it is about the same volume epoch, removes nothing, and the group does not end an
    inventory.
    """
    groups: list[list[PublishBatch]] = []
    for batch in batches:
        if groups and not batch.removed and groups[-1][-1].volume_epoch == batch.volume_epoch and not groups[-1][-1].sync_end:
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return groups


def _end_sync(index: PrefixIndex, batch: PublishBatch) -> None:
    """A volume's inventory is complete: close older volume epochs of the volume."""
    for other in index.volume_epochs():
        if other.volume_id == batch.volume_id and other.volume_epoch != batch.volume_epoch:
            index.close_volume_epoch(other.volume_epoch)
    index.put_note(synced_note(batch.volume_id), encode_volume_epoch(batch.volume_epoch))


def _request_inventories(index: PrefixIndex, node_id: NodeId) -> None:
    """A batch of this node was lost: request all its inventories when it registers again."""
    for info in index.volume_epochs():
        if info.node_id == node_id:
            index.put_note(synced_note(info.volume_id), None)


# ---- anti-entropy ----
def repair_ranges(
    index: PrefixIndex, volume_epoch: VolumeEpoch, ranges: Collection[int], runs: Sequence[BlockRun]
) -> tuple[int, int]:
    """Replace the index's keys of one volume epoch and some ranges by the node's.

    Returns:
        The numbers of added and removed replicas.

    Raises:
        InvalidArgument: a key does not belong to these ranges.
        Unavailable: this server cannot read the ranges, and has changed nothing; another server may reach their shards.
    """
    wanted = {key for run in runs for key in run.keys}
    if outside := {key_range(key) for key in wanted}.difference(ranges):
        raise InvalidArgument("a key is outside of the ranges to repair", range=min(outside))
    try:
        held = {key for number in ranges for key in index.keys_in_range(volume_epoch, number)}
    except Unavailable as error:
        raise Unavailable(error.message, **error.fields, **{NOT_EXECUTED: "yes"}) from error
    surplus = sorted(held - wanted)
    index.publish(volume_epoch, runs, surplus)
    return len(wanted - held), len(surplus)
