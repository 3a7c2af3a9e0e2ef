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
import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Container, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Final, Self, TypeVar

import hiredis

from kvstore.core import limits
from kvstore.core.checksum import key_range
from kvstore.core.clock import BootTimeClock
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.core.index_backend import IndexBackend, MetadataServerRecord
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.checks import check_batch, check_keys, check_namespace, check_packed_keys, check_ranges, check_volume
from kvstore.index.contract import (
    Beat,
    IndexedBlock,
    IndexEntry,
    IndexListener,
    IndexStats,
    LeaseHolder,
    PackedRecords,
    PrefixHit,
    PrefixIndex,
    RangeCheck,
    RemovedKeys,
    ServerRole,
    VolumeEpoch,
    VolumeEpochInfo,
)
from kvstore.index.counts import Count, Observe, count_nothing, observe_nothing, report_ignored
from kvstore.index.loop_thread import LoopThread, run_on
from kvstore.index.prefix import PrefixSearch
from kvstore.index.record import BatchEdit, Replicas, decode, is_record, replicas_of
from kvstore.index.run_end_cache import RunEndCache
from kvstore.index.small_records import check_beats, check_holder, check_notes
from kvstore.index.valkey import keys as names
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import UNANSWERED, Answer, Command, Lane, ValkeyClient
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.feed import FRESH_S, BlockFeed, still_true, with_earlier_removals
from kvstore.index.valkey.range_audit import RangeAudit, read_ranges
from kvstore.index.valkey.records import (
    CAS_SCRIPT,
    Abilities,
    PublishAttempt,
    PublishedBatch,
    blocks_of,
    change_command,
    damaged_keys,
    entries_of,
    holders_of,
    joined,
    raced_keys,
    read_command,
    records_of,
    refused_change,
    sweep_commands,
    unanswered,
)
from kvstore.index.valkey.servers.metadata_servers import decode_records, exchange_commands
from kvstore.index.valkey.servers.summary import read_abilities, read_stats
from kvstore.index.valkey.servers.watch import ServerWatch
from kvstore.index.valkey.shared_value import SharedValue
from kvstore.index.valkey.small_state import POLL_S, REPLICATION_MS, OpenVisibleEpochs, SmallState, SmallStateStore
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)
T = TypeVar("T")
A = TypeVar("A", bound=Answer)

