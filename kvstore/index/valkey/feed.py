"""Block events in Valkey: 16 streams that all metadata servers write and any of them reads, only while there are watchers.

1. A key with an expiry exists while there are watchers; its value is the *feed id*. Servers with watchers extend it. Each server
   reads it ten times per second and relies on the answer for ``VALID_S``, so a publish needs only a local check.
2. A watcher's snapshot begins ``VALID_S`` after the key was set. By then each server either appends its changes, or made them
   before the snapshot.
3. A publish is appended to the stream of its volume epoch after it took effect and before it is acknowledged. A node publishes
   again without an acknowledgement, so an event may come twice, and none is missing.
4. A server may be stopped between a change and its append, while another server changes the same blocks. So a change that was
   made more than ``FRESH_S`` ago is compared with the records again, and only what is still true is appended.
5. Gaps are known. A lost key gets another feed id. Streams count their entries, so a reader sees that entries were trimmed or
   that the stream was lost. Writers number their entries, so a reader sees that a failover lost some.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

import hiredis

from kvstore.core.clock import BootTimeClock
from kvstore.core.errors import CapacityExceeded, KVStoreError, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, NamespaceId
from kvstore.index.contract import RemovedKeys, VolumeEpoch
from kvstore.index.counts import Count
from kvstore.index.valkey.cluster import Lane, NoAnswer, ValkeyClient
from kvstore.index.valkey.connection import Reply, ValkeyConnection, pack
from kvstore.index.valkey.keys import FEED, SMALL_SLOT, STREAM_SLOTS, STREAMS
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

limited = LimitedLog(logging.getLogger(__name__))

VALID_S: Final = 0.5
"""How long a server relies on its last reading, without watchers."""
FRESH_S: Final = 0.5
"""Time for which a change counts as true: shorter than nodes and clients take to use another server."""
LINGER_MS: Final = 600_000
"""How long events are recorded after the last watcher left: it may only be restarting."""
STREAM_TTL_MS: Final = 86_400_000
"""Time after which a stream without new entries is dropped."""
EXTEND_S: Final = 1.0
"""Interval at which a server with watchers extends the expiry of the key."""
CALL_S: Final = 5.0
APPEND_S: Final = 1.0
"""Deadline of an append: later, its change may no longer be true."""
READ_S: Final = 1.0
"""Time that a reader waits for a shard."""
BLOCK_MS: Final = 1_000
READ_ENTRIES: Final = 4
"""Entries per stream and read: an entry may be as large as a publish."""
COALESCE_S: Final = 0.005
RETRY_S: Final = 0.1
_MEAN_OF: Final = 16
_START_BYTES: Final = 1_024
_POSITION: Final = struct.Struct("<48Q")
_WANT: Final = """
local id = redis.call('GET', KEYS[1])
if id then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return id end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
_READ: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {'0-0', 0, 0, {}} end
local flat, info = redis.call('XINFO', 'STREAM', KEYS[1]), {}
for at = 1, #flat, 2 do info[flat[at]] = flat[at + 1] end
local entries = {}
if ARGV[2] ~= '0' then entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2]) end
return {info['last-generated-id'], info['entries-added'], info['length'], entries}
"""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in one stream: the id of the last entry that was read, and how many entries the stream had until then."""

    ms: int = 0
    number: int = 0
    entries: int = 0

    @classmethod
    def of(cls, entry_id: bytes, entries: int) -> StreamPosition:
        """The position after the entry with an id."""
        ms, _, number = entry_id.partition(b"-")
        return cls(int(ms), int(number), entries)

    @property
    def entry_id(self) -> str:
        """The id as Valkey writes it."""
        return f"{self.ms}-{self.number}"


FeedPosition: TypeAlias = "tuple[StreamPosition, ...]"
"""A position in each stream."""
EventEncoder: TypeAlias = "Callable[[VolumeEpoch, Sequence[BlockRun], Sequence[RemovedKeys]], bytes]"


def encode_position(position: FeedPosition) -> bytes:
    """Encode a position for watchers."""
    return _POSITION.pack(*(value for one in position for value in (one.ms, one.number, one.entries)))


def decode_position(raw: bytes) -> FeedPosition | None:
    """Decode a position; None: it is invalid."""
    if len(raw) != _POSITION.size:
        return None
    values = _POSITION.unpack(raw)
    return tuple(StreamPosition(*values[at : at + 3]) for at in range(0, len(values), 3))


