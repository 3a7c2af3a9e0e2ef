"""The log of blocks that were added to or removed from each volume. The table writes it, the publisher sends it.

It is written under the table's lock, so its order is the order of the changes. It is bounded: if the metadata server is
unreachable for too long, a volume's log is dropped, and the volume's whole inventory is sent instead. The log also keeps each
volume's digests for anti-entropy: for each of 4,096 ranges of the key space, the XOR of xxh3-64 over its keys, and their number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import xxhash

from kvstore.core.checksum import key_range
from kvstore.core.clock import Clock
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import BlockKey, BlockRun, NamespaceId, VolumeId
from kvstore.node.base.cancellation import wait
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics

LOG_BOUND = 1_000_000
"""Maximum number of events per volume that are not taken yet."""
GATHER_S = 0.002
"""Events within this time are published together."""
BURST_S = 0.02
"""In a burst, events within this time are published together. A batch of any size costs the node and the server almost 1 ms of
CPU; a store of 16 blocks over TCP costs 5 ms. Callers that wait for publication do not wait for this.
"""


class ChainedBlock(Protocol):
    """A block as the log needs it: with its position in its chain."""

    @property
    def key(self) -> BlockKey:
        """Its key."""

    @property
    def parent(self) -> BlockKey | None:
        """Key of the block before it; None: it is the first one."""

    @property
    def depth(self) -> int:
        """Position in its chain."""

    @property
    def namespace_id(self) -> NamespaceId:
        """Id of its namespace."""


Found = TypeVar("Found", bound=ChainedBlock)


def runs_of(blocks: Iterable[ChainedBlock]) -> list[BlockRun]:
    """Join blocks, in their order, to runs of consecutive blocks of one chain."""
    runs: list[BlockRun] = []
    keys: list[BlockKey] = []
    first: ChainedBlock | None = None
    for block in blocks:
        if (
            first is not None
            and block.parent == keys[-1]
            and block.depth == first.depth + len(keys)
            and block.namespace_id == first.namespace_id
        ):
            keys.append(block.key)
            continue
        if first is not None:
            runs.append(BlockRun(first.namespace_id, first.parent, first.depth, tuple(keys)))
        first, keys = block, [block.key]
    if first is not None:
        runs.append(BlockRun(first.namespace_id, first.parent, first.depth, tuple(keys)))
    return runs


def in_chains(blocks: Sequence[Found]) -> list[Found]:
    """Order blocks (given by depth) chain after chain, parents before children, so that they join to long runs.

    Clients choose the parents, so parents may form a ring. Such blocks and their descendants come last, in the order given.
    """
    children: dict[bytes | None, list[Found]] = {}
    keys = {block.key for block in blocks}
    roots: list[Found] = []
    for block in blocks:
        if block.parent is not None and block.parent in keys:
            children.setdefault(block.parent, []).append(block)
        else:
            roots.append(block)
    ordered: list[Found] = []
    stack = roots[::-1]
    while stack:
        block = stack.pop()
        ordered.append(block)
        stack.extend(reversed(children.get(block.key, ())))
    if len(ordered) < len(blocks):
        met = {block.key for block in ordered}
        ordered += (block for block in blocks if block.key not in met)
    return ordered


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The changes of one round in one volume. Removals are applied first: a key in both lists was removed and added again."""

    volume: VolumeId
    stored: Sequence[BlockRun]
    removed: Sequence[BlockKey]
    events: int
    """Number of events that the index has applied after it applies this batch."""


class _Net:
    """The net effect of a round's events in one volume."""

    __slots__ = ("events", "last", "removed")

    def __init__(self) -> None:
        self.last: dict[BlockKey, ChainedBlock | None] = {}
        """In the order of the first events: a parent was added before its child."""
        self.removed: dict[BlockKey, None] = {}
        self.events = 0

    def add(self, key: BlockKey, block: ChainedBlock | None) -> None:
        self.last[key] = block
        self.events += 1
        if block is None:
            self.removed[key] = None

    def taken(self, volume: VolumeId) -> LogBatch:
        return LogBatch(
            volume, runs_of(block for block in self.last.values() if block is not None), list(self.removed), self.events
        )


