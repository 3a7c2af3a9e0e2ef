"""Everything that changes the index, as plain functions that one thread runs in order.

They read what they decide on from the index itself, never from a cache, so that several workers and restarts cannot make them
act on old news. Each is safe to run again: a crash between two writes leaves a state from which the caller's retry goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import VolumeNeed
from kvstore.core.errors import Conflict, InvalidArgument, KVStoreError
from kvstore.core.range_digests import key_range
from kvstore.core.types import BlockKey, BlockRun, BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.indexing.publish_sequence import BatchVerdict, SequenceState
from kvstore.metadata.membership.records import (
    drain_note,
    encode_volume_epoch,
    heartbeat_note,
    left_note,
    node_note,
    refused_note,
    removed_note,
    sequence_note,
    synced_note,
)


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
        """Keys it speaks of."""
        return sum(len(run.keys) for run in self.stored) + len(self.removed)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """What became of some batches: all up to ``sequence`` are in the index; then, perhaps, an error."""

    sequence: int
    blocks_stored: int
    blocks_removed: int
    duplicates: int
    error: KVStoreError | None


# ---- registration ----
def register_node(index: PrefixIndex, info: NodeInfo) -> list[VolumeNeed]:
    """Opens the volume epochs of a boot and closes what it ends.

    Returns:
        For each volume, in the order registered, whether its inventory is needed.
    """
    node_id, boot_id = NodeId(info.node_id), BootId(info.boot_id)
    sequence = SequenceState.decode(index.note(sequence_note(node_id)), boot_id)
    index.put_note(sequence_note(node_id), sequence.registered(boot_id).encode(), announce=False)
    encoded = info.SerializeToString(deterministic=True)
    if index.note(node_note(node_id)) != encoded:
        index.put_note(node_note(node_id), encoded)
    if index.note(left_note(node_id)) is not None:
        index.put_note(left_note(node_id), None)
    index.put_note(removed_note(node_id), None, announce=False)  # another boot than that: it may come
    tiers = {VolumeId(volume.volume_id): Tier(volume.tier) for volume in info.volumes}
    volume_epochs = {volume_id: index.open_volume_epoch(volume_id, node_id, tier, boot_id) for volume_id, tier in tiers.items()}
    for other in index.volume_epochs():
        if other.volume_id not in volume_epochs:
            ended = other.node_id == node_id  # a volume that the node no longer has
        else:
            # what lay in memory is gone with its boot; what lies on disk stays visible until the new inventory is complete
            durable = other.tier is Tier.NVME and tiers[other.volume_id] is Tier.NVME and other.node_id == node_id
            ended = other.volume_epoch != volume_epochs[other.volume_id] and not durable
        if ended:
            index.close_volume_epoch(other.volume_epoch)
            if other.volume_id not in volume_epochs:
                index.put_note(synced_note(other.volume_id), None)
    return [
        VolumeNeed(volume_id=volume_id, inventory_needed=index.note(synced_note(volume_id)) != encode_volume_epoch(volume_epoch))
        for volume_id, volume_epoch in volume_epochs.items()
    ]


def forget_node(index: PrefixIndex, node_id: NodeId, boot_id: BootId) -> None:
    """Drops a boot that was silent for long: its volume epochs, which hides all it held, and its notes."""
    note = index.note(node_note(node_id))
    if note is None or NodeInfo.FromString(note).boot_id != boot_id:
        return  # another boot of it has come
    for volume_epoch in index.volume_epochs():
        if volume_epoch.node_id == node_id:
            index.close_volume_epoch(volume_epoch.volume_epoch)
            index.put_note(synced_note(volume_epoch.volume_id), None)
    for name in (heartbeat_note(node_id), refused_note(node_id), sequence_note(node_id)):
        index.put_note(name, None, announce=False)
    for name in (drain_note(node_id), left_note(node_id)):
        index.put_note(name, None)
    index.put_note(node_note(node_id), None)  # last: a crash before it leaves what is forgotten at the next tick


# ---- publishing ----
def apply_batches(index: PrefixIndex, node_id: NodeId, boot_id: BootId, batches: Sequence[PublishBatch]) -> PublishOutcome:
    """Applies batches of one node in order, in as few index transactions as their contents allow."""
    state = SequenceState.decode(index.note(sequence_note(node_id)), boot_id)
    duplicates, error = 0, None
    admitted: list[PublishBatch] = []
    for batch in batches:
        verdict, following = state.judge(batch.sequence)
        if verdict is BatchVerdict.REFUSE:
            error = Conflict("a publish batch is missing: register again", got=batch.sequence, expected=state.last + 1)
            _forget_inventories(index, node_id)
            state = following
            break
        if verdict is BatchVerdict.APPLY:
            admitted.append(batch)
        else:
            duplicates += 1
        state = following
    stored = removed = 0
    for group in _groups(admitted):
        runs = [run for batch in group for run in batch.stored]
        gone = [key for batch in group for key in batch.removed]
        if runs or gone:
            index.publish(group[0].volume_epoch, runs, gone)
        stored += sum(len(run.keys) for run in runs)
        removed += len(gone)
        if group[-1].sync_end:
            _end_sync(index, group[-1])
    # last: where the process dies before it, the node sends the batches again, and applying them again changes nothing
    index.put_note(sequence_note(node_id), state.encode(), announce=False)
    return PublishOutcome(state.last, stored, removed, duplicates, error)


def _groups(batches: Sequence[PublishBatch]) -> list[list[PublishBatch]]:
    """Cuts batches into groups that one ``publish`` may apply: first all that is removed, then all that is stored.

    A batch joins the group before it when both speak of one volume epoch, nothing was stored there that this one removes (it
    removes nothing), and no inventory ended in between.
    """
    groups: list[list[PublishBatch]] = []
    for batch in batches:
        if groups and not batch.removed and groups[-1][-1].volume_epoch == batch.volume_epoch and not groups[-1][-1].sync_end:
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return groups


def _end_sync(index: PrefixIndex, batch: PublishBatch) -> None:
    """A volume's inventory is complete: what older volume epochs of it held is now told by this one."""
    for other in index.volume_epochs():
        if other.volume_id == batch.volume_id and other.volume_epoch != batch.volume_epoch:
            index.close_volume_epoch(other.volume_epoch)
    index.put_note(synced_note(batch.volume_id), encode_volume_epoch(batch.volume_epoch))


def _forget_inventories(index: PrefixIndex, node_id: NodeId) -> None:
    """Something of this node was lost on the way: when it registers again, it is asked for everything."""
    for volume_epoch in index.volume_epochs():
        if volume_epoch.node_id == node_id:
            index.put_note(synced_note(volume_epoch.volume_id), None)


# ---- anti-entropy ----
def repair_range(index: PrefixIndex, volume_epoch: VolumeEpoch, wanted_range: int, runs: Sequence[BlockRun]) -> tuple[int, int]:
    """Makes the index say of one volume epoch and range what the node says.

    Returns:
        How many replicas were added and how many removed.

    Raises:
        InvalidArgument: a key of another range.
    """
    wanted = {key for run in runs for key in run.keys}
    if any(key_range(key) != wanted_range for key in wanted):
        raise InvalidArgument("a key lies in another range than the one to repair", range=wanted_range)
    held = set(index.keys_in_range(volume_epoch, wanted_range))
    surplus = sorted(held - wanted)
    index.publish(volume_epoch, runs, surplus)
    return len(wanted - held), len(surplus)
