"""Record of one key, as bytes, and the changes of a published batch. Pure; any key-value store can hold the records.

A record is little-endian uint32 numbers::

    namespace ordinal, depth, then for each replica: volume epoch, run_start

``run_start`` is a claim of the volume epoch: *when this block was published, my volume held the chain from depth run_start up
to here without a gap*. It is derived from the parent's record: if the volume epoch is in it, its ``run_start`` is inherited,
otherwise the run begins here. Publishing a block again renews the claim, so a claim is as true as the parent's record.

A claim becomes stale only if a block is removed while the same volume epoch still holds its children. Nodes remove leaves
first, so that happens only if a node was lost or an index was repaired in between. Readers (``kvstore.index.prefix``) trust a
claim only as far down as the next record that they know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeGuard, cast

from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.contract import VolumeEpoch

HEAD_BYTES = 8
REPLICA_BYTES = 8

Replicas = dict[VolumeEpoch, int]
"""Volume epoch -> run_start."""

_pack_single = struct.Struct("<4I").pack
_UNPACK = {size: struct.Struct(f"<{size // 4}I").unpack for size in range(HEAD_BYTES + REPLICA_BYTES, 65, REPLICA_BYTES)}
"""Compiled formats of records with one to seven replicas. They are twice as fast, and nearly all records have as few."""


def encode(ordinal: int, depth: int, replicas: Mapping[VolumeEpoch, int]) -> bytes:
    """Encode a record."""
    flat = [number for replica in replicas.items() for number in replica]
    return struct.pack(f"<{2 + len(flat)}I", ordinal, depth, *flat)


def is_record(value: object) -> TypeGuard[bytes]:
    """Whether a value from outside of this process has the length of a record."""
    return isinstance(value, bytes) and is_record_size(len(value))


def is_record_size(size: int) -> bool:
    """Whether a record can have this length."""
    return size > HEAD_BYTES and (size - HEAD_BYTES) % REPLICA_BYTES == 0


def decode(value: bytes) -> tuple[int, ...]:
    """Decode a record: (ordinal, depth, volume epoch, run_start, volume epoch, run_start, …)."""
    unpack = _UNPACK.get(len(value))
    return unpack(value) if unpack is not None else struct.unpack(f"<{len(value) // 4}I", value)


def replicas_of(record: tuple[int, ...], volume_epochs: Container[VolumeEpoch]) -> Replicas:
    """The replicas of a decoded record whose volume epochs are among ``volume_epochs``."""
    replicas: dict[int, int] = {}
    for at in range(2, len(record), 2):
        volume_epoch = record[at]
        if volume_epoch in volume_epochs:
            replicas[volume_epoch] = record[at + 1]
    return cast("Replicas", replicas)


class BatchEdit:
    """One published batch, applied in memory to the records that it affects.

    Args:
        volume_epoch: the publisher.
        open_volume_epochs: open volume epochs; replicas of others are removed from affected records.
        ordinal_of: returns the number of a namespace; None: the index holds as many namespaces as it may.
        existing: present records of all keys and parents in the batch.
        known_ordinals: numbers of all namespaces; None: the index loses none. Records with another number are taken for records
            of the namespace that is published, because a key is a hash of its namespace.
    """

    def __init__(
        self,
        volume_epoch: VolumeEpoch,
        open_volume_epochs: Container[VolumeEpoch],
        ordinal_of: Callable[[NamespaceId], int | None],
        existing: Mapping[BlockKey, bytes],
        known_ordinals: Container[int] | None = None,
    ) -> None:
        self._volume_epoch = volume_epoch
        self._open = open_volume_epochs
        self._ordinal_of = ordinal_of
        self._existing = existing
        self._known_ordinals = known_ordinals
        self._now: dict[BlockKey, bytes | None] = dict(existing)
        self._touched: set[BlockKey] = set()
        self.conflicts = 0
        """Ignored blocks: the key is held at another depth, which is an error of a writer: a key is a hash of its chain."""
        self.foreign = 0
        """Ignored blocks: the key is held for another namespace."""
        self.unnamed = 0
        """Ignored blocks: their namespace is unknown, and the index holds as many as it may."""
        self.replaced = 0
        """Blocks that replaced a record of another depth, because their parents are held one level above."""
        self.stored: list[BlockRun] = []
        """Parts of the runs that took effect."""
        self.removed: dict[tuple[VolumeEpoch, int], list[BlockKey]] = {}
        """Keys that each volume epoch no longer holds, by namespace ordinal; for other volume epochs: replaced keys."""

    @staticmethod
    def reads(stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys whose records the batch reads, in order."""
        keys = set(removed)
        for run in stored:
            keys.update(run.keys)
            if run.parent is not None:
                keys.add(run.parent)
        return sorted(keys)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Remove keys from the volume epoch."""
        ordinal, gone = -1, list[BlockKey]()
        for key in keys:
            value = self._now.get(key)
            if value is None:
                continue
            record = decode(value)
            if self._volume_epoch not in record[2::2]:
                continue
            replicas = replicas_of(record, self._open)
            replicas.pop(self._volume_epoch, None)
            self._now[key] = encode(record[0], record[1], replicas) if replicas else None
            self._touched.add(key)
            if record[0] != ordinal:
                ordinal = record[0]
                gone = self.removed.setdefault((self._volume_epoch, ordinal), [])
            gone.append(key)

    def store(self, run: BlockRun) -> None:
        """Add a run to the volume epoch."""
        ordinal = self._ordinal_of(run.namespace)
        if ordinal is None:
            self.unnamed += len(run.keys)
            return
        start = self._run_start(run, ordinal)
        if self._now.keys().isdisjoint(run.keys):  # all keys are new, as in most of a node's inventory
            volume_epoch = self._volume_epoch
            depths = range(run.depth, run.depth + len(run.keys))
            self._now.update(zip(run.keys, [_pack_single(ordinal, depth, volume_epoch, start) for depth in depths], strict=True))
            self._touched.update(run.keys)
            self.stored.append(run)
            return
        parent_held = run.parent not in run.keys and self._is_held_at(run.parent, ordinal, run.depth - 1)
        begun = run.depth
        for depth, key in enumerate(run.keys, start=run.depth):
            if not self._store_one(key, ordinal, depth, start, parent_held=parent_held):
                self._record_stored(run, begun, depth)
                begun = start = depth + 1  # the stored run has a gap here
        self._record_stored(run, begun, run.depth + len(run.keys))

    def _record_stored(self, run: BlockRun, begun: int, end: int) -> None:
        """Record that blocks at depths ``[begun, end)`` of a run took effect."""
        first, last = begun - run.depth, end - run.depth
        if last - first == len(run.keys):
            self.stored.append(run)
        elif last > first:
            parent = run.keys[first - 1] if first else run.parent
            self.stored.append(BlockRun(run.namespace, parent, begun, run.keys[first:last]))

    def _is_held_at(self, key: BlockKey | None, ordinal: int, depth: int) -> bool:
        """Whether an open volume epoch holds a key at this depth."""
        value = None if key is None else self._now.get(key)
        if value is None:
            return False
        record = self._decode(value, ordinal)
        return record[0] == ordinal and record[1] == depth and bool(replicas_of(record, self._open))

    def _run_start(self, run: BlockRun, ordinal: int) -> int:
        value = None if run.parent is None else self._now.get(run.parent)
        if value is None:
            return run.depth
        parent = self._decode(value, ordinal)
        if parent[0] != ordinal or parent[1] + 1 != run.depth:
            return run.depth
        return replicas_of(parent, self._open).get(self._volume_epoch, run.depth)

    def _decode(self, value: bytes, ordinal: int) -> tuple[int, ...]:
        """Decode the record of a key or parent of a namespace. A number that the index has lost becomes that of the namespace."""
        record = decode(value)
        if record[0] == ordinal or self._known_ordinals is None or record[0] in self._known_ordinals:
            return record
        return (ordinal, *record[1:])

    def _store_one(self, key: BlockKey, ordinal: int, depth: int, start: int, *, parent_held: bool) -> bool:
        value = self._now.get(key)
        replicas: Replicas = {}
        if value is not None:
            record = self._decode(value, ordinal)
            replicas = replicas_of(record, self._open)
            if record[:2] != (ordinal, depth):
                if replicas and record[0] != ordinal:
                    self.foreign += 1
                    return False
                if replicas and not parent_held:
                    self.conflicts += 1
                    return False
                self.replaced += bool(replicas)
                for volume_epoch in replicas.keys() - {self._volume_epoch}:
                    self.removed.setdefault((volume_epoch, record[0]), []).append(key)
                replicas = {}
        replicas[self._volume_epoch] = start
        self._now[key] = encode(ordinal, depth, replicas)
        self._touched.add(key)
        return True

    def changes(self) -> list[tuple[BlockKey, bytes | None]]:
        """Changed records, then those to delete (None)."""
        return [*self.puts(), *((key, None) for key in self.deletes())]

    def puts(self) -> list[tuple[BlockKey, bytes]]:
        """Changed records, in key order."""
        now, existing = self._now, self._existing
        return [(key, value) for key in sorted(self._touched) if (value := now[key]) is not None and existing.get(key) != value]

    def deletes(self) -> list[BlockKey]:
        """Keys of records to delete, in order."""
        return [key for key in sorted(self._touched) if self._now[key] is None and key in self._existing]
