"""The small state of the index in Valkey: epoch, volume epochs, namespaces, notes and leases, and a copy of it in this process.

All of it is in one hash slot, so a script changes it atomically. Every announced change raises ``revision`` and the version of
its table. A process reads these numbers ten times per second and after its own changes, and then the tables that changed. So its
copy is at most ``POLL_S`` older than the changes of other servers.

If Valkey lost the small state, the first server that notices creates it with another epoch. Numbers of volume epochs and
namespaces then start at a random number: records of the old epoch, on shards that lost nothing, do not name the new ones.

Replication is asynchronous, so a promoted replica may lack the last changes. A number that was handed out must not be handed out
again: records may name it. So the server waits for a replica after it drew a number, and numbers jump when the primary changes.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Final, TypeVar

import hiredis

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Unavailable, Unsupported
from kvstore.core.types import KEY_BYTES, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import Beat, LeaseHolder, ServerRole, VolumeEpoch, VolumeEpochInfo
from kvstore.index.counts import Count, count_nothing
from kvstore.index.small_records import decode_beat, decode_volume_epoch, encode_beat, encode_volume_epoch
from kvstore.index.valkey import keys as names
from kvstore.index.valkey.cluster import Lane, ValkeyClient
from kvstore.index.valkey.connection import Reply, pack
from kvstore.observe.metric_definitions import metadata as metadata_metrics

FORMAT: Final = b"kvstore-valkey/1"
POLL_S: Final = 0.1
CALL_S: Final = 5.0
"""Deadline of one change."""
BEATS_S: Final = 1.0
"""Deadline of shared heartbeats. Written later, they would replace newer ones, and make silent nodes look alive."""
LEASES_S: Final = 2.0
"""Deadline of a change of leases. They end soon after it in any case, and a server that stops waits for two such changes."""
REPLICATION_MS: Final = 100
"""Time that a change waits for a replica. After that, it can be lost with the primary."""
_META_FIELDS: Final = ("format", "epoch", "revision", "lives", "namespaces", "notes")
_READ_META: Final = pack("HMGET", names.META, *_META_FIELDS)
_READ_VALUES: Final = pack("MGET", *names.LEASES.values(), names.FEED)
_U32: Final = struct.Struct("<I")
_PART: Final = 1_000
"""Notes or heartbeats per script: Lua unpacks them on a stack of limited size, and no other command runs while a script does."""
T = TypeVar("T")
_EPOCH_CHANGED: Final = "EPOCHCHANGED"

_JUMP: Final = 4_096
"""More numbers than a primary can have handed out without its replicas knowing."""
_FLAGS: Final = "#!lua flags=allow-oom\n"
"""The small state stays small, and without it no node would be alive. So it may change although Valkey is full."""
_EPOCH_GUARD: Final = f"""
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return redis.error_reply('{_EPOCH_CHANGED} the index epoch changed') end
"""
_GUARD: Final = (
    _EPOCH_GUARD
    + f"""
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
if redis.call('HGET', KEYS[1], 'server') ~= server then
  redis.call('HSET', KEYS[1], 'server', server)
  for _, counter in ipairs({{'next_life', 'next_namespace', 'revision', 'lives', 'namespaces', 'notes'}}) do
    redis.call('HINCRBY', KEYS[1], counter, {_JUMP})
  end
end
local function announce(tbl)
  redis.call('HINCRBY', KEYS[1], tbl, 1)
  return redis.call('HINCRBY', KEYS[1], 'revision', 1)
end
"""
)
"""Begin of a script that changes tables. If another process is the primary now, the last changes may be lost with the former one.
So all numbers jump: none is used twice, and no version names two states."""
_CREATE: Final = """
if redis.call('HSETNX', KEYS[1], 'epoch', ARGV[1]) == 1 then
  redis.call('HSET', KEYS[1], 'format', ARGV[2], 'revision', ARGV[3], 'lives', ARGV[3], 'namespaces', ARGV[3], 'notes', ARGV[3],
             'next_life', ARGV[4], 'next_namespace', ARGV[4])
  redis.call('HSET', KEYS[2], '0', 1)
  return 1
end
return 0
"""
"""A new epoch sweeps once, because shards that were not lost may have records of unknown volume epochs."""
_OPEN_LIFE: Final = (
    _GUARD
    + """