@dataclass(frozen=True, slots=True)
class RangeDigests:
    """A volume's ranges of the key space at one moment, by number.

    Attributes:
        digests: digest of each range.
        counts: number of its keys.
        changes: how often it has changed. Removing and adding a block changes this, but not the digest.
        settled: whether the index has applied all of its changes. Other ranges cannot be compared.
    """

    digests: Sequence[int]
    counts: Sequence[int]
    changes: Sequence[int]
    settled: Sequence[bool]


def _never_hidden(takes: Sequence[LogBatch]) -> Iterator[LogBatch]:
    """Order a round's batches so that a block that moves between volumes is always listed in at least one.

    A block moves by being stored in one volume before it is removed from another. If the removal were sent first, a lookup in
    between would miss the block. So a removal that must follow another batch becomes a batch at the end of the round.
    """
    left = list(takes)
    at_the_end: list[LogBatch] = []
    while left:
        taken = left.pop(0)
        to_come = {key for other in left for run in other.stored for key in run.keys} if taken.removed else set()
        if to_come.isdisjoint(taken.removed):
            yield taken
            continue
        own = {key for run in taken.stored for key in run.keys}
        first = [key for key in taken.removed if key in own]
        if taken.stored:
            yield replace(taken, removed=first, events=0)
        at_the_end.append(replace(taken, stored=[], removed=[key for key in taken.removed if key not in own]))
    yield from at_the_end


class _VolumeLog:
    __slots__ = (
        "acknowledged",
        "appended",
        "changed_last",
        "changes",
        "counts",
        "digests",
        "gathered",
        "inventory_needed",
        "taken",
    )

    def __init__(self) -> None:
        self.appended = 0
        self.taken = 0
        self.gathered = 0  # of those appended, when ``wait`` last returned
        self.acknowledged = 0
        self.inventory_needed = False
        self.digests = [0] * DIGEST_RANGES
        self.counts = [0] * DIGEST_RANGES
        self.changes = [0] * DIGEST_RANGES
        self.changed_last = [0] * DIGEST_RANGES  # number of the last event of each range


