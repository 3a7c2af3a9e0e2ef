"""A mirror of which volume holds which block, built from block events. Pure: no connection, no thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun as BlockRunMessage
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.rpc.codec import check_id, keys_from_packed, run_from_proto, tier_from_proto

Place = tuple[NamespaceId, int]
"""Where a key lies: namespace and depth."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One boot of one volume.

    Attributes:
        number: as events name it; never used twice within a feed.
        volume_id: the volume.
        node_id: whose it is.
        tier: where it lies.
        boot_id: the boot of the node.
        served: whether it can be read now: its node is heard of, or another mounts it.
    """

    number: int
    volume_id: VolumeId
    node_id: NodeId
    tier: Tier
    boot_id: BootId
    served: bool


@dataclass(slots=True)
class Change:
    """What one message may have changed.

    Attributes:
        runs: stored, with their parents.
        keys: of other blocks whose holders may be others now.
        whole: everything: the mirror began anew, or is complete now.
    """

    runs: list[BlockRun] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    whole: bool = False


class BlockMirror:
    """Who holds what, as far as messages told. Pure: no connection, no thread; not thread-safe."""

    def __init__(self) -> None:
        self.feed_id = b""
        """The server's count that ``sequence`` belongs to; empty before the first message."""
        self.sequence = 0
        """The last change that was taken in, while the mirror is complete."""
        self.complete = False
        """Whether it is the truth as of ``sequence``; not so before the first snapshot has ended, or the next after a resync."""
        self._volumes: dict[int, Volume] = {}
        self._held: dict[int, set[BlockKey]] = {}
        self._blocks: dict[BlockKey, tuple[Place, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    @property
    def volumes(self) -> list[Volume]:
        """All volumes known, those that cannot be read now among them."""
        return list(self._volumes.values())

    def place(self, key: BlockKey) -> Place | None:
        """Namespace and depth of a block; None where nobody holds it."""
        found = self._blocks.get(key)
        return None if found is None else found[0]

    def replicas(self, key: BlockKey) -> list[Volume]:
        """Volumes that hold a block, also those that cannot be read now."""
        found = self._blocks.get(key)
        return [] if found is None else [self._volumes[number] for number in found[1]]

    def holders(self, key: BlockKey) -> list[Volume]:
        """Volumes that hold a block and can be read, nearest tier first."""
        return sorted((volume for volume in self.replicas(key) if volume.served), key=lambda volume: volume.tier)

    def apply(self, message: pb.WatchBlocksResponse) -> Change:
        """Takes one message in. Messages of one stream, in order.

        Raises:
            InvalidArgument: a malformed message: begin anew with :meth:`clear`.
        """
        change = Change()
        match message.WhichOneof("what"):
            case "resync":
                self.clear()
                self.feed_id = check_id(message.resync.feed_id, "feed_id")
                change.whole = True
            case "resumed":
                if message.resumed.feed_id != self.feed_id or not self.complete:
                    raise InvalidArgument("the server resumed what was not begun")
            case "snapshot_end":
                self.sequence = message.snapshot_end.sequence
                self.complete = change.whole = True
            case "events":
                for event in message.events.events:
                    self._apply(event, change)
                if message.events.sequence:
                    self.sequence = message.events.sequence
        return change

    def clear(self) -> None:
        """Forgets everything."""
        self.feed_id = b""
        self.sequence = 0
        self.complete = False
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
                    raise InvalidArgument("a depth a key", keys=len(keys), depths=len(held.depths))
                namespace = NamespaceId(check_id(held.namespace_id, "namespace_id"))
                self._store(held.volume, namespace, zip(keys, held.depths, strict=True))
                change.keys += keys
            case "opened":
                opened = event.opened
                before = self._volumes.get(opened.volume)
                self._volumes[opened.volume] = now = Volume(
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
                gone = list(self._held.get(event.closed.volume, ()))
                self._remove(event.closed.volume, gone)
                self._held.pop(event.closed.volume, None)
                self._volumes.pop(event.closed.volume, None)
                change.keys += gone
            case "served":
                volume = self._volumes.get(event.served.volume)
                if volume is not None and volume.served != event.served.served:
                    told = Volume(
                        volume.number, volume.volume_id, volume.node_id, volume.tier, volume.boot_id, event.served.served
                    )
                    self._volumes[volume.number] = told
                    change.keys += self._held[volume.number]

    def _store_runs(self, number: int, runs: Iterable[BlockRunMessage], change: Change) -> None:
        for message in runs:
            run = run_from_proto(message)
            self._store(number, run.namespace, zip(run.keys, range(run.depth, run.depth + len(run.keys)), strict=True))
            change.runs.append(run)

    def _store(self, number: int, namespace: NamespaceId, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        """A volume holds blocks. Stored at another place than it was known at, a key's older replicas are void."""
        mine = self._held.get(number)
        if mine is None:
            return  # not meant for this mirror
        for key, depth in blocks:
            found = self._blocks.get(key)
            if found is None:
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
            place, numbers = self._blocks[key]
            left = tuple(other for other in numbers if other != number)
            if left:
                self._blocks[key] = (place, left)
            else:
                del self._blocks[key]
