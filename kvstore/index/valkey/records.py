"""Commands that read and change records, with compare-and-set. Pure, but for the scripts' text.

A record is replaced only if it has not changed since it was read: ``SET … IFEQ`` (Valkey 8.1), ``DELIFEQ`` (Valkey 9.0). Older
servers and Redis run a script that does the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Final, NamedTuple, cast

import numpy as np

from kvstore.core.errors import CapacityExceeded, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.contract import IndexedBlock, IndexEntry, PackedRecords, VolumeEpoch
from kvstore.index.record import BatchEdit, decode, encode, is_record, is_record_size, replicas_of
from kvstore.index.replica_digests import find_other_epochs
from kvstore.index.valkey.cluster import UNANSWERED, Answer, Command
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.keys import NAME_BYTES, RANGE_SLOTS, TAG_BYTES, TAGS, record_name
from kvstore.index.valkey.small_state import SmallState

CAS_SCRIPT: Final = """
local now = redis.call('GET', KEYS[1])
if ARGV[1] == '' then
  if now then return 0 end
elseif now ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2]) end
return 1
"""
"""Replace ARGV[1] by ARGV[2]; empty: absent."""
_CAS_NAME: Final = hashlib.sha1(CAS_SCRIPT.encode(), usedforsecurity=False).hexdigest()
# all names of records have the same length, and encoding these two commands costs as much as anything else of a publish
_GET: Final = b"*2\r\n$3\r\nGET\r\n$%d\r\n" % NAME_BYTES
_SET_NX: Final = b"*4\r\n$3\r\nSET\r\n$%d\r\n" % NAME_BYTES
_MGET_HEAD: Final = b"*%d\r\n$4\r\nMGET"
_NEXT_NAME: Final = b"\r\n$%d\r\n" % NAME_BYTES
_KEYS_PER_RANGE: Final = 1 << 24
_VERSION: Final = re.compile(r"^(valkey|redis)_version:(\d+)\.(\d+)", re.MULTILINE)

OLDEST: Final = {"valkey": (7, 2), "redis": (7, 0)}
"""The first versions whose scripts may have flags."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities that all servers of a cluster have."""

    compare_and_set: bool = False
    compare_and_delete: bool = False

    def both(self, other: Abilities) -> Abilities:
        """The abilities that both have."""
        return Abilities(self.compare_and_set and other.compare_and_set, self.compare_and_delete and other.compare_and_delete)


def too_old(info: str) -> str:
    """Name and version of a server that cannot hold an index; empty: it can. ``info`` is its reply to ``INFO``."""
    versions = {name: (int(major), int(minor)) for name, major, minor in _VERSION.findall(info)}
    name = "valkey" if "valkey" in versions else "redis"
    oldest, found = OLDEST[name], versions.get(name)
    if found is None or found >= oldest:
        return ""
    return f"{name.capitalize()} {found[0]}.{found[1]}: the index requires Valkey 7.2 or Redis 7.0, or later"


def abilities_of(info: str) -> Abilities:
    """Read the abilities of a server from its reply to ``INFO server``. Valkey names a Redis version too."""
    versions = {name: (int(major), int(minor)) for name, major, minor in _VERSION.findall(info)}
    valkey = versions.get("valkey", (0, 0))
    return Abilities(valkey >= (8, 1), valkey >= (9, 0))


def slot_of(key: BlockKey) -> int:
    """Hash slot of a block's record."""
    return RANGE_SLOTS[key[0] << 4 | key[1] >> 4]


def read_command(key: BlockKey) -> Command:
    """Read a record."""
    at = key[0] << 4 | key[1] >> 4
    return RANGE_SLOTS[at], b"%b%b%b\r\n" % (_GET, TAGS[at], key)


def holders_of(answers: Sequence[Answer], state: SmallState, namespace: NamespaceId) -> list[tuple[VolumeEpoch, ...]]:
    """The open volume epochs in each answer; none unless the answer is a record of the namespace."""
    known = state.namespaces.get(namespace)
    if known is None:
        return [()] * len(answers)
    records = [decode(answer) if is_record(answer) else () for answer in answers]
    return [
        tuple(replicas_of(record, state.volume_epochs)) if record and record[0] == known.ordinal else () for record in records
    ]