class ReplicaChangeLog:
    """Events of all volumes of a node. Thread-safe."""

    def __init__(
        self, volumes: Sequence[VolumeId], counters: Counters, clock: Clock, *, keep: bool = True, bound: int = LOG_BOUND
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._keep = keep  # False: without a publisher, events are not kept
        self._bound = bound
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._urgent = threading.Condition(self._lock)
        self._hurry = False  # a caller waits for publication, or the publisher must check its state
        self._gathered_s = 0.0  # when ``wait`` last reported events to take
        self._acknowledged = threading.Condition(self._lock)
        self._volumes = {volume: _VolumeLog() for volume in volumes}
        self._events: deque[tuple[VolumeId, BlockKey, ChainedBlock | None]] = deque()  # of all volumes, in the order of truth

    @property
    def volumes(self) -> list[VolumeId]:
        """The volumes whose events are kept."""
        return list(self._volumes)

    def add_volume(self, volume: VolumeId) -> None:
        """Keep digests of another volume from now on, and events once its inventory was requested."""
        with self._lock:
            log = _VolumeLog()
            log.inventory_needed = True
            self._volumes = {**self._volumes, volume: log}

    def forget_volume(self, volume: VolumeId) -> None:
        """Drop the events of a volume, and ignore further ones."""
        with self._lock:
            self._volumes = {name: log for name, log in self._volumes.items() if name != volume}
            self._events = deque(event for event in self._events if event[0] != volume)

    def _of(self, volume: VolumeId) -> _VolumeLog:
        """The log of a volume; an empty one if it was forgotten. The caller holds the lock."""
        return self._volumes.get(volume) or _VolumeLog()

    def stored(self, volume: VolumeId, block: ChainedBlock) -> None:
        """Record that a volume holds a block from now on. Volumes that are not kept are ignored."""
        self._append(volume, block.key, block, 1)

    def removed(self, volume: VolumeId, key: BlockKey) -> None:
        """Record that a volume no longer holds a block."""
        self._append(volume, key, None, -1)

    def _append(self, volume: VolumeId, key: BlockKey, block: ChainedBlock | None, step: int) -> None:
        where = key_range(key)
        digest = xxhash.xxh3_64_intdigest(key)
        with self._lock:
            log = self._volumes.get(volume)
            if log is None:
                return
            log.digests[where] ^= digest
            log.counts[where] += step
            log.changes[where] += 1
            if not self._keep or log.inventory_needed:
                return
            if log.appended - log.taken >= self._bound:
                self._events = deque(event for event in self._events if event[0] != volume)
                log.acknowledged += log.appended - log.taken  # taken events are acknowledged once applied
                log.taken = log.appended
                log.inventory_needed = True
                self._counters.add(node_metrics.PUBLISH_LOG_OVERFLOW)
                return
            self._events.append((volume, key, block))
            log.appended += 1
            log.changed_last[where] = log.appended
            self._wake.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be events to take. Delays a little, so that events of one burst are taken together."""
        with self._lock:
            if not self._hurry and not self._events:
                self._wake.wait(timeout_s)
            if not self._hurry and self._events:
                now_s = self._clock.now_s()
                self._urgent.wait(max(now_s + GATHER_S, self._gathered_s + BURST_S) - now_s)
            self._gathered_s = self._clock.now_s()
            self._hurry = False
            for log in self._volumes.values():
                log.gathered = log.appended

    def wake(self) -> None:
        """End a ``wait``."""
        with self._lock:
            self._hurry_up()

    def _hurry_up(self) -> None:
        self._hurry = True
        self._urgent.notify_all()
        self._wake.notify_all()

    def take(self, limit: int) -> list[LogBatch]:
        """Take the next round: the oldest events of all volumes, at most ``limit``, as batches to be sent in this order.

        A round is one interval of the history, the same for all volumes. So a removal is in the same round as the store in
        another volume that allowed it, or in a later round. If each volume were cut off separately, the removal might
        be sent first.
        """
        nets: dict[VolumeId, _Net] = {}
        with self._lock:
            for _ in range(min(limit, len(self._events))):
                volume, key, block = self._events.popleft()
                nets.setdefault(volume, _Net()).add(key, block)
            for volume, net in nets.items():
                self._volumes[volume].taken += net.events
        return list(_never_hidden([net.taken(volume) for volume, net in nets.items()]))

    def behind(self, volume: VolumeId) -> bool:
        """Whether events that were in the log when ``wait`` returned are not taken yet."""
        with self._lock:
            log = self._of(volume)
            return log.taken < log.gathered

    def waiting(self) -> int:
        """Number of events that the index has not applied yet."""
        with self._lock:
            return sum(log.appended - log.acknowledged for log in self._volumes.values()) if self._keep else 0

    def take_inventory_request(self, volume: VolumeId) -> bool:
        """Return whether the volume's log overflowed since the last call."""
        with self._lock:
            log = self._of(volume)
            needed, log.inventory_needed = log.inventory_needed, False
            return needed

    def acknowledge(self, volume: VolumeId, events: int) -> None:
        """Record that the index has applied this many more events of a volume."""
        with self._lock:
            log = self._of(volume)
            log.acknowledged = min(log.appended, log.acknowledged + events)
            self._acknowledged.notify_all()

    def wait_published(self, volumes: Sequence[VolumeId], deadline_s: float) -> bool:
        """Wait until the index has applied all events logged before the call for some volumes. Returns False at the deadline."""
        if not self._keep:
            return False
        with self._lock:
            marks = [(log, log.appended) for log in map(self._of, volumes)]
            self._hurry_up()
            while any(log.acknowledged < mark for log, mark in marks):
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0 or not wait(self._acknowledged, left_s, self._counters):
                    return all(log.acknowledged >= mark for log, mark in marks)
            return True

    def range_digests(self, volume: VolumeId) -> RangeDigests:
        """Return the state of all ranges as of now. While the volume's whole inventory must be sent, no range is settled.

        After the log overflowed, a range may count as settled too early. It then looks drifted, and is repaired in vain.
        """
        with self._lock:
            log = self._of(volume)
            known = -1 if log.inventory_needed else log.acknowledged
            settled = [number <= known for number in log.changed_last]
            return RangeDigests(list(log.digests), list(log.counts), list(log.changes), settled)

    def changes(self, volume: VolumeId) -> list[int]:
        """Return how often each range has changed. Removing and adding a block changes this, but not the digest."""
        with self._lock:
            return list(self._of(volume).changes)
