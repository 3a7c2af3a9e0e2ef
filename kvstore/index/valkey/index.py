"""The prefix index in Valkey Cluster (or Redis Cluster), for any number of metadata servers.

* **Records** have one key per block, spread over 4,096 ranges (``keys``). A lookup reads a few of them in one round trip to all
  shards; a shard that does not answer makes its records *unknown*, and the search goes around them (``kvstore.index.prefix``).
* **Publishing** reads the records of a batch, edits them in memory, and replaces each by compare-and-set. Records that another
  server changed after that are read and edited again. So a batch is atomic per key, not as a whole; a node repeats what was not
  acknowledged, and repeating changes nothing.
* **The rest** is small and has one hash slot (``small_state``), with a copy in each server.

Threads: the client of the cluster lives on one event loop: the caller's, or a private one in a thread. Methods may be called
from any other thread and wait there for fresh answers. On the event loop itself, ``lookup_async`` and methods that read the
small state answer at once, the latter from the copy (heartbeats: at most 0.4 s old); all others raise ``Internal``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Final, Self, TypeVar

import hiredis

from kvstore.core import limits
from kvstore.core.checksum import key_range
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.checks import check_batch, check_keys, check_namespace, check_packed_keys, check_ranges, check_volume
from kvstore.index.contract import (
    Beat,
    IndexedBlock,
    IndexEntry,
    IndexListener,
    IndexStats,
    LeaseHolder,
    PrefixHit,
    PrefixIndex,
    RemovedKeys,
    ServerRole,
    VolumeEpoch,
    VolumeEpochInfo,
)
from kvstore.index.counts import Count, count_nothing, report_ignored
from kvstore.index.prefix import PrefixSearch
from kvstore.index.record import BatchEdit, decode, encode, replicas_of
from kvstore.index.run_end_cache import RunEndCache
from kvstore.index.small_records import check_beats, check_holder, check_notes
from kvstore.index.valkey import keys as names
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import Command, Lane, ValkeyClient
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.keys import RANGE_SLOTS, TAG_BYTES, TAGS
from kvstore.index.valkey.records import (
    CAS_SCRIPT,
    Abilities,
    abilities_of,
    change_command,
    read_command,
    took_effect,
)
from kvstore.index.valkey.small_state import POLL_S, SmallState, SmallStateStore
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)
T = TypeVar("T")

LOOKUP_BUDGET_S: Final = 0.02
"""Time that a lookup waits for one shard, by default."""
PART_S: Final = 10.0
"""Deadline of ``_PART`` commands of a publish or a long read."""
SYNC_MARGIN_S: Final = 5.0
MAX_RACES: Final = 5
"""Attempts to replace records that other servers change at the same time. Then anti-entropy repairs what is left."""
REPLICATION_MS: Final = 100
"""Time that a publish waits for the replicas. Records that they lack can be lost with the primary; anti-entropy finds them."""
_PART: Final = 2_048
"""Commands sent at once, so that the event loop is not held for long."""
_KEYS_PER_RANGE: Final = 1 << 24
_BEATS_POLLS: Final = 3
"""Heartbeats are read with every third poll of the small state."""
_STATS_POLLS: Final = 20
QUIET_ASKED_S: Final = 5.0
"""How long after a question on the event loop the notes that are not announced are read with the heartbeats."""
_RANGES_AT_ONCE: Final = 64
_USED_MEMORY: Final = re.compile(rb"^used_memory:(\d+)", re.MULTILINE)


def _ignore() -> None:
    pass


class ValkeyIndex(PrefixIndex):
    """A prefix index in a cluster. Create it with ``open``, or on an event loop with ``start``."""

    leases_roles: ClassVar[bool] = True

    def __init__(
        self,
        address: ValkeyAddress,
        loop: asyncio.AbstractEventLoop,
        count: Count,
        lookup_budget_s: float,
        own: _LoopThread | None,
        on_rebuild: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._own = own
        self._on_rebuild = on_rebuild
        self._count = count
        self._cluster = ValkeyClient(address, budget_s=lookup_budget_s, count=count)
        self._small = SmallStateStore(self._cluster)
        self._abilities = Abilities()
        self._run_ends = RunEndCache()
        self._listener: IndexListener | None = None
        self._open_visible: tuple[object, Container[VolumeEpoch], frozenset[VolumeEpoch]] = ((), frozenset(), frozenset())
        self._changes = FailureTracker()
        self._swept_to = 0
        self._quiet_asked_s = -QUIET_ASKED_S
        self._stats = IndexStats(0, 0, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    def open(cls, address: ValkeyAddress, *, count: Count = count_nothing, lookup_budget_s: float = LOOKUP_BUDGET_S) -> Self:
        """Open the index with a private event loop, in a thread.

        Raises:
            Unavailable: the cluster does not answer.
            Unsupported: the servers form no cluster, or another version of this software wrote the index.
            Unauthenticated, PermissionDenied: the cluster rejects the user.
        """
        own = _LoopThread()
        index = cls(address, own.loop, count, lookup_budget_s, own, _ignore)
        try:
            own.run(index._start(), PART_S)
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    async def start(
        cls,
        address: ValkeyAddress,
        *,
        count: Count = count_nothing,
        lookup_budget_s: float = LOOKUP_BUDGET_S,
        on_rebuild: Callable[[], None] = _ignore,
    ) -> Self:
        """Open the index on the running event loop. The same errors as ``open``."""
        index = cls(address, asyncio.get_running_loop(), count, lookup_budget_s, None, on_rebuild)
        try:
            await index._start()
        except BaseException:
            await index.close_async()
            raise
        return index

    async def _start(self) -> None:
        await self._cluster.start()
        await self._learn_abilities()
        await self._small.load()
        self._stats = await self._read_stats()
        self._tasks = [asyncio.create_task(self._poll())]

    async def _learn_abilities(self) -> None:
        answers = await self._cluster.on_each(pack("INFO", "server"), budget_s=1.0)
        replies = [answer.decode(errors="replace") for answer in answers.values() if isinstance(answer, bytes)]
        self._abilities = functools.reduce(Abilities.both, map(abilities_of, replies)) if replies else Abilities()

    async def _poll(self) -> None:
        """Keep the copy of the small state and the sizes fresh."""
        for turn in itertools.count():
            await asyncio.sleep(POLL_S)
            try:
                await self._small.refresh()
                if turn % _BEATS_POLLS == 0:
                    await self._small.refresh_beats()
                    if time.monotonic() - self._quiet_asked_s < QUIET_ASKED_S:
                        await self._small.refresh_quiet_notes()
                if turn % _STATS_POLLS == 0:
                    self._stats = await self._read_stats()
            except KVStoreError as error:
                limited.warning("Valkey unreachable: %s", error)
                self._changes.failed(time.monotonic(), error)
            else:
                self._changes.succeeded(time.monotonic())

    @property
    def epoch(self) -> bytes:
        return self._small.state.epoch

    # ---- volume epochs ----
    def open_volume_epoch(self, volume_id: VolumeId, node_id: NodeId, tier: Tier, boot_id: BootId) -> VolumeEpoch:
        check_volume(volume_id, node_id, boot_id)
        opened = self._call(self._small.open_volume_epoch(volume_id, node_id, tier, boot_id))
        if self._listener is not None:
            self._listener.opened(VolumeEpochInfo(opened, volume_id, node_id, tier, boot_id))
        return opened

    def close_volume_epoch(self, volume_epoch: VolumeEpoch) -> None:
        self._call(self._small.close_volume_epoch(volume_epoch))
        if self._listener is not None:
            self._listener.closed(volume_epoch)

    def volume_epochs(self) -> list[VolumeEpochInfo]:
        return list(self._fresh().volume_epochs.values())

    # ---- blocks ----
    def publish(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
        check_batch(stored, removed)
        state = self._fresh()
        if volume_epoch not in state.volume_epochs:
            raise NotFound("the volume epoch is not open", volume_epoch=volume_epoch)
        ordinals = self._ordinals({run.namespace for run in stored})
        keys_read = BatchEdit.reads(stored, removed)
        lost: dict[tuple[VolumeEpoch, int], list[BlockKey]] = {}
        for _ in range(MAX_RACES):
            replies = self._run([read_command(key) for key in keys_read])
            existing = {key: reply for key, reply in zip(keys_read, replies, strict=True) if isinstance(reply, bytes)}
            edit = BatchEdit(volume_epoch, state.volume_epochs, ordinals.get, existing)
            edit.remove(removed)
            for run in stored:
                edit.store(run)
            for holder, keys in edit.removed.items():
                lost[holder] = list(dict.fromkeys([*lost.get(holder, ()), *keys]))
            changes: list[tuple[BlockKey, bytes | None]] = [*edit.puts(), *((key, None) for key in edit.deletes())]
            commands = [change_command(key, existing.get(key), value, self._abilities) for key, value in changes]
            raced = [reply for reply in self._change(commands) if not took_effect(reply)]
            if not raced:
                break
            self._count(metadata_metrics.INDEX_RACES, len(raced))
        else:
            self._count(metadata_metrics.INDEX_RACES_LOST, len(raced))
            limited.warning(
                "gave up on records that other servers keep changing (volume_epoch=%d, keys=%d)", volume_epoch, len(raced)
            )
        self._replicate({slot for slot, _ in commands})
        self._run_ends.record_stored(stored)
        if self._listener is not None and (edit.stored or lost):
            told = [RemovedKeys(holder, self._name_of(ordinal), keys) for (holder, ordinal), keys in lost.items()]
            self._listener.published(volume_epoch, edit.stored, told)
        report_ignored(edit, volume_epoch, self._count)

    async def lookup_async(
        self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()
    ) -> PrefixHit:
        check_packed_keys(keys)
        state, count, head = self._small.state, len(keys) // KEY_BYTES, BlockKey(keys[:KEY_BYTES])
        known = state.namespaces.get(namespace)
        if not count or known is None:
            return PrefixHit(0, (), state.revision)
        volume_epochs = self._visible_of(state, visible)
        search = PrefixSearch(count, self._run_ends.of(head, ends))
        for positions in search:
            names_read = [BlockKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in positions]
            answers = await self._cluster.run([read_command(key) for key in names_read])
            for position, answer in zip(positions, answers, strict=True):
                if isinstance(answer, bytes):
                    record = decode(answer)
                    fits = record[0] == known.ordinal and record[1] == position
                    search.found[position] = replicas_of(record, volume_epochs) if fits else {}
                elif answer is None:
                    search.found[position] = {}
        hit = search.hit(state.revision)
        if hit.unknown:
            self._count(metadata_metrics.LOOKUPS_WITH_UNKNOWN, 1)
        else:
            self._run_ends.record_lookup(head, count, tuple([run.start + run.count for run in hit.runs]))
        return hit

    def lookup(self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()) -> PrefixHit:
        self._fresh()
        return self._call(self.lookup_async(namespace, keys, visible, ends))

    def describe(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        state = self._fresh()
        by_number = {known.ordinal: namespace for namespace, known in state.namespaces.items()}
        found: list[IndexEntry | None] = []
        for value in self._run([read_command(key) for key in keys]):
            if not isinstance(value, bytes):
                found.append(None)
                continue
            ordinal, depth, *flat = decode(value)
            replicas = tuple((VolumeEpoch(number), start) for number, start in zip(flat[::2], flat[1::2], strict=True))
            found.append(IndexEntry(by_number.get(ordinal), depth, replicas))
        return found

    def holders(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        check_keys(keys)
        state = self._fresh()
        known = state.namespaces.get(namespace)
        if known is None:
            return [()] * len(keys)
        values = self._run([read_command(key) for key in keys])
        records = [decode(value) if isinstance(value, bytes) else () for value in values]
        return [
            tuple(replicas_of(record, state.volume_epochs)) if record and record[0] == known.ordinal else () for record in records
        ]

    # ---- the whole ----
    def listen(self, listener: IndexListener) -> None:
        self._listener = listener

    def blocks_from(self, first: BlockKey | None, most: int) -> tuple[list[IndexedBlock], BlockKey | None]:
        if most < 1:
            raise InvalidArgument("most must be positive", most=most)
        state = self._fresh()
        by_number = {known.ordinal: namespace for namespace, known in state.namespaces.items()}
        records: list[tuple[bytes, bytes]] = []
        number = key_range(first) if first is not None else 0
        while number < limits.DIGEST_RANGES and len(records) <= most:
            width = min(self._width(most), limits.DIGEST_RANGES - number)
            records += [record for record in self.records_in_ranges(number, width) if first is None or record[0] >= first]
            number += width
        following = BlockKey(records[most][0]) if len(records) > most else None
        blocks = []
        for key, value in records[:most]:
            record = decode(value)
            held_by = tuple(replicas_of(record, state.volume_epochs))
            namespace = by_number.get(record[0])
            if held_by and namespace is not None:
                blocks.append(IndexedBlock(BlockKey(key), namespace, record[1], held_by))
        return blocks, following

    # ---- anti-entropy ----
    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        records = self.records_in_ranges(key_range, 1)
        if volume_epoch not in self._fresh().volume_epochs:
            return []
        return [BlockKey(key) for key, value in records if volume_epoch in decode(value)[2::2]]

    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        check_ranges(first, count)
        ranges = range(first, first + count)
        listings = self._run(
            [(RANGE_SLOTS[at], pack("CLUSTER", "GETKEYSINSLOT", RANGE_SLOTS[at], _KEYS_PER_RANGE)) for at in ranges]
        )
        keys: list[BlockKey] = []
        for at, listing in zip(ranges, listings, strict=True):
            if not isinstance(listing, list):
                raise Unavailable("Valkey did not list a range", range=at, reply=str(listing)[:100])
            mine = [name for name in listing if isinstance(name, bytes) and len(name) == TAG_BYTES + KEY_BYTES]
            keys += sorted(BlockKey(name[TAG_BYTES:]) for name in mine if name.startswith(TAGS[at]))
        values = self._run([read_command(key) for key in keys])
        return [(key, value) for key, value in zip(keys, values, strict=True) if isinstance(value, bytes)]

    def sweep(self, max_entries: int) -> bool:
        if max_entries < 1:
            raise InvalidArgument("max_entries must be positive", max_entries=max_entries)
        state = self._fresh()
        if not state.dead:
            return True
        seen = 0
        while seen < max_entries and self._swept_to < limits.DIGEST_RANGES:
            width = min(self._width(max_entries), limits.DIGEST_RANGES - self._swept_to)
            records = self.records_in_ranges(self._swept_to, width)
            self._sweep_records(records, state)
            seen += len(records)
            self._swept_to += width
        if self._swept_to < limits.DIGEST_RANGES:
            return False
        self._swept_to = 0
        return self._call(self._small.end_sweep()) == 0

    def _width(self, records: int) -> int:
        """Ranges that hold about as many records, at least one."""
        return max(1, min(_RANGES_AT_ONCE, records * limits.DIGEST_RANGES // (self._stats.blocks + 1)))

    def _sweep_records(self, records: Sequence[tuple[bytes, bytes]], state: SmallState) -> None:
        """Remove the replicas of closed volume epochs. A record that changes at the same time is left to its writer."""
        changes: list[Command] = []
        for key, value in records:
            record = decode(value)
            replicas = replicas_of(record, state.volume_epochs)
            if len(replicas) * 2 + 2 < len(record):
                left = encode(record[0], record[1], replicas) if replicas else None
                changes.append(change_command(BlockKey(key), value, left, self._abilities))
        self._change(changes)

    # ---- namespaces ----
    def put_namespace(self, namespace: NamespaceId, spec: bytes) -> None:
        check_namespace(namespace)
        self._call(self._small.put_namespace(namespace, spec))

    def spec_of(self, namespace: NamespaceId) -> bytes | None:
        known = self._fresh().namespaces.get(namespace)
        return None if known is None else known.spec

    def namespaces(self) -> list[tuple[NamespaceId, bytes]]:
        known = sorted(self._fresh().namespaces.items(), key=lambda item: item[1].ordinal)
        return [(namespace, one.spec) for namespace, one in known if one.spec is not None]

    # ---- notes and heartbeats ----
    def put_notes(self, notes: Mapping[str, bytes | None], *, announce: bool = True) -> None:
        check_notes(notes)
        self._call(self._small.put_notes(notes, announce=announce))

    def note(self, name: str) -> bytes | None:
        if not self._on_loop():
            return self._call(self._small.note(name))
        state = self._fresh()
        self._quiet_asked_s = time.monotonic()
        return state.quiet_notes.get(name, state.notes.get(name))

    def notes(self, prefix: str) -> dict[str, bytes]:
        if not self._on_loop():
            self._call(self._small.refresh_quiet_notes())
        self._quiet_asked_s = time.monotonic()
        state = self._fresh()
        return {name: value for name, value in {**state.notes, **state.quiet_notes}.items() if name.startswith(prefix)}

    def put_beats(self, beats: Mapping[NodeId, Beat | None]) -> None:
        check_beats(beats)
        self._call(self._small.put_beats(beats))

    def beats(self) -> dict[NodeId, Beat]:
        if not self._on_loop():
            self._call(self._small.refresh_beats())
        return dict(self._small.state.beats)

    # ---- leases of roles ----
    def take_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder, ttl_s: float) -> dict[ServerRole, LeaseHolder]:
        check_holder(holder)
        return self._call(self._small.take_leases(roles, holder, ttl_s))

    def free_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder) -> None:
        check_holder(holder)
        self._call(self._small.free_leases(roles, holder))

    def lease_holders(self) -> dict[ServerRole, LeaseHolder]:
        return dict(self._fresh().leases)

    # ---- the whole ----
    @property
    def revision(self) -> int:
        return self._fresh().revision

    def stats(self) -> IndexStats:
        if not self._on_loop():
            self._stats = self._call(self._read_stats())
        now_s = time.monotonic()
        return dataclasses.replace(self._stats, failing=self._changes.reason(now_s), failing_s=self._changes.seconds(now_s))

    async def _read_stats(self) -> IndexStats:
        sizes = await self._cluster.on_each(pack("DBSIZE"), budget_s=1.0)
        memory = await self._cluster.on_each(pack("INFO", "memory"), budget_s=1.0)
        (small,) = await self._cluster.run_until(
            [(names.SMALL_SLOT, pack("EXISTS", *names.ALL_SMALL, *names.LEASES.values()))], time.monotonic() + 1.0
        )
        used = [_USED_MEMORY.search(one) for one in memory.values() if isinstance(one, bytes)]
        keys = sum(size for size in sizes.values() if isinstance(size, int))
        return IndexStats(
            max(0, keys - (small if isinstance(small, int) else 0)),
            sum(int(match[1]) for match in used if match is not None),
            self._small.state.dead,
        )

    def close(self) -> None:
        if self._closed:
            return
        if self._own is not None:
            self._own.run(self.close_async(), SYNC_MARGIN_S)
            self._own.stop()
        else:
            self._call(self.close_async())

    async def close_async(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cluster.close()

    def request_rebuild(self) -> None:
        logger.warning("index rebuild requested: dropping the small state, which begins another epoch")
        self._count(metadata_metrics.INDEX_REBUILDS_ASKED, 1)
        if not self._on_loop():
            self._call(self._drop())
            return
        self._tasks.append(self._loop.create_task(self._drop()))

    async def _drop(self) -> None:
        await self._small.drop()
        self._on_rebuild()

    # ---- parts
    def _on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the event loop of the index, from another thread."""
        if self._closed or self._on_loop():
            work.close()
            if self._closed:
                raise Unavailable("the index is closed")
            raise Internal("a call that waits for Valkey would block the event loop")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PART_S + SYNC_MARGIN_S)

    def _fresh(self) -> SmallState:
        """The small state: as it is now, or on the event loop the copy."""
        if not self._on_loop():
            self._call(self._small.refresh())
        return self._small.state

    def _run(self, commands: Sequence[Command], lane: Lane = Lane.READS) -> list[Reply]:
        replies: list[Reply] = []
        for at in range(0, len(commands), _PART):
            replies += self._call(self._cluster.run_until(commands[at : at + _PART], time.monotonic() + PART_S, lane))
        return replies

    def _change(self, commands: Sequence[Command]) -> list[Reply]:
        """Run changes of records. Servers that lack the script get it first.

        Raises:
            CapacityExceeded: Valkey is full.
            Unavailable: Valkey rejects a change for another reason.
        """
        replies = self._run(commands, Lane.WRITES)
        failed = [reply for reply in replies if isinstance(reply, hiredis.ReplyError)]
        if any(str(error).startswith("NOSCRIPT") for error in failed):
            self._call(self._cluster.on_each(pack("SCRIPT", "LOAD", CAS_SCRIPT), budget_s=1.0))
            replies = self._run(commands, Lane.WRITES)
            failed = [reply for reply in replies if isinstance(reply, hiredis.ReplyError)]
        if failed:
            full = str(failed[0]).startswith("OOM")
            error: KVStoreError = (
                CapacityExceeded("Valkey is full: raise its maxmemory or add shards", reply=str(failed[0]))
                if full
                else Unavailable("Valkey rejects changes", reply=str(failed[0])[:200])
            )
            self._changes.failed(time.monotonic(), error)
            raise error
        return replies

    def _replicate(self, slots: set[int]) -> None:
        """Wait a moment until the replicas have what was written; count the shards whose replicas lag."""
        topology = self._cluster.topology
        by_shard = {topology.of_slot[slot]: slot for slot in slots}
        waits = [(slot, pack("WAIT", 1, REPLICATION_MS)) for number, slot in by_shard.items() if topology.shards[number].replicas]
        if not waits:
            return
        answers = self._call(self._cluster.run(waits, budget_s=1.0, lane=Lane.WRITES))
        lagging = sum(not isinstance(answer, int) or answer < 1 for answer in answers)
        if lagging:
            self._count(metadata_metrics.INDEX_UNREPLICATED, lagging)

    def _ordinals(self, namespaces: set[NamespaceId]) -> dict[NamespaceId, int | None]:
        """Numbers of namespaces. One whose blocks arrive before its spec gets a number now; None: there are too many."""
        found: dict[NamespaceId, int | None] = {}
        for namespace in namespaces:
            known = self._small.state.namespaces.get(namespace)
            if known is not None:
                found[namespace] = known.ordinal
                continue
            try:
                found[namespace] = self._call(self._small.put_namespace(namespace, None))
            except CapacityExceeded:
                found[namespace] = None
        return found

    def _name_of(self, ordinal: int) -> NamespaceId:
        name = self._small.state.named(ordinal)
        return NamespaceId(b"") if name is None else name

    def _visible_of(self, state: SmallState, visible: Container[VolumeEpoch]) -> Container[VolumeEpoch]:
        """The open volume epochs among the visible ones; computed once per frozen set."""
        judged_state, judged, open_visible = self._open_visible
        if judged is visible and judged_state is state.volume_epochs:
            return open_visible
        open_visible = frozenset([volume_epoch for volume_epoch in state.volume_epochs if volume_epoch in visible])
        if isinstance(visible, frozenset):
            self._open_visible = state.volume_epochs, visible, open_visible
        return open_visible


class _LoopThread:
    """A private event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="valkey-index", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run work there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SYNC_MARGIN_S)
        self.loop.close()