def reached(position: FeedPosition, goal: FeedPosition) -> bool:
    """Whether a reader at ``position`` has read all that the streams had at ``goal``."""
    return all((one.ms, one.number) >= (other.ms, other.number) for one, other in zip(position, goal, strict=True))


def lowered(goal: FeedPosition, newest: FeedPosition) -> FeedPosition:
    """Return a goal without entries that the streams no longer have: a shard may lose its last entries in a failover."""
    return tuple(min(one, other, key=lambda at: (at.ms, at.number)) for one, other in zip(goal, newest, strict=True))


class BlockFeed:
    """The streams as one server sees them. All methods but ``wanted`` belong to the cluster's event loop.

    Args:
        cluster: the cluster.
        count: counts events of this server.
    """

    def __init__(self, cluster: ValkeyClient, count: Count) -> None:
        self._cluster = cluster
        self._count = count
        self._clock = BootTimeClock()
        self.feed_id = b""
        """Id of the feed; empty without watchers."""
        self._known_s = -VALID_S  # when the reading began that found feed_id
        self._wanted_since: tuple[bytes, float] = (b"", 0.0)
        self._encode: EventEncoder | None = None
        self._stream_bytes = 0
        self._writer = secrets.token_bytes(8)
        self._written = [0] * len(STREAMS)
        self._mean_bytes = [_START_BYTES] * len(STREAMS)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers = 0

    # ---- writing
    def start_recording(self, encode: EventEncoder, most_bytes: int) -> None:
        """Append the changes that this server makes from now on, while there are watchers.

        Args:
            encode: encodes a change.
            most_bytes: approximate maximum size of all streams.
        """
        self._encode, self._stream_bytes = encode, most_bytes // len(STREAMS)

    def wanted(self) -> bool:
        """Whether a change that took effect may have to be appended. A local check, in any thread."""
        return self._encode is not None and (bool(self.feed_id) or self._clock.now_s() - self._known_s > VALID_S)

    async def poll(self) -> None:
        """Read whether there are watchers.

        Raises:
            Unavailable: the shard does not answer.
        """
        began_s = self.now_s()
        (value,) = await self._cluster.run_until([(SMALL_SLOT, pack("GET", FEED))], time.monotonic() + CALL_S, Lane.READS)
        self.learn(value, began_s)

    def now_s(self) -> float:
        """The time by which readings are compared."""
        return self._clock.now_s()

    def learn(self, value: Reply, began_s: float) -> None:
        """Take the id of the feed, as a reading found it that began at a time or later.

        Raises:
            Unavailable: the value is an error.
        """
        if value is not None and not isinstance(value, bytes):
            raise Unavailable("Valkey rejected a read", reply=str(value)[:200])
        if began_s >= self._known_s:
            self.feed_id, self._known_s = value or b"", began_s

    async def append(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> int | None:
        """Append a change if there are watchers.

        Returns:
            The hash slot of the stream; None without watchers, or if the shard of the stream is lost.

        Raises:
            Unavailable: a shard does not answer: the change must be published again.
            CapacityExceeded: Valkey is full.
        """
        if not self.feed_id:
            await self.poll()  # the last reading is too old
        if not self.feed_id or self._encode is None:
            return None
        number = volume_epoch % len(STREAMS)
        encoded = self._encode(volume_epoch, stored, removed)
        mean = self._mean_bytes[number] = (self._mean_bytes[number] * (_MEAN_OF - 1) + len(encoded)) // _MEAN_OF
        most = max(1, self._stream_bytes // max(mean, 1))
        fields = ("w", self._writer, "n", self._written[number] + 1, "e", encoded)
        slot, name = STREAM_SLOTS[number], STREAMS[number]
        commands = [
            (slot, pack("XADD", name, "MAXLEN", "~", most, "*", *fields)),
            (slot, pack("PEXPIRE", name, STREAM_TTL_MS)),
        ]
        if self._cluster.is_written_off(slot):
            self._written[number] += 1  # subscribers notice the gap in the numbers, and begin again with a snapshot
            self._count(metadata_metrics.FEED_APPENDS_MISSED, 1)
            limited.warning("block event not recorded, its shard is away: stream %d", number)
            return None
        reply, _ = await self._cluster.run_until(commands, time.monotonic() + APPEND_S)
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("OOM"):
                raise CapacityExceeded("Valkey is full: raise its maxmemory or add shards", reply=str(reply))
            raise Unavailable("Valkey rejected block events", reply=str(reply)[:200])
        self._written[number] += 1
        return slot

    # ---- watching
    async def join(self) -> None:
        """Add a watcher: begin to record, and to wait for entries.

        Raises:
            Unavailable: the shard does not answer.
        """
        await self.extend_or_begin()
        self._watchers += 1
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._extend(), name="feed-extend")]
            self._tasks += [asyncio.create_task(self._tail(number), name=f"feed-{number}") for number in range(len(STREAMS))]

    def leave(self) -> None:
        """Remove a watcher."""
        self._watchers -= 1
        if not self._watchers:
            self._stop()

    async def close(self) -> None:
        """End the background tasks."""
        tasks = self._tasks
        self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def settle(self) -> None:
        """Wait until each server appends its changes, since the present feed began."""
        await asyncio.sleep(max(0.0, self._wanted_since[1] + 2 * VALID_S - self._clock.now_s()))

    async def newest(self) -> FeedPosition:
        """The present end of all streams.

        Raises:
            Unavailable: a shard does not answer.
        """
        commands = [(slot, pack("EVAL", _READ, 1, name, "0-0", 0)) for slot, name in zip(STREAM_SLOTS, STREAMS, strict=True)]
        replies = await self._cluster.run_until(commands, time.monotonic() + CALL_S, Lane.EVENTS)
        found = []
        for reply in replies:
            last, added, _, _ = _checked(reply)
            found.append(StreamPosition.of(last, added))
        return tuple(found)

    async def read(self, position: FeedPosition, most: int = READ_ENTRIES) -> list[StreamRead]:
        """Read the streams from a position on. Streams whose shard does not answer are left out."""
        commands = [
            (slot, pack("EVAL", _READ, 1, name, one.entry_id, most))
            for slot, name, one in zip(STREAM_SLOTS, STREAMS, position, strict=True)
        ]
        found = []
        for number, answer in enumerate(await self._cluster.run(commands, budget_s=READ_S, lane=Lane.EVENTS)):
            if isinstance(answer, NoAnswer | hiredis.ReplyError):
                continue
            last, added, length, entries = _checked(answer)
            found.append(judge(number, position[number], StreamPosition.of(last, added), length, entries))
        return found

    async def wait(self, timeout_s: float) -> None:
        """Wait until a stream has new entries, or the timeout has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    async def extend_or_begin(self) -> bytes:
        """Extend the expiry of the key, or begin a feed if there is none. Returns the id of the feed.

        Raises:
            Unavailable: the shard does not answer.
        """
        began_s = self._clock.now_s()
        command = pack("EVAL", _WANT, 1, FEED, secrets.token_bytes(KEY_BYTES), LINGER_MS)
        (value,) = await self._cluster.run_until([(SMALL_SLOT, command)], time.monotonic() + CALL_S)
        self.learn(value, began_s)
        if self._wanted_since[0] != value and isinstance(value, bytes):
            self._wanted_since = value, self._clock.now_s()
        return self._wanted_since[0]

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(EXTEND_S)
            with suppress(KVStoreError):  # the poll of the small state reports that Valkey does not answer
                await self.extend_or_begin()

    async def _tail(self, number: int) -> None:
        """Wake the readers when a stream has a new entry. ``BLOCK`` occupies the connection, so it is not shared."""
        connection: ValkeyConnection | None = None
        address, last = "", b"$"
        try:
            while True:
                try:
                    primary = self._cluster.primary_of(STREAM_SLOTS[number])
                    if connection is None or not connection.is_open or primary != address:
                        if connection is not None:
                            connection.close()
                        connection, address = await self._cluster.open_connection(primary), primary
                    command = pack("XREAD", "BLOCK", BLOCK_MS, "COUNT", 1, "STREAMS", STREAMS[number], last)
                    async with asyncio.timeout(BLOCK_MS / 1000 + READ_S):
                        (reply,) = await connection.ask(command)
                        if isinstance(reply, hiredis.ReplyError):
                            raise Unavailable("Valkey rejected a read", reply=str(reply)[:200])
                        if reply is not None:
                            (end,) = await connection.ask(pack("EVAL", _READ, 1, STREAMS[number], "0-0", 0))
                            last = _checked(end)[0]
                    if reply is not None:
                        self._news.set()
                        self._news = asyncio.Event()
                        await asyncio.sleep(COALESCE_S)
                except (KVStoreError, TimeoutError) as error:
                    limited.warning("stream not watched: subscribers poll it (stream=%d, error=%s)", number, error)
                    self._count(metadata_metrics.FEED_WATCHES_FAILED, 1)
                    if connection is not None:
                        connection.close()
                    await asyncio.sleep(RETRY_S)
        finally:
            if connection is not None:
                connection.close()


def with_earlier_removals(
    volume_epoch: VolumeEpoch, told: Sequence[RemovedKeys], removed: Sequence[BlockKey]
) -> Sequence[RemovedKeys]:
    """Add the removals of a batch that found nothing to those that took effect. Pure.

    If a server ends after a batch took effect and before it was appended, the node publishes the batch again, and then its
    removals find nothing. So such removals are events, too.

    Args:
        volume_epoch: the publisher.
        told: keys that volume epochs no longer hold.
        removed: keys that the batch removes.
    """
    known = {key for entry in told if entry.volume_epoch == volume_epoch for key in entry.keys}
    before = [key for key in removed if key not in known]
    return [*told, RemovedKeys(volume_epoch, NamespaceId(b""), before)] if before else told


def still_true(
    volume_epoch: VolumeEpoch,
    stored: Sequence[BlockRun],
    removed: Sequence[RemovedKeys],
    holders: Mapping[BlockKey, Container[int]],
) -> tuple[list[BlockRun], list[RemovedKeys]]:
    """The parts of a change that are still true: stored blocks that are held, and removed ones that are not. Pure.

    Args:
        volume_epoch: holder of the stored blocks.
        stored: stored runs.
        removed: removed keys.
        holders: the present volume epochs of each key.
    """
    runs: list[BlockRun] = []
    for run in stored:
        at = 0
        for held, group in groupby(run.keys, lambda key: volume_epoch in holders.get(key, ())):
            keys = tuple(group)
            if held:
                runs.append(BlockRun(run.namespace, run.keys[at - 1] if at else run.parent, run.depth + at, keys))
            at += len(keys)
    gone = [
        entry._replace(keys=[key for key in entry.keys if entry.volume_epoch not in holders.get(key, ())]) for entry in removed
    ]
    return runs, [entry for entry in gone if entry.keys]


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One change: its writer, its number among that writer's entries of the stream, and its encoded events."""

    writer: bytes
    number: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class StreamRead:
    """The part of one stream that was read.

    Args:
        stream: number of the stream.
        position: position after the entries; None: entries after the old position were lost or damaged.
        entries: the entries.
    """

    stream: int
    position: StreamPosition | None
    entries: list[FeedEntry]