LOOKUP_BUDGET_S: Final = 0.02
"""Time that a lookup waits for one shard, by default."""
PART_S: Final = 10.0
"""Deadline of ``_PART`` commands of a publish or a long read."""
SYNC_MARGIN_S: Final = 5.0
SERVERS_S: Final = 1.0
"""Deadline of an exchange of the metadata servers' records."""
MAX_RACES: Final = 40
"""Attempts to replace records that other servers change at the same time: more than there are servers, one of which
wins each time. Then nodes compare the ranges of what is left."""
RACE_PAUSE_S: Final = 0.002
"""The longest pause before the second attempt, and by how much it grows with each."""
_PART: Final = 2_048
"""Commands sent at once, so that the event loop is not held for long."""
_LISTED: Final = 1 << 14
"""Records whose names are listed at once, about: a shard answers no lookup while it lists a range."""
_BEATS_POLLS: Final = 3
"""Heartbeats are read with every third poll of the small state."""
LEASES_STALE_S: Final = 3.0
"""Age of the copy from which its leases count as ended."""
BEATS_STALE_S: Final = 1.0
"""Age of the copy of heartbeats after which it says nothing about which nodes are alive."""
UNREACHABLE_S: Final = 2.0
"""Silence of the shard of the small state after which nodes must use another server."""
_QUIET_POLLS: Final = 10
"""Notes that are not announced are read with every tenth poll: reports of nodes are large."""
_STATS_POLLS: Final = 50
QUIET_ASKED_S: Final = 5.0
"""How long after a question on the event loop the notes that are not announced are read once per second."""
_RANGES_AT_ONCE: Final = 128


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
        observe: Observe,
        lookup_budget_s: float,
        own: LoopThread | None,
        on_rebuild: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._own = own
        self._on_rebuild = on_rebuild
        self._count = count
        self._cluster = ValkeyClient(address, budget_s=lookup_budget_s, count=count, observe=observe, on_moved=self._moved)
        self._watch = ServerWatch(address, self._cluster)
        self._small = SmallStateStore(self._cluster, count)
        self._clock = BootTimeClock()
        self._audit = RangeAudit(self._cluster, self._small, count)
        self.feed = BlockFeed(self._cluster, count)
        """Block events for the watchers of all servers."""
        self._abilities = Abilities()
        self._run_ends = RunEndCache()
        self._listener: IndexListener | None = None
        self._open_visible = OpenVisibleEpochs()
        self._changes = FailureTracker()
        self._polls = FailureTracker()
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
        own = LoopThread("valkey-index")
        index = cls(address, own.loop, count, observe_nothing, lookup_budget_s, own, _ignore)
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
        observe: Observe = observe_nothing,
        lookup_budget_s: float = LOOKUP_BUDGET_S,
        on_rebuild: Callable[[], None] = _ignore,
    ) -> Self:
        """Open the index on the running event loop. The same errors as ``open``."""
        index = cls(address, asyncio.get_running_loop(), count, observe, lookup_budget_s, None, on_rebuild)
        try:
            await index._start()
        except BaseException:
            await index.close_async()
            raise
        return index

    async def _start(self) -> None:
        await self._cluster.start()
        self._abilities = await read_abilities(self._cluster)
        await self._small.load()
        await self._small.refresh_beats()
        await self.feed.poll()
        await self._audit.step()
        self._stats = await self._read_stats()
        self._tasks = [
            asyncio.create_task(self._poll(), name="index-poll"),
            asyncio.create_task(self._audit.run(), name="index-audit"),
            asyncio.create_task(self._watch.run(), name="index-watch-servers"),
        ]

    async def _poll(self) -> None:
        """Keep the copy of the small state and the sizes fresh."""
        for turn in itertools.count(1):  # the start has read everything
            await asyncio.sleep(POLL_S)
            try:
                began_s = self.feed.now_s()
                await self._small.refresh()
                self.feed.learn(self._small.state.feed, began_s)
                if turn % _BEATS_POLLS == 0:
                    await self._small.refresh_beats()
                if turn % _QUIET_POLLS == 0 and time.monotonic() - self._quiet_asked_s < QUIET_ASKED_S:
                    await self._small.refresh_quiet_notes()
                if turn % _STATS_POLLS == 0:
                    self._abilities = await read_abilities(self._cluster)
                    self._stats = await self._read_stats()
            except KVStoreError as error:
                limited.warning("Valkey unreachable: %s", error)
                self._polls.failed(time.monotonic(), error)
            except Exception:  # task edge: without this task, the copy would stay as it is
                self._count(metadata_metrics.BACKGROUND_BUGS, 1)
                logger.exception("small state not read: unexpected error, trying again")
            else:
                self._polls.clear()

    def _moved(self, slots: Sequence[int]) -> None:
        self._audit.moved(slots)

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
        """Publish a batch, with compare-and-set for each record. The contract says what a batch is.

        1. Read the records of the batch, edit them in memory, and replace each that is still what was read (``_try_publish``).
        2. If other servers have changed some of them, do the same again after a random pause. Each time one server wins.
        3. Append to the feed what took effect, wait for the replicas of the shards, and tell the listener.

        Keys whose shard does not answer are *missed*: later attempts leave them out. Nodes compare the ranges of missed keys, and
        of those that other servers change in each attempt.
        """
        check_batch(stored, removed)
        batch = PublishedBatch(volume_epoch, stored, removed, BatchEdit.reads(stored, removed))
        lost: dict[tuple[VolumeEpoch, int], list[BlockKey]] = {}
        missed: AbstractSet[BlockKey] = frozenset()
        for races in range(MAX_RACES):
            time.sleep(random.uniform(0.0, races * RACE_PAUSE_S))  # noqa: S311  # no secret
            attempt = self._try_publish(batch, missed)
            missed = attempt.missed
            for holder, gone in attempt.edit.removed.items():
                lost[holder] = list(dict.fromkeys([*lost.get(holder, ()), *gone]))
            if not attempt.raced:
                break
            self._count(metadata_metrics.INDEX_RACES, len(attempt.raced))
            if attempt.all_damaged:
                break  # they never become what was expected
        if attempt.raced:
            self._count(metadata_metrics.INDEX_RACES_LOST, len(attempt.raced))
            limited.warning(
                "records not published: damaged, or changed by other servers in each attempt (volume_epoch=%d, keys=%d)",
                volume_epoch,
                len(attempt.raced),
            )
        raced = frozenset[BlockKey]() if attempt.all_damaged else attempt.raced  # a damaged record would be compared for ever
        self._note_unchanged(missed & {*removed, *(key for run in stored for key in run.keys)}, raced, volume_epoch)
        edit, slots = attempt.edit, attempt.slots
        told = [RemovedKeys(holder, self._name_of(ordinal), gone) for (holder, ordinal), gone in lost.items()]
        if self.feed.wanted():
            slots |= self._append_to_feed(volume_epoch, edit.stored, told, removed, attempt.changed_s)
        self._replicate(slots)
        self._run_ends.record_stored(stored)
        if self._listener is not None and (edit.stored or lost):
            self._listener.published(volume_epoch, edit.stored, told)
        report_ignored(edit, volume_epoch, self._count)

    def _try_publish(self, batch: PublishedBatch, left_out: AbstractSet[BlockKey]) -> PublishAttempt:
        """Read, edit and replace the records of a batch once. Keys that are left out are not replaced.

        Raises:
            NotFound: the volume epoch is not open.
        """
        keys = batch.keys
        replies = self._run_without_lost([read_command(key) for key in keys])
        state = self._fresh()  # after the records: each volume epoch that they name is known, or closed
        if batch.volume_epoch not in state.volume_epochs:
            raise NotFound("the volume epoch is not open", volume_epoch=batch.volume_epoch)
        ordinals = self._ordinals({run.namespace for run in batch.stored})
        existing = {key: reply for key, reply in zip(keys, replies, strict=True) if is_record(reply)}
        known = self._small.state.ordinals  # as of now: also those of this batch
        edit = BatchEdit(batch.volume_epoch, state.volume_epochs, ordinals.get, existing, known)
        edit.remove(batch.removed)
        for run in batch.stored:
            edit.store(run)
        missed = left_out | unanswered(keys, replies)
        changes = [(key, value) for key, value in edit.changes() if key not in missed]
        commands = [change_command(key, existing.get(key), value, self._abilities) for key, value in changes]
        changed_s = self._clock.now_s()  # before the change, which is true from then on
        outcomes = self._change(commands, self._run_without_lost)
        changed = [key for key, _ in changes]
        slots = {slot for (slot, _), outcome in zip(commands, outcomes, strict=True) if outcome is not UNANSWERED}
        raced = raced_keys(changed, outcomes)
        all_damaged = bool(raced) and raced <= damaged_keys(keys, replies)
        return PublishAttempt(edit, changed_s, slots, missed | unanswered(changed, outcomes), raced, all_damaged)

    def _note_unchanged(self, missed: AbstractSet[BlockKey], raced: AbstractSet[BlockKey], volume_epoch: VolumeEpoch) -> None:
        """Nodes compare the ranges of records that were not changed, as soon as their shard answers."""
        if missed:
            self._count(metadata_metrics.INDEX_CHANGES_MISSED, len(missed))
            limited.warning("published without lost shards: volume epoch %d (keys=%d)", volume_epoch, len(missed))
        if unchanged := missed | raced:
            self._loop.call_soon_threadsafe(self._audit.missed, {key_range(key) for key in unchanged})

    def _append_to_feed(
        self,
        volume_epoch: VolumeEpoch,
        stored: Sequence[BlockRun],
        told: Sequence[RemovedKeys],
        removed: Sequence[BlockKey],
        changed_s: float,
    ) -> set[int]:
        """Append a batch that took effect to the feed. Returns the hash slot that was written."""
        gone = with_earlier_removals(volume_epoch, told, removed)
        if self._clock.now_s() - changed_s > FRESH_S:
            keys = sorted({*(key for run in stored for key in run.keys), *(key for entry in gone for key in entry.keys)})
            changed_s = self._clock.now_s()
            values = self._run_without_lost([read_command(key) for key in keys])
            holders = {key: decode(value)[2::2] for key, value in zip(keys, values, strict=True) if is_record(value)}
            stored, gone = still_true(volume_epoch, stored, gone, holders)
            if self._clock.now_s() - changed_s > FRESH_S:
                raise Unavailable("Valkey is too slow for block events: publish again")
        if not stored and not gone:
            return set()
        slot = self._call(self.feed.append(volume_epoch, stored, gone))
        return set() if slot is None else {slot}

    async def lookup_async(
        self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()
    ) -> PrefixHit:
        check_packed_keys(keys)
        state, count, head = self._small.state, len(keys) // KEY_BYTES, BlockKey(keys[:KEY_BYTES])
        known = state.namespaces.get(namespace)
        if not count or known is None:
            return PrefixHit(0, (), state.revision)
        volume_epochs = self._open_visible.of(state, visible)
        search = PrefixSearch(count, self._run_ends.of(head, ends))
        trusted, answered = self._audit.states.trusted, False
        for positions in search:
            names_read = [BlockKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in positions]
            answers = await self._cluster.run([read_command(key) for key in names_read])
            self._count(metadata_metrics.LOOKUP_ROUNDS, 1)
            self._count(metadata_metrics.LOOKUP_COMMANDS, len(names_read))
            for position, key, answer in zip(positions, names_read, answers, strict=True):
                held: Replicas = {}
                if is_record(answer):
                    record = decode(answer)
                    if record[0] == known.ordinal and record[1] == position:
                        held = replicas_of(record, volume_epochs)
                elif answer is not None:  # not answered, or damaged
                    continue
                answered = True
                if held or trusted[key[0] << 4 | key[1] >> 4]:
                    search.found[position] = held
        try:
            hit = search.hit(state.revision)
        except Unavailable:
            if not answered:
                raise
            hit = PrefixHit(0, (), state.revision, len(search.found))  # all of its ranges are lost: a miss
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
        return entries_of(self._run([read_command(key) for key in keys]), state)

    def holders(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        check_keys(keys)
        state = self._fresh()
        return holders_of(self._run([read_command(key) for key in keys]), state, namespace)

    async def holders_async(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        check_keys(keys)
        values: list[Answer] = []
        for at in range(0, len(keys), _PART):
            part = keys[at : at + _PART]
            values += await self._cluster.run([read_command(key) for key in part])
        return holders_of(values, self._small.state, namespace)

    # ---- the whole ----
    def listen(self, listener: IndexListener) -> None:
        self._listener = listener

    def blocks_from(self, first: BlockKey | None, most: int) -> tuple[list[IndexedBlock], BlockKey | None]:
        if most < 1:
            raise InvalidArgument("most must be positive", most=most)
        records: list[tuple[bytes, bytes]] = []
        number = key_range(first) if first is not None else 0
        while number < limits.DIGEST_RANGES and len(records) <= most:
            width = min(self._width(most), limits.DIGEST_RANGES - number)
            records += [record for record in self.records_in_ranges(number, width) if first is None or record[0] >= first]
            number += width
        following = BlockKey(records[most][0]) if len(records) > most else None
        state = self._fresh()  # after the records: each volume epoch that they name is known, or closed
        return blocks_of(records[:most], state), following

    # ---- anti-entropy ----
    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        records = self.packed_records(key_range, 1)
        state = self._small.state  # read after the records
        if volume_epoch not in state.volume_epochs:
            return []
        decoded = [(BlockKey(key), decode(value)) for key, value in records.pairs()]
        return [key for key, record in decoded if record[0] in state.ordinals and volume_epoch in record[2::2]]

    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        return self.packed_records(first, count).pairs()

    def packed_records(self, first: int, count: int) -> PackedRecords:
        check_ranges(first, count)
        width, last = self._width(_LISTED), first + count
        parts = [range(at, min(at + width, last)) for at in range(first, last, width)]
        records = [records_of(*self._call(read_ranges(self._cluster, ranges, PART_S))) for ranges in parts]
        return joined(records, self._fresh().ordinals)  # after the records: they have numbers that are known, or lost

    def range_checks(self) -> Sequence[RangeCheck]:
        return self._audit.states.checks()

    def end_range_checks(self, tokens: Collection[int]) -> None:
        self._loop.call_soon_threadsafe(self._audit.report, tokens)

    def sweep(self, max_entries: int) -> bool:
        if max_entries < 1:
            raise InvalidArgument("max_entries must be positive", max_entries=max_entries)
        if not self._small.state.dead and not self._fresh().dead:
            return True
        seen = 0
        while seen < max_entries and self._swept_to < limits.DIGEST_RANGES:
            width = min(self._width(max_entries), limits.DIGEST_RANGES - self._swept_to)
            records = self.records_in_ranges(self._swept_to, width)
            state = self._fresh()  # after the records: each volume epoch that they name is known, or closed
            self._change(sweep_commands(records, state.volume_epochs, self._abilities), self._run)
            seen += len(records)
            self._swept_to += width
        if self._swept_to < limits.DIGEST_RANGES:
            return False
        self._swept_to = 0
        return self._call(self._small.end_sweep()) == 0

    def _width(self, records: int) -> int:
        """Ranges that hold about as many records, at least one."""
        return max(1, min(_RANGES_AT_ONCE, records * limits.DIGEST_RANGES // (self._stats.blocks + 1)))

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
        elif time.monotonic() - self._small.beats_read_s > BEATS_STALE_S:
            raise Unavailable("Valkey does not answer: heartbeats of other servers are unknown")
        return dict(self._small.state.beats)

    # ---- servers ----
    @property
    def reachable(self) -> bool:
        return self._cluster.reachable and self._small.silent_s < UNREACHABLE_S  # else no heartbeat can be shared

    def backend(self) -> IndexBackend:
        return self._audit.with_ranges(self._watch.backend())

    async def exchange_servers(self, mine: MetadataServerRecord, ended: Collection[str] = ()) -> list[MetadataServerRecord]:
        *_, records = await self._cluster.run_until(exchange_commands(mine, ended), time.monotonic() + SERVERS_S, Lane.READS)
        return decode_records(records)

    # ---- leases of roles ----
    def take_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder, ttl_s: float) -> dict[ServerRole, LeaseHolder]:
        check_holder(holder)
        return self._call(self._small.take_leases(roles, holder, ttl_s))

    def free_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder) -> None:
        check_holder(holder)
        self._call(self._small.free_leases(roles, holder))

    def lease_holders(self) -> dict[ServerRole, LeaseHolder]:
        leases = self._fresh().leases
        return dict(leases) if time.monotonic() - self._small.read_s < LEASES_STALE_S else {}

    async def refresh(self) -> None:
        await self._small.refresh()

    def shared_value(self, name: bytes) -> SharedValue:
        """A value of the small state's slot that is no part of the index. Use it on the event loop of the index."""
        return SharedValue(self._cluster, name, names.SMALL_SLOT)

    # ---- the whole ----
    @property
    def revision(self) -> int:
        return self._fresh().revision

    def stats(self) -> IndexStats:
        if not self._on_loop():
            self._stats = self._call(self._read_stats())
        now_s = time.monotonic()
        failing = self._changes if self._changes.reason(now_s) else self._polls
        return dataclasses.replace(self._stats, failing=failing.reason(now_s), failing_s=failing.seconds(now_s))

    async def _read_stats(self) -> IndexStats:
        return await read_stats(self._cluster, dead=self._small.state.dead, markers=self._audit.markers)

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
        await self.feed.close()
        await self._cluster.close()

    def request_rebuild(self) -> None:
        logger.warning("index rebuild requested: dropping the small state, which begins another epoch")
        self._count(metadata_metrics.INDEX_REBUILDS_ASKED, 1)
        if not self._on_loop():
            self._call(self._drop())
            return
        self._tasks.append(self._loop.create_task(self._drop()))

    async def _drop(self) -> None:
        try:
            await self._small.drop()
        except KVStoreError as error:
            limited.warning("index not rebuilt: %s; request it again", error)
            raise
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
        return run_on(self._loop, work, PART_S + SYNC_MARGIN_S)

    def _fresh(self) -> SmallState:
        """The small state: as it is now, or on the event loop the copy."""
        if not self._on_loop():
            self._call(self._small.refresh())
        return self._small.state

    def _run(self, commands: Sequence[Command], lane: Lane = Lane.READS, at_once: int = _PART) -> list[Reply]:
        replies: list[Reply] = []
        for at in range(0, len(commands), at_once):
            replies += self._call(self._cluster.run_until(commands[at : at + at_once], time.monotonic() + PART_S, lane))
        return replies

    def _run_without_lost(self, commands: Sequence[Command], lane: Lane = Lane.READS) -> list[Answer]:
        answers: list[Answer] = []
        for at in range(0, len(commands), _PART):
            part = commands[at : at + _PART]
            answers += self._call(self._cluster.run_without_lost(part, time.monotonic() + PART_S, lane))
        return answers

    def _change(self, commands: Sequence[Command], run: Callable[[Sequence[Command], Lane], Sequence[A]]) -> Sequence[A]:
        """Run changes of records. Servers that lack the script get it first.

        Raises:
            CapacityExceeded: Valkey is full.
            Unavailable: Valkey rejects a change for another reason.
        """
        replies = run(commands, Lane.WRITES)
        failed = [reply for reply in replies if isinstance(reply, hiredis.ReplyError)]
        if any(str(error).startswith("NOSCRIPT") for error in failed):
            self._call(self._cluster.on_each(pack("SCRIPT", "LOAD", CAS_SCRIPT), budget_s=1.0))
            replies = run(commands, Lane.WRITES)
            failed = [reply for reply in replies if isinstance(reply, hiredis.ReplyError)]
        if failed:
            full = str(failed[0]).startswith("OOM")
            self._count(metadata_metrics.INDEX_CHANGES_REFUSED["full" if full else "other"], 1)
            error = refused_change(str(failed[0]), full=full)
            self._changes.failed(time.monotonic(), error)
            if full:
                self._count(metadata_metrics.INDEX_FULL, 1)
            self._abilities = self._abilities if full else Abilities()  # a new primary may be older than its predecessor
            raise error
        self._changes.succeeded(time.monotonic())
        return replies

    def _replicate(self, slots: set[int]) -> None:
        """Wait a moment until the replicas have what was written; count the shards whose replicas lag."""
        if self._cluster.has_replicas(slots):
            self._call(self._cluster.replicate(slots, REPLICATION_MS))

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
        return self._small.state.named(ordinal) or NamespaceId(b"")