local known = redis.call('HGET', KEYS[3], ARGV[2])
if known then return {known, 0} end
local number = redis.call('HINCRBY', KEYS[1], 'next_life', 1)
redis.call('HSET', KEYS[2], number, ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], number)
return {tostring(number), announce('lives')}
"""
)
_CLOSE_LIFE: Final = (
    _GUARD
    + """
local info = redis.call('HGET', KEYS[2], ARGV[2])
if not info then return 0 end
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[3])
redis.call('HSET', KEYS[4], ARGV[2], tonumber(redis.call('HGET', KEYS[1], 'sweeps') or '0') + 2)
return announce('lives')
"""
)
_PUT_NAMESPACE: Final = (
    _GUARD
    + """
local known = redis.call('HGET', KEYS[2], ARGV[2])
local ordinal
if known then
  ordinal = string.sub(known, 1, 4)
elseif redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
  return {'', 0}
else
  ordinal = struct.pack('<I4', redis.call('HINCRBY', KEYS[1], 'next_namespace', 1))
end
local value = ordinal .. ARGV[3]
if known == value or (known and ARGV[3] == '\\0') then return {known, 0} end
redis.call('HSET', KEYS[2], ARGV[2], value)
if ARGV[3] == '\\0' then return {value, redis.call('HINCRBY', KEYS[1], 'namespaces', 1)} end
return {value, announce('namespaces')}
"""
)
_PUT_NOTES: Final = (
    _GUARD
    + """
local into, other = KEYS[2], KEYS[3]
local changed, touched = false, false
for at = 2, #ARGV, 2 do
  local name, value = ARGV[at], string.sub(ARGV[at + 1], 2)
  local here, there = redis.call('HGET', into, name), redis.call('HGET', other, name)
  if ARGV[at + 1] == '' then
    if here then redis.call('HDEL', into, name) end
    changed = changed or here or there
    touched = touched or here or there
  else
    if here ~= value then redis.call('HSET', into, name, value) end
    changed = changed or (here ~= value and there ~= value)
    touched = touched or here ~= value or there
  end
  if there then redis.call('HDEL', other, name) end
end
if changed then return announce('notes') end
if touched then redis.call('HINCRBY', KEYS[1], 'notes', 1) end
return 0
"""
)
_PUT_QUIET_NOTES: Final = (
    _EPOCH_GUARD
    + f"""
local moved = 0
for at = 2, #ARGV, 2 do
  local name = ARGV[at]
  if ARGV[at + 1] == '' then
    redis.call('HDEL', KEYS[3], name)
    moved = moved + redis.call('HDEL', KEYS[2], name)
  elseif redis.call('HSET', KEYS[3], name, string.sub(ARGV[at + 1], 2)) == 1 then
    moved = moved + redis.call('HDEL', KEYS[2], name)
  end
end
if moved > 0 then redis.call('HINCRBY', KEYS[1], 'notes', {_JUMP}) end
return 0
"""
)
"""Most are reports of nodes, several per second: such a note needs two commands the first time, and then one."""
_PUT_BEATS: Final = (
    _EPOCH_GUARD
    + """
for at = 2, #ARGV, 2 do
  if ARGV[at + 1] == '' then redis.call('HDEL', KEYS[2], ARGV[at]) else redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
end
return 0
"""
)
_SWEPT: Final = (
    _GUARD
    + """
if redis.call('HGET', KEYS[1], 'swept') == ARGV[2] then return redis.call('HLEN', KEYS[2]) end
redis.call('HSET', KEYS[1], 'swept', ARGV[2])
local done = tonumber(redis.call('HINCRBY', KEYS[1], 'sweeps', 1))
local dead = redis.call('HGETALL', KEYS[2])
redis.call('HINCRBY', KEYS[1], 'lives', 1)
for at = 1, #dead, 2 do
  if tonumber(dead[at + 1]) <= done then redis.call('HDEL', KEYS[2], dead[at]) end
