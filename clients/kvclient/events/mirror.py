"""A mirror of which volume holds which block, built from block events. Pure: no connection, no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun as BlockRunMessage
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.rpc.codec import check_id, keys_from_packed, run_from_proto, tier_from_proto

ChainPosition = tuple[NamespaceId, int]
"""Namespace of a key, and its depth in its chain."""


@dataclass(frozen=True, slots=True)
class MirroredVolume:
    """One boot of one volume.

    Attributes:
        number: its number in events; never used twice within an event log.
        volume_id: the volume.
        node_id: its node.
        tier: its tier.
        boot_id: the boot of the node.
        served: whether it can be read now: its node sends heartbeats, or another node mounts it.
    """

    number: int
    volume_id: VolumeId
    node_id: NodeId
    tier: Tier
    boot_id: BootId
    served: bool


@dataclass(slots=True)
class Change:
    """Changes by one message.

    Attributes:
        runs: stored blocks, with their parents.
        keys: other blocks whose holders may have changed.
        whole: everything may have changed: the mirror was cleared, or is complete now.
    """

    runs: list[BlockRun] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    whole: bool = False


class BlockMirror:
    """Volumes that hold each block, according to the messages. Pure: no connection, no thread. Not thread-safe.

    Args:
        wanted: returns whether to keep a block, given its namespace and key; None: all are kept. A block that is wanted only
            after it was stored is unknown until the next snapshot.
        most_blocks: blocks that are kept; None: all. Further ones are ignored until the next snapshot.
    """

    def __init__(self, wanted: Callable[[NamespaceId, BlockKey], bool] | None = None, *, most_blocks: int | None = None) -> None:
        self._wanted = wanted
        self.most_blocks = most_blocks
        """Blocks that are kept; None: all."""
        self.ignored = 0
        """Stored blocks that were ignored beyond ``most_blocks`` since the mirror was last cleared."""
        self.feed_id = b""
        """Id of the server's event log, which ``sequence`` belongs to. Empty before the first message."""
        self.sequence = 0
        """Number of the last applied change, if the mirror is complete."""
        self.position = b""
        """Position of ``sequence``, if several servers share the events. Each of them can resume there."""
        self.complete = False
        """Whether the mirror is correct as of ``sequence``: a snapshot has ended since the start and since the last resync."""
        self._volumes: dict[int, MirroredVolume] = {}
        self._held: dict[int, set[BlockKey]] = {}
        self._blocks: dict[BlockKey, tuple[ChainPosition, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    @property
    def volumes(self) -> list[MirroredVolume]:
        """All known volumes, also those that cannot be read now."""
        return list(self._volumes.values())

    def place(self, key: BlockKey) -> ChainPosition | None:
        """Return namespace and depth of a block, or None if no volume holds it."""
        found = self._blocks.get(key)
        return None if found is None else found[0]

    def replicas(self, key: BlockKey) -> list[MirroredVolume]:
        """Return the volumes that hold a block, also those that cannot be read now."""
        found = self._blocks.get(key)
        return [] if found is None else [self._volumes[number] for number in found[1]]

    def holders(self, key: BlockKey) -> list[MirroredVolume]:
        """Return the volumes that hold a block and can be read, nearest tier first.

        Example: ``mirror.holders(key)``
        """
        return sorted((volume for volume in self.replicas(key) if volume.served), key=lambda volume: volume.tier)

    def apply(self, message: pb.WatchBlocksResponse) -> Change:
        """Apply one message. Messages of one stream must be applied in order.

        Raises:
            InvalidArgument: a malformed message; start again with :meth:`clear`.
        """
        change = Change()
        match message.WhichOneof("what"):
            case "resync":
                self.clear()
                self.feed_id = check_id(message.resync.feed_id, "feed_id")
                change.whole = True
            case "resumed":
                if message.resumed.feed_id != self.feed_id or not self.complete:
                    raise InvalidArgument("the server resumed an unknown stream")
                if message.resumed.HasField("open"):
                    for number in self._volumes.keys() - set(message.resumed.open.volumes):
                        self._close(number, change)
            case "snapshot_end":
                self.sequence, self.position = message.snapshot_end.sequence, message.snapshot_end.position
                self.complete = change.whole = True
            case "events":
                for event in message.events.events:
                    self._apply(event, change)
                if message.events.sequence:
                    self.sequence, self.position = message.events.sequence, message.events.position
        return change

    def clear(self) -> None:
        """Forget everything."""
        self.feed_id = b""
        self.sequence = 0
        self.position = b""
        self.complete = False
        self.ignored = 0
        self._volumes.clear()
        self._held.clear()
        self._blocks.clear()

    def _apply(self, event: pb.BlockEvent, change: Change) -> None:
        match event.WhichOneof("what"):
            case "stored":
                self._store_runs(event.stored.volume, event.stored.runs, change)
            case "removed":
                keys = keys_from_packed(event.removed.keys)
                self._remove(event.removed.volume, keys)
                change.keys += keys
            case "held":
                held = event.held
                keys = keys_from_packed(held.keys)
                if len(keys) != len(held.depths):
                    raise InvalidArgument("one depth per key is required", keys=len(keys), depths=len(held.depths))
                namespace = NamespaceId(check_id(held.namespace_id, "namespace_id"))
                self._store(held.volume, namespace, zip(keys, held.depths, strict=True))
                change.keys += keys
            case "opened":
                opened = event.opened
                before = self._volumes.get(opened.volume)
                self._volumes[opened.volume] = now = MirroredVolume(
                    opened.volume,
                    VolumeId(opened.volume_id),
                    NodeId(opened.node_id),
                    tier_from_proto(opened.tier),
                    BootId(opened.boot_id),
                    opened.served,
                )
                held_there = self._held.setdefault(opened.volume, set())
                if before is not None and before != now:
                    change.keys += held_there
            case "closed":
                self._close(event.closed.volume, change)
            case "served":
                volume = self._volumes.get(event.served.volume)
                if volume is not None and volume.served != event.served.served:
                    updated = MirroredVolume(
                        volume.number, volume.volume_id, volume.node_id, volume.tier, volume.boot_id, event.served.served
                    )
                    self._volumes[volume.number] = updated
                    change.keys += self._held[volume.number]

    def _close(self, number: int, change: Change) -> None:
        removed = list(self._held.get(number, ()))
        self._remove(number, removed)
        self._held.pop(number, None)
        self._volumes.pop(number, None)
        change.keys += removed

    def _store_runs(self, number: int, runs: Iterable[BlockRunMessage], change: Change) -> None:
        for message in runs:
            run = run_from_proto(message)
            self._store(number, run.namespace, zip(run.keys, range(run.depth, run.depth + len(run.keys)), strict=True))
            change.runs.append(run)

    def _store(self, number: int, namespace: NamespaceId, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        """Record that a volume holds blocks. If a key was known at another position, its older replicas are void."""
        mine = self._held.get(number)
        if mine is None:
            return  # a volume outside the filter
        for key, depth in blocks:
            if self._wanted is not None and not self._wanted(namespace, key):
                continue
            found = self._blocks.get(key)
            if found is None:
                if self.most_blocks is not None and len(self._blocks) >= self.most_blocks:
                    self.ignored += 1
                    continue
                self._blocks[key] = ((namespace, depth), (number,))
            elif found[0] == (namespace, depth):
                if number not in found[1]:
                    self._blocks[key] = (found[0], (*found[1], number))
            else:
                for other in found[1]:
                    self._held[other].discard(key)
                self._blocks[key] = ((namespace, depth), (number,))
            mine.add(key)

    def _remove(self, number: int, keys: Iterable[BlockKey]) -> None:
        mine = self._held.get(number)
        if mine is None:
            return
        for key in keys:
            if key not in mine:
                continue
            mine.discard(key)
            position, numbers = self._blocks[key]
            left = tuple(other for other in numbers if other != number)
            if left:
                self._blocks[key] = (position, left)
            else:
                del self._blocks[key]