def entries_of(answers: Sequence[Answer], state: SmallState) -> list[IndexEntry | None]:
    """The entry of each answer; None unless the answer is a record."""
    by_number = {known.ordinal: namespace for namespace, known in state.namespaces.items()}
    found: list[IndexEntry | None] = []
    for answer in answers:
        if not is_record(answer):
            found.append(None)
            continue
        ordinal, depth, *flat = decode(answer)
        replicas = tuple((VolumeEpoch(number), start) for number, start in zip(flat[::2], flat[1::2], strict=True))
        found.append(IndexEntry(by_number.get(ordinal), depth, replicas))
    return found


def blocks_of(records: Sequence[tuple[bytes, bytes]], state: SmallState) -> list[IndexedBlock]:
    """The blocks of known namespaces that open volume epochs hold, according to keys and records."""
    by_number = {known.ordinal: namespace for namespace, known in state.namespaces.items()}
    blocks = []
    for key, value in records:
        record = decode(value)
        held_by = tuple(replicas_of(record, state.volume_epochs))
        namespace = by_number.get(record[0])
        if held_by and namespace is not None:
            blocks.append(IndexedBlock(BlockKey(key), namespace, record[1], held_by))
    return blocks


def change_command(key: BlockKey, before: bytes | None, after: bytes | None, abilities: Abilities) -> Command:
    """Replace a record if it is still ``before`` (None: absent). Read the reply with ``took_effect``."""
    name = record_name(key)
    if after is None and before is not None and abilities.compare_and_delete:
        words: tuple[bytes | str | int, ...] = ("DELIFEQ", name, before)
    elif after is not None and before is None:
        return slot_of(key), b"%b%b\r\n$%d\r\n%b\r\n$2\r\nNX\r\n" % (_SET_NX, name, len(after), after)
    elif after is not None and before is not None and abilities.compare_and_set:
        words = ("SET", name, after, "IFEQ", before)
    else:
        words = ("EVALSHA", _CAS_NAME, 1, name, before or b"", after or b"")
    return slot_of(key), pack(*words)


def refused_change(reply: str, *, full: bool) -> KVStoreError:
    """The error of a change that Valkey rejects."""
    if full:
        return CapacityExceeded("Valkey is full: raise its maxmemory or add shards", reply=reply)
    return Unavailable("Valkey rejects changes", reply=reply[:200])


def took_effect(reply: object) -> bool:
    """Whether a change took effect; False: the record is no longer what it was."""
    return reply in (b"OK", 1)


class PublishedBatch(NamedTuple):
    """One batch of a volume epoch.

    Attributes:
        volume_epoch: the publisher.
        stored: runs to add.
        removed: keys to remove.
        keys: those of the batch, and parents of its runs: the records to read.
    """

    volume_epoch: VolumeEpoch
    stored: Sequence[BlockRun]
    removed: Sequence[BlockKey]
    keys: Sequence[BlockKey]


class PublishAttempt(NamedTuple):
    """The result of one attempt to publish a batch.

    Attributes:
        edit: the batch, applied in memory to the records that were read.
        changed_s: a time before the records were replaced.
        slots: hash slots whose shards answered the changes.
        missed: keys whose shard did not answer this attempt or an earlier one.
        raced: keys whose records were no longer what was read, and were not replaced.
        all_damaged: whether there are raced keys, and none of their values is a record.
    """

    edit: BatchEdit
    changed_s: float
    slots: set[int]
    missed: AbstractSet[BlockKey]
    raced: AbstractSet[BlockKey]
    all_damaged: bool


def unanswered(keys: Sequence[BlockKey], answers: Sequence[Answer]) -> AbstractSet[BlockKey]:
    """The keys whose shard did not answer."""
    return {key for key, answer in zip(keys, answers, strict=True) if answer is UNANSWERED}