end
return redis.call('HLEN', KEYS[2])
"""
)
"""Counts a sweep once, also if it runs twice: a second count would end the wait for records that no sweep has seen."""
_TAKE_LEASES: Final = """
local leases = {}
for at = 1, #KEYS do
  local lease = redis.call('GET', KEYS[at])
  if not lease or string.sub(lease, 1, #ARGV[1]) == ARGV[1] or lease == ARGV[3 + at] then
    lease = ARGV[1] .. ARGV[3]
    redis.call('SET', KEYS[at], lease, 'PX', ARGV[2])
  end
  leases[at] = lease
end
return leases
"""
"""Arguments: holder, time to live, name of this renewal, and per key a lease that has ended (empty: none)."""
_FREE_LEASES: Final = """
for at = 1, #KEYS do
  local lease = redis.call('GET', KEYS[at])
  if lease and string.sub(lease, 1, #ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[at]) end
end
return 0
"""


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace: its number, and its spec (None: blocks arrived before the spec)."""

    ordinal: int
    spec: bytes | None


@dataclass(frozen=True, slots=True)
class SmallState:
    """The small state as of one revision. Replaced, never changed."""

    epoch: bytes = b""
    revision: int = 0
    tables: tuple[int, int, int] = (-1, -1, -1)
    """Versions of the tables of volume epochs, namespaces and notes."""
    volume_epochs: Mapping[VolumeEpoch, VolumeEpochInfo] = field(default_factory=dict)
    namespaces: Mapping[NamespaceId, NamespaceEntry] = field(default_factory=dict)
    ordinals: frozenset[int] = frozenset()
    """Numbers of all namespaces. Records may have others, which a promoted replica did not know."""
    notes: Mapping[str, bytes] = field(default_factory=dict)
    """Announced notes."""
    quiet_notes: Mapping[str, bytes] = field(default_factory=dict)
    """The others, if one was read lately."""
    beats: Mapping[NodeId, Beat] = field(default_factory=dict)
    leases: Mapping[ServerRole, LeaseHolder] = field(default_factory=dict)
    dead: int = 0
    """Closed volume epochs that may still have records."""
    feed: Reply = None
    """Id of the feed of block events; None: nothing watches."""

    def named(self, ordinal: int) -> NamespaceId | None:
        """The namespace with a number. For diagnosis: it searches."""
        return next((namespace for namespace, known in self.namespaces.items() if known.ordinal == ordinal), None)


class OpenVisibleEpochs:
    """The open volume epochs among those that a lookup may see; computed once per frozen set."""

    def __init__(self) -> None:
        self._last: tuple[object, Container[VolumeEpoch], frozenset[VolumeEpoch]] = ((), frozenset(), frozenset())
        """Open volume epochs, visible ones, and those that are both."""

    def of(self, state: SmallState, visible: Container[VolumeEpoch]) -> Container[VolumeEpoch]:
        """The open volume epochs among the visible ones."""
        judged_state, judged, open_visible = self._last
        if judged is visible and judged_state is state.volume_epochs:
            return open_visible
        open_visible = frozenset([volume_epoch for volume_epoch in state.volume_epochs if volume_epoch in visible])
        if isinstance(visible, frozenset):
            self._last = state.volume_epochs, visible, open_visible
        return open_visible


class SmallStateStore:
    """Reads and changes the small state. All methods belong to the cluster's event loop; ``state`` may be read anywhere."""

    def __init__(self, cluster: ValkeyClient, count: Count = count_nothing) -> None:
        self._cluster = cluster
        self._count = count
        self._reading = asyncio.Lock()  # else a slow read would replace the result of a later one
        self.state = SmallState()
        self.founded = b""
        """Epoch that this process created; empty: none."""
        self.read_s = float("-inf")
        """When the last read of the tables in ``state`` began (``time.monotonic``)."""
        self._unanswered_s: float | None = None
        """When the first call since the last answer began (``time.monotonic``); None: the last call was answered."""
        self._failed_s = float("-inf")
        """When the last failed read began: callers that waited for it fail with it, instead of one after the other."""
        self._leases_seen: dict[ServerRole, tuple[object, float]] = {}
        """Each lease as last read, and when it was first read so (``time.monotonic``)."""
        self.beats_read_s = float("-inf")
        """When the last read of the heartbeats began (``time.monotonic``)."""

    # ---- reading
    async def load(self) -> None:
        """Read the state, and create it if there is none.

        Raises:
            Unavailable: the shard of the small state does not answer.
            Unsupported: another version of this software wrote it.
        """
        epoch = secrets.token_bytes(KEY_BYTES)
        numbers = 1 + secrets.randbits(40), secrets.randbits(15) << 16
        created = pack("EVAL", _FLAGS + _CREATE, 2, names.META, names.DEAD, epoch, FORMAT, *numbers)
        (reply,) = await self._run([created])
        if isinstance(reply, hiredis.ReplyError):
            raise Unavailable("Valkey rejected a new index", reply=str(reply)[:200])
        await self.refresh()
        if self.state.epoch == epoch:  # not by the reply: the command may have run twice
            self.founded = epoch

    async def refresh(self) -> None:
        """Read what changed since the last call. One read serves all callers that wait for it.

        Raises:
            Unavailable: the shard does not answer.
            Unsupported: another version of this software wrote the state.
        """
        asked_s = time.monotonic()
        async with self._reading:
            if self.read_s >= asked_s:
                return
            if self._failed_s >= asked_s:
                raise Unavailable("the shard of the small state does not answer")
            began_s = time.monotonic()
            try:
                found = await self._read_state()
            except Unavailable:
                self._failed_s = began_s
                raise
            if found is not None:
                self.state, self.read_s = found, began_s
        if found is None:
            await self.load()

    @property
    def silent_s(self) -> float:
        """How long the shard has answered no call; 0: it answered the last one."""
        return 0.0 if self._unanswered_s is None else time.monotonic() - self._unanswered_s

    async def _read_state(self) -> SmallState | None:
        """The state as it is now; None: there is none."""
        meta, values = await self._run([_READ_META, _READ_VALUES])
        if not isinstance(meta, list) or not isinstance(values, list) or not values:
            raise Unavailable("Valkey sent an invalid answer", reply=str(meta)[:100])
        *leases, feed = values
        now_s = time.monotonic()  # after each renewal that was read
        for role, lease in zip(names.LEASES, leases, strict=True):
            if self._leases_seen.get(role, (None, now_s))[0] != lease:
                self._leases_seen[role] = lease, now_s
        if meta[1] is None:
            return None
        if meta[0] != FORMAT:
            found = meta[0].decode(errors="replace") if isinstance(meta[0], bytes) else meta[0]
            raise Unsupported(
                "the index in Valkey has another format: empty Valkey or use another cluster", found=found, known=FORMAT
            )
        epoch, revision, *changed = [value if isinstance(value, bytes) else b"0" for value in meta[1:]]
        tables = (int(changed[0]), int(changed[1]), int(changed[2]))
        before = self.state if self.state.epoch == epoch else SmallState(epoch=epoch)
        state = replace(before, revision=int(revision), tables=tables, leases=_holders(names.LEASES, leases), feed=feed)
        stale = [known != found for known, found in zip(before.tables, state.tables, strict=True)]
        reads = [
            pack("HGETALL", name) for name, old in zip((names.LIVES, names.NAMESPACES, names.NOTES), stale, strict=True) if old
        ]
        if stale[0]:
            reads.append(pack("HLEN", names.DEAD))
        tables_read = await self._run(reads)
        rows = iter(tables_read)
        if stale[0]:
            dead = tables_read[-1]
            state = replace(state, dead=dead if isinstance(dead, int) else state.dead)
            infos = [decode_volume_epoch(VolumeEpoch(int(number)), value) for number, value in _pairs(next(rows))]
            state = replace(state, volume_epochs=MappingProxyType({info.volume_epoch: info for info in infos}))
        if stale[1]:
            found_namespaces = {NamespaceId(key): decode_namespace(value) for key, value in _pairs(next(rows))}
            ordinals = frozenset([known.ordinal for known in found_namespaces.values()])
            state = replace(state, namespaces=MappingProxyType(found_namespaces), ordinals=ordinals)
        if stale[2]:
            state = replace(state, notes=MappingProxyType({name.decode(): value for name, value in _pairs(next(rows))}))
        return state

    async def refresh_beats(self) -> None:
        """Read the heartbeats of all nodes."""
        async with self._reading:
            began_s = time.monotonic()
            (rows,) = await self._run([pack("HGETALL", names.BEATS)])
            self.beats_read_s = began_s
            found = dict(decode_beat(value + name) for name, value in _pairs(rows))
            self.state = replace(self.state, beats=MappingProxyType(found))

    async def refresh_quiet_notes(self) -> None:
        """Read the notes that are not announced."""
        async with self._reading:
            (rows,) = await self._run([pack("HGETALL", names.QUIET_NOTES)])
            found = {name.decode(): value for name, value in _pairs(rows)}
            self.state = replace(self.state, quiet_notes=MappingProxyType(found))

    async def note(self, name: str) -> bytes | None:
        """A note as it is now."""
        values = await self._run([pack("HGET", table, name) for table in (names.QUIET_NOTES, names.NOTES)])
        return next((value for value in values if isinstance(value, bytes)), None)

    # ---- changing
    async def open_volume_epoch(self, volume_id: VolumeId, node_id: NodeId, tier: Tier, boot_id: BootId) -> VolumeEpoch:
        """Open a volume epoch, or find the open one of the same volume and boot."""
        info = VolumeEpochInfo(VolumeEpoch(0), volume_id, node_id, tier, boot_id)
        arguments = (_boot_name(info), encode_volume_epoch(info))
        number, _ = await self._change(_OPEN_LIFE, (names.META, names.LIVES, names.BOOTS), *arguments, replicate=True)
        return VolumeEpoch(int(number))

    async def close_volume_epoch(self, volume_epoch: VolumeEpoch) -> None:
        """Close a volume epoch. No effect if it is unknown."""
        info = self.state.volume_epochs.get(volume_epoch)
        if info is None:
            await self.refresh()
            info = self.state.volume_epochs.get(volume_epoch)
            if info is None:
                return
        await self._change(_CLOSE_LIFE, (names.META, names.LIVES, names.BOOTS, names.DEAD), str(volume_epoch), _boot_name(info))

    async def put_namespace(self, namespace: NamespaceId, spec: bytes | None) -> int:
        """Store the spec of a namespace (None: it is not known yet). Returns the namespace's number.

        Raises:
            CapacityExceeded: the index holds as many namespaces as it may.
        """
        flagged = b"\x00" if spec is None else b"\x01" + spec
        arguments = (namespace, flagged, limits.MAX_NAMESPACES)
        value, _ = await self._change(_PUT_NAMESPACE, (names.META, names.NAMESPACES), *arguments, replicate=True)
        if not value:
            raise CapacityExceeded("too many namespaces", limit=limits.MAX_NAMESPACES)
        return decode_namespace(value).ordinal

    async def put_notes(self, notes: Mapping[str, bytes | None], *, announce: bool) -> None:
        """Store (or with None: delete) notes."""
        tables = (names.META, names.NOTES, names.QUIET_NOTES)
        for part in _parts(notes.items()):
            flat = [word for name, value in part for word in (name, b"" if value is None else b"=" + value)]
            await self._script(_PUT_NOTES if announce else _PUT_QUIET_NOTES, tables, self.state.epoch, *flat)
        if announce:
            await self.refresh()

    async def put_beats(self, beats: Mapping[NodeId, Beat | None]) -> None:
        """Store (or with None: delete) heartbeats."""
        for part in _parts(beats.items()):
            flat = [word for node_id, beat in part for word in (node_id, b"" if beat is None else encode_beat(NodeId(""), beat))]
            await self._script(_PUT_BEATS, (names.META, names.BEATS), self.state.epoch, *flat, call_s=BEATS_S)

    # ---- leases
    async def take_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder, ttl_s: float) -> dict[ServerRole, LeaseHolder]:
        """Take free leases and renew held ones; returns the holders.

        Each renewal writes another value. A lease whose value has not changed for ``ttl_s`` by this host's monotonic clock has
        ended, even if Valkey keeps it, because its host's time of day was set back.
        """
        keys = [names.LEASES[role] for role in roles]
        now_s = time.monotonic()
        seen = [self._leases_seen.get(role, (None, now_s)) for role in roles]
        ended = [lease if isinstance(lease, bytes) and now_s - since_s > ttl_s else b"" for lease, since_s in seen]
        renewal = secrets.token_hex(8)
        ttl_ms = max(1, round(ttl_s * 1000))
        leases = await self._script(_TAKE_LEASES, keys, _encode_holder(holder), ttl_ms, renewal, *ended, call_s=LEASES_S)
        if not isinstance(leases, list) or len(leases) != len(roles):
            raise Unavailable("Valkey sent an invalid answer", reply=str(leases)[:100])
        return _holders(roles, leases)

    async def free_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder) -> None:
        """End the leases of a holder."""
        await self._script(_FREE_LEASES, [names.LEASES[role] for role in roles], _encode_holder(holder), call_s=LEASES_S)

    async def drop(self) -> None:
        """Drop the small state, with all volume epochs and namespaces. The next refresh creates another epoch."""
        await self._run([pack("DEL", *names.ALL_SMALL)])

    async def end_sweep(self) -> int:
        """Note that the whole index was swept once. Returns the number of closed volume epochs that may still have records."""
        left = await self._change(_SWEPT, (names.META, names.DEAD), secrets.token_bytes(KEY_BYTES))
        return int(left[0])

    async def _change(
        self, script: str, names_used: Sequence[bytes], *arguments: bytes | str | int, replicate: bool = False
    ) -> list[bytes]:
        """Run a script on the small state, and read the state again if the script changed it.

        Args:
            script: the script; its first key is the meta data, its first argument the epoch.
            names_used: keys.
            arguments: further arguments.
            replicate: wait a moment until a replica has the change.

        Raises:
            Unavailable: the shard does not answer, or Valkey lost the state.
        """
        reply = await self._script(script, names_used, self.state.epoch, *arguments, replicate=replicate)
        await self.refresh()
        values = reply if isinstance(reply, list) else [reply]
        return [value if isinstance(value, bytes) else str(value).encode() for value in values]

    async def _script(
        self,
        script: str,
        names_used: Sequence[bytes],
        *arguments: bytes | str | int,
        replicate: bool = False,
        call_s: float = CALL_S,
    ) -> Reply:
        commands = [pack("EVAL", _FLAGS + script, len(names_used), *names_used, *arguments)]
        waits = replicate and self._cluster.has_replicas((names.SMALL_SLOT,))
        if waits:
            commands.append(pack("WAIT", 1, REPLICATION_MS))
        lane = Lane.WRITES if waits else Lane.READS  # WAIT blocks its connection
        reply, *confirmed = await self._run(commands, lane, call_s)
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith(_EPOCH_CHANGED):
                await self.refresh()
                raise Unavailable("Valkey lost its contents: register again")
            raise Unavailable("Valkey rejected a change", reply=str(reply)[:200])
        if confirmed and (not isinstance(confirmed[0], int) or confirmed[0] < 1):
            self._count(metadata_metrics.INDEX_UNREPLICATED, 1)
        return reply

    async def _run(self, commands: Sequence[bytes], lane: Lane = Lane.READS, call_s: float = CALL_S) -> list[Reply]:
        if not commands:
            return []
        slot, now_s = names.SMALL_SLOT, time.monotonic()
        if self._unanswered_s is None:
            self._unanswered_s = now_s
        replies = await self._cluster.run_until([(slot, command) for command in commands], now_s + call_s, lane)
        self._unanswered_s = None
        return replies