def judge(number: int, before: StreamPosition, end: StreamPosition, length: int, entries: list[Reply]) -> StreamRead:
    """Decide whether the entries follow those before them."""
    trimmed = end.entries - length
    at_end = (before.ms, before.number) == (end.ms, end.number)
    ahead = (before.ms, before.number) > (end.ms, end.number)
    if ahead or trimmed > before.entries or (at_end and before.entries < end.entries):
        return StreamRead(number, None, [])
    found, position = [], before
    for entry in entries:
        decoded = _entry(entry)
        if decoded is None:
            limited.warning("damaged entry of block events: subscribers begin again with a snapshot (stream=%d)", number)
            return StreamRead(number, None, [])
        entry_id, change = decoded
        position = StreamPosition.of(entry_id, position.entries + 1)
        found.append(change)
    if (position.ms, position.number) == (end.ms, end.number):
        position = end  # a failover may have lost entries that were read before
    return StreamRead(number, position, found)


def _entry(reply: Reply) -> tuple[bytes, FeedEntry] | None:
    """An entry and its id; None: it is damaged."""
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list):
        match reply[0], reply[1]:
            case bytes() as entry_id, [b"w", bytes() as writer, b"n", bytes() as number, b"e", bytes() as encoded]:
                return (entry_id, FeedEntry(writer, int(number), encoded)) if number.isdigit() else None
    return None


def _checked(reply: Reply) -> tuple[bytes, int, int, list[Reply]]:
    """The parts of a reply to ``_READ``."""
    if isinstance(reply, list) and len(reply) == 4:
        last, added, length, entries = reply
        if isinstance(last, bytes) and isinstance(added, int) and isinstance(length, int) and isinstance(entries, list):
            return last, added, length, entries
    raise Unavailable("Valkey rejected a read of block events", reply=str(reply)[:200])