def raced_keys(keys: Sequence[BlockKey], answers: Sequence[Answer]) -> AbstractSet[BlockKey]:
    """The keys whose change took no effect although their shard answered."""
    return {key for key, answer in zip(keys, answers, strict=True) if answer is not UNANSWERED and not took_effect(answer)}


def damaged_keys(keys: Sequence[BlockKey], answers: Sequence[Answer]) -> AbstractSet[BlockKey]:
    """The keys whose value is not a record."""
    present = (
        (key, answer) for key, answer in zip(keys, answers, strict=True) if answer is not None and answer is not UNANSWERED
    )
    return {key for key, answer in present if not is_record(answer)}


def sweep_commands(
    records: Sequence[tuple[bytes, bytes]], volume_epochs: Collection[VolumeEpoch], abilities: Abilities
) -> list[Command]:
    """Remove the replicas of other volume epochs. A record that changes at the same time is left to its writer."""
    changes: list[Command] = []
    for at in find_other_epochs([value for _, value in records], volume_epochs):
        key, value = records[at]
        record = decode(value)
        replicas = replicas_of(record, volume_epochs)
        left = encode(record[0], record[1], replicas) if replicas else None
        changes.append(change_command(BlockKey(key), value, left, abilities))
    return changes


def list_commands(ranges: Sequence[int]) -> list[Command]:
    """List the names of ranges, two commands for each. Read the replies with ``listed_names``.

    A server lists what it has, also of a slot that moves or moved. So each range is asked for a key that never exists, too: only
    a server with the whole slot says that there is none.
    """
    return [
        (RANGE_SLOTS[at], packed)
        for at in ranges
        for packed in (pack("CLUSTER", "GETKEYSINSLOT", RANGE_SLOTS[at], _KEYS_PER_RANGE), pack("GET", TAGS[at] + b"-"))
    ]


def listed_names(at: int, listing: object, nothing: object) -> list[bytes] | None:
    """Names of the records of a range, in any order; None: the range was not listed."""
    if not isinstance(listing, list) or nothing is not None:
        return None
    names, tag = cast("list[bytes]", listing), TAGS[at]
    with suppress(ValueError):
        names.remove(tag)  # the marker
    # a look at each name in Python would take longer than all else, and few ranges share their slot with another one
    packed = b"".join(names)
    if set(map(len, names)) == {NAME_BYTES} and all(packed[i::NAME_BYTES].count(tag[i]) == len(names) for i in range(TAG_BYTES)):
        return names
    named = [name for name in names if len(name) == NAME_BYTES]
    return list(compress(named, map(bytes.startswith, named, repeat(tag))))


def read_names_command(slot: int, names: Sequence[bytes]) -> Command:
    """Read the records of some names of one slot."""
    return slot, b"".join([_MGET_HEAD % (len(names) + 1), _NEXT_NAME, _NEXT_NAME.join(names), b"\r\n"])


def records_of(names: Sequence[bytes], replies: Sequence[object]) -> PackedRecords:
    """Keys and records, without those that are absent or damaged.

    Args:
        names: names of records.
        replies: the replies to ``read_names_command``, in order.

    Raises:
        Unavailable: a reply is an error.
    """
    values: list[bytes | None] = []
    for reply in replies:
        if not isinstance(reply, list):
            raise Unavailable("Valkey rejects a read", reply=str(reply)[:200])
        values += reply
    if len(values) != len(names):
        raise Unavailable("Valkey sent an invalid answer", values=len(values), names=len(names))
    # a check per record would take longer than all else
    if None in values or not all(is_record_size(size) for size in set(map(len, cast("list[bytes]", values)))):
        kept = [is_record(value) for value in values]
        names, values = list(compress(names, kept)), list(compress(values, kept))
    keys = np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME_BYTES)[:, TAG_BYTES:].tobytes()
    return PackedRecords(keys, cast("list[bytes]", values))


def joined(parts: Sequence[PackedRecords], ordinals: frozenset[int]) -> PackedRecords:
    """All records of the parts, with the numbers of the known namespaces."""
    return PackedRecords(b"".join([part.keys for part in parts]), [value for part in parts for value in part.values], ordinals)
