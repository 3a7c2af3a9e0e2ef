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
from kvstore.core.errors import Conflict, InvalidArgument, KVStoreError
from kvstore.core.types import BlockKey, BlockRun, BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.indexing.publish_sequence import BatchVerdict, SequenceMode, SequenceState
from kvstore.metadata.membership.records import (
    decode_removed,
    drain_note,
    encode_volume_epoch,
    left_note,
    node_note,
    refused_note,
    removed_note,
    report_note,
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
        """Number of stored and removed keys."""
        return sum(len(run.keys) for run in self.stored) + len(self.removed)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Outcome of some batches: all batches up to ``sequence`` are in the index. ``error`` is about the next batch."""

    sequence: int
    blocks_stored: int
    blocks_removed: int
    duplicates: int
    error: KVStoreError | None


# ---- order of batches ----
class NotedSequence:
    """How far a node has published, as a note in the index, which is lost together with the changes that it covers.

    Args:
        index: the index.
        node_id: the node.
        boot_id: its boot.
    """

    def __init__(self, index: PrefixIndex, node_id: NodeId, boot_id: BootId) -> None:
        self._index = index
        self._note = sequence_note(node_id)
        self._boot_id = boot_id

    def read(self, _first: int) -> SequenceState:
        """The state before the batch with the number ``_first``."""
        return SequenceState.decode(self._index.note(self._note), self._boot_id)

    def write(self, state: SequenceState) -> None:
        """Store the state after a batch."""
        self._index.put_note(self._note, state.encode(), announce=False)


class StreamSequence:
    """Progress of one publish stream, in memory. A stream begins where the node's acknowledgements ended.

    For an index that several servers share: a server that still applies the last batches of a stream that is lost would set a
    note back, and a shard that loses blocks loses no note. Such blocks are found by their range.

    Args:
        boot_id: boot of the node.
    """

    def __init__(self, boot_id: BootId) -> None:
        self._boot_id = boot_id
        self._state: SequenceState | None = None

    def read(self, first: int) -> SequenceState:
        """The state before the batch with the number ``first``."""
        return self._state or SequenceState(self._boot_id, first - 1, SequenceMode.RUNNING)

    def write(self, state: SequenceState) -> None:
        """Keep the state after a batch."""
        self._state = state


def publish_sequence(index: PrefixIndex, node_id: NodeId, boot_id: BootId) -> NotedSequence | StreamSequence:
    """The sequence of a new stream."""
    return StreamSequence(boot_id) if index.leases_roles else NotedSequence(index, node_id, boot_id)


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
    if not index.leases_roles:
        noted = NotedSequence(index, node_id, boot_id)
        noted.write(noted.read(1).registered(boot_id))
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
    index.put_notes(dict.fromkeys((report_note(node_id), refused_note(node_id), sequence_note(node_id))), announce=False)
    index.put_notes(dict.fromkeys((drain_note(node_id), left_note(node_id))))
    index.put_note(node_note(node_id), None)  # last: after a crash before it, the next tick repeats the whole change


# ---- publishing ----
def apply_batches(
    index: PrefixIndex, node_id: NodeId, sequence: NotedSequence | StreamSequence, batches: Sequence[PublishBatch]
) -> PublishOutcome:
    """Apply batches of one node in order, in as few index transactions as their contents allow."""
    state = sequence.read(batches[0].sequence)
    duplicates, error = 0, None
    admitted: list[PublishBatch] = []
    for batch in batches:
        verdict, following = state.judge(batch.sequence)
        if verdict is BatchVerdict.REFUSE:
            error = Conflict("a publish batch is missing: register again", got=batch.sequence, expected=state.last + 1)
            _request_inventories(index, node_id)
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
        keys = [key for batch in group for key in batch.removed]
        if runs or keys:
            index.publish(group[0].volume_epoch, runs, keys)
        stored += sum(len(run.keys) for run in runs)
        removed += len(keys)
        if group[-1].sync_end:
            _end_sync(index, group[-1])
    # last: after a crash before it, the node sends the batches again, and applying them again changes nothing
    sequence.write(state)
    return PublishOutcome(state.last, stored, removed, duplicates, error)


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
    """
    wanted = {key for run in runs for key in run.keys}
    if outside := {key_range(key) for key in wanted}.difference(ranges):
        raise InvalidArgument("a key is outside of the ranges to repair", range=min(outside))
    held = {key for number in ranges for key in index.keys_in_range(volume_epoch, number)}
    surplus = sorted(held - wanted)
    index.publish(volume_epoch, runs, surplus)
    return len(wanted - held), len(surplus)