def _parts(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in parts that one script takes."""
    left = iter(items)
    while part := list(islice(left, _PART)):
        yield part


def _pairs(reply: Reply) -> list[tuple[bytes, bytes]]:
    if not isinstance(reply, list):
        raise Unavailable("Valkey sent an invalid table", reply=str(reply)[:100])
    words = [word if isinstance(word, bytes) else b"" for word in reply]
    return list(zip(words[::2], words[1::2], strict=True))


def _encode_holder(holder: LeaseHolder) -> str:
    return " ".join([*holder, ""])


def _holders(roles: Iterable[ServerRole], values: Iterable[object]) -> dict[ServerRole, LeaseHolder]:
    """The holders of roles; a value without the form of a lease counts as none."""
    named = [
        (role, value.decode(errors="replace").split(" "))
        for role, value in zip(roles, values, strict=True)
        if isinstance(value, bytes)
    ]
    return {role: LeaseHolder(*words[:-1]) for role, words in named if len(words) == len(LeaseHolder._fields) + 1}


def _boot_name(info: VolumeEpochInfo) -> bytes:
    return info.boot_id + info.volume_id.encode()


def decode_namespace(value: bytes) -> NamespaceEntry:
    """Decode a namespace."""
    return NamespaceEntry(_U32.unpack_from(value)[0], value[5:] if value[4] else None)
