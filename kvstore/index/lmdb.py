"""The embedded index: LMDB, memory-mapped, shared by several processes of one host.

Databases: ``blocks`` (key -> record, see ``kvstore.index.record``), ``lives`` (open volume epochs), ``dead`` (closed volume
epochs, and the sweep after which no record names them), ``namespaces`` (digest -> ordinal and spec), ``notes`` and ``beats``
(last heartbeats; see ``kvstore.index.small_records``), ``meta`` (index epoch, revision, counters, sweep cursor). The names
``lives`` and ``next_life`` (a counter) are part of the format.

Any process may write: LMDB admits one writer at a time, and readers see a commit at once. What a process caches between calls
(open volume epochs, ordinals of namespaces) is checked against ``revision``, which is read in the same snapshot as the records.

Threads: all methods may be called from any thread. ``_write_lock`` serialises this process's writers. ``_gate`` is held during
each short read, so that the map can be resized while no transaction is open. A publish of many thousand keys holds the first
lock for a while: call it from an executor. Lookups do not wait for writers, except the first one after another process has
doubled the map: it waits for this process's writer. A process that is stopped inside a write keeps all others from writing.

After a fork the child must not use the index (LMDB forbids it). There all methods raise ``Unavailable``; the child must open
the index itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Self, TypeAlias, TypeVar, cast

import lmdb

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, InvalidArgument, KVStoreError, NotFound, Unavailable, Unsupported
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.checks import check_batch, check_keys, check_namespace, check_packed_keys, check_ranges, check_volume
from kvstore.index.contract import (
    Beat,
    IndexedBlock,
    IndexEntry,
    IndexListener,
    IndexStats,
    PackedRecords,
    PrefixHit,
    PrefixIndex,
    RemovedKeys,
    VolumeEpoch,
    VolumeEpochInfo,
)
from kvstore.index.counts import Count, count_nothing, report_ignored
from kvstore.index.lmdb_files import DAMAGE, IndexFiles, as_store_error
from kvstore.index.prefix import longest_prefix
from kvstore.index.record import BatchEdit, Replicas, decode, encode, replicas_of
from kvstore.index.run_end_cache import RunEndCache
from kvstore.index.small_records import (
    beat_key,
    check_beats,
    check_notes,
    decode_beat,
    decode_note,
    decode_volume_epoch,
    encode_beat,
    encode_note,
    encode_volume_epoch,
    note_key,
    note_key_prefix,
)
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

T = TypeVar("T")
Txn: TypeAlias = "lmdb.Transaction[bytes]"

DEFAULT_MAP_BYTES = 64 << 30
"""Address space, not disk space. The file grows with its contents, and the map doubles when it is full."""
MIN_MAP_BYTES = 1 << 20
_FORMAT_NAME = b"kvstore-index/"
_FORMAT = _FORMAT_NAME + b"2"
_DATABASES = (b"meta", b"blocks", b"lives", b"dead", b"namespaces", b"notes", b"beats")
_SCAN_PART = 1_024
"""Records per hold of the gate: about a millisecond."""
_U32 = struct.Struct(">I")  # big-endian, so that LMDB keeps them in numeric order
_U64 = struct.Struct(">Q")


def _ignore_damage() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _OpenVolumeEpochs:
    """Open volume epochs at one revision."""

    revision: bytes
    by_number: dict[VolumeEpoch, VolumeEpochInfo]
    by_boot: dict[tuple[VolumeId, BootId], VolumeEpoch]

    @property
    def revision_number(self) -> int:
        """The revision as a number."""
        return int.from_bytes(self.revision, "big")


class LmdbIndex(PrefixIndex):
    """A prefix index in LMDB. Create it with ``open``."""

    def __init__(self, files: IndexFiles, count: Count, on_damage: Callable[[], None] = _ignore_damage) -> None:
        self._files = files
        self._env = files.env
        self._count = count
        self._on_damage = on_damage
        self._damaged = False
        self._changes = FailureTracker()
        self._write_lock = threading.Lock()
        self._gate = threading.Lock()
        self._closed: str | None = None
        meta, self._blocks, self._volume_epochs_db, self._dead, self._namespaces, self._notes, self._beats = [
            self._env.open_db(name, create=False) for name in _DATABASES
        ]
        self._meta = meta
        self._ordinals: dict[NamespaceId, int] = {}
        self._known = _OpenVolumeEpochs(b"", {}, {})
        self._open_visible: tuple[bytes, Container[VolumeEpoch], frozenset[VolumeEpoch]] = (b"", frozenset(), frozenset())
        self._run_ends = RunEndCache()
        self._listener: IndexListener | None = None
        self._names: dict[int, NamespaceId] = {}
        with self._env.begin(db=meta) as txn:
            self._epoch = txn.get(b"epoch") or b""
        _opened.add(self)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        map_bytes: int = DEFAULT_MAP_BYTES,
        read_only: bool = False,
        count: Count = count_nothing,
        on_damage: Callable[[], None] = _ignore_damage,
    ) -> Self:
        """Open or create the index in a directory. An untrusted index is dropped and recreated with another ``epoch``.

        Args:
            path: the directory. It holds one index, and a process may open it once.
            map_bytes: initial address space.
            read_only: another process writes; all changes by this object are rejected.
            count: counts events, for example ``Counters().add``.
            on_damage: called once, in the thread that found damage or requested a rebuild. Then close the index and open it
                again.

        On a full disk an existing index opens, too. Changes are rejected (``CapacityExceeded``) until there is space again.

        Raises:
            Conflict: this process has the index open already.
            Unavailable: the index cannot be opened, or does not exist and ``read_only`` is set.
            InvalidArgument: the path is not a directory.
        """
        if map_bytes < MIN_MAP_BYTES:
            raise InvalidArgument("map_bytes is too small", map_bytes=map_bytes, minimum=MIN_MAP_BYTES)
        defect = _defect if read_only else _defect_unless_empty
        return cls(IndexFiles(path, map_bytes=map_bytes, read_only=read_only, count=count, defect=defect), count, on_damage)

    @property
    def epoch(self) -> bytes:
        return self._epoch

    # ---- volume epochs ----
    def open_volume_epoch(self, volume_id: VolumeId, node_id: NodeId, tier: Tier, boot_id: BootId) -> VolumeEpoch:
        check_volume(volume_id, node_id, boot_id)

        def work(txn: Txn) -> VolumeEpoch:
            known = self._open_volume_epochs(txn).by_boot.get((volume_id, boot_id))
            if known is not None:
                return known
            volume_epoch = self._next(txn, b"next_life")
            info = VolumeEpochInfo(VolumeEpoch(volume_epoch), volume_id, node_id, tier, boot_id)
            txn.put(_U32.pack(volume_epoch), encode_volume_epoch(info), db=self._volume_epochs_db)
            self._announce(txn)
            return VolumeEpoch(volume_epoch)

        opened = self._write(work)
        if self._listener is not None:
            self._listener.opened(VolumeEpochInfo(opened, volume_id, node_id, tier, boot_id))
        return opened

    def close_volume_epoch(self, volume_epoch: VolumeEpoch) -> None:
        def work(txn: Txn) -> None:
            if volume_epoch not in self._open_volume_epochs(txn).by_number:
                return
            txn.delete(_U32.pack(volume_epoch), db=self._volume_epochs_db)
            cursor, running = self._sweep_state(txn)
            # a sweep in progress has already passed some of its records: the next sweep removes them
            txn.put(_U32.pack(volume_epoch), _U64.pack(running + 1 if cursor else running), db=self._dead)
            self._announce(txn)

        self._write(work)
        if self._listener is not None:
            self._listener.closed(volume_epoch)

    def volume_epochs(self) -> list[VolumeEpochInfo]:
        return list(self._read(self._open_volume_epochs).by_number.values())

    # ---- blocks ----
    def publish(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
        check_batch(stored, removed)
        keys_read = BatchEdit.reads(stored, removed)

        def work(txn: Txn) -> BatchEdit:
            volume_epochs = self._open_volume_epochs(txn).by_number
            if volume_epoch not in volume_epochs:
                raise NotFound("the volume epoch is not open", volume_epoch=volume_epoch)
            cursor = txn.cursor(db=self._blocks)
            existing = cast("dict[BlockKey, bytes]", dict(cursor.getmulti(keys_read)))
            edit = BatchEdit(volume_epoch, volume_epochs, lambda namespace: self._ordinal_or_new(txn, namespace), existing)
            edit.remove(removed)
            for run in stored:
                edit.store(run)
            for key in edit.deletes():
                txn.delete(key, db=self._blocks)
            if puts := edit.puts():
                cursor.putmulti(puts)
            return edit

        edit = self._write(work)
        self._run_ends.record_stored(stored)
        if self._listener is not None and (edit.stored or edit.removed):
            lost = [RemovedKeys(holder, self._name_of(ordinal), keys) for (holder, ordinal), keys in edit.removed.items()]
            self._listener.published(volume_epoch, edit.stored, lost)
        report_ignored(edit, volume_epoch, self._count)

    def lookup(self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()) -> PrefixHit:
        check_packed_keys(keys)
        count, head = len(keys) // KEY_BYTES, BlockKey(keys[:KEY_BYTES])
        guesses = self._run_ends.of(head, ends)

        def work(txn: Txn) -> PrefixHit:
            known = self._open_volume_epochs(txn)
            ordinal = self._ordinal(txn, namespace)
            if ordinal is None:
                return PrefixHit(0, (), known.revision_number)
            get, blocks, volume_epochs = txn.get, self._blocks, self._visible_of(known, visible)

            def probe(position: int) -> Replicas:
                at = position * KEY_BYTES
                value = get(keys[at : at + KEY_BYTES], None, blocks)
                if value is None:
                    return {}
                record = decode(value)
                if record[0] != ordinal or record[1] != position:
                    return {}
                return replicas_of(record, volume_epochs)

            return longest_prefix(count, probe, guesses, known.revision_number)

        hit = self._read(work)
        self._run_ends.record_lookup(head, count, tuple([run.start + run.count for run in hit.runs]))
        return hit

    def describe(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        def read_names(txn: Txn) -> dict[int, NamespaceId]:
            with txn.cursor(db=self._namespaces) as cursor:
                return {_U32.unpack_from(value)[0]: NamespaceId(key) for key, value in cursor}

        names = self._read(read_names)
        found: list[IndexEntry | None] = []

        def work(txn: Txn) -> None:
            for key in keys[len(found) : len(found) + _SCAN_PART]:
                value = txn.get(key, None, self._blocks)
                if value is None:
                    found.append(None)
                    continue
                ordinal, depth, *flat = decode(value)
                replicas = tuple(
                    (VolumeEpoch(volume_epoch), start) for volume_epoch, start in zip(flat[::2], flat[1::2], strict=True)
                )
                found.append(IndexEntry(names.get(ordinal), depth, replicas))

        while len(found) < len(keys):
            self._read(work)
        return found

    def request_rebuild(self) -> None:
        """Treat the index as damaged: the next process that opens it alone drops and recreates it. Calls ``on_damage``."""
        logger.warning("index rebuild requested: %s (dropped at the next opening)", self._files.path)
        self._count(metadata_metrics.INDEX_REBUILDS_ASKED, 1)
        self._damaged = True
        self._files.mark_for_rebuild()
        self._on_damage()

    def holders(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        check_keys(keys)
        found: list[tuple[VolumeEpoch, ...]] = []

        def work(txn: Txn, part: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
            volume_epochs, ordinal = self._open_volume_epochs(txn).by_number, self._ordinal(txn, namespace)
            records = [decode(value) if (value := txn.get(key, None, self._blocks)) else () for key in part]
            return [tuple(replicas_of(one, volume_epochs)) if one and one[0] == ordinal else () for one in records]

        for at in range(0, len(keys), _SCAN_PART):  # in parts: each part holds the gate
            part = keys[at : at + _SCAN_PART]
            found += self._read(lambda txn, part=part: work(txn, part))  # type: ignore[misc]
        return found

    # ---- the whole ----
    def listen(self, listener: IndexListener) -> None:
        self._listener = listener

    def blocks_from(self, first: BlockKey | None, most: int) -> tuple[list[IndexedBlock], BlockKey | None]:
        if most < 1:
            raise InvalidArgument("most must be positive", most=most)

        def work(txn: Txn) -> tuple[list[tuple[bytes, tuple[int, ...], tuple[VolumeEpoch, ...]]], bytes | None]:
            volume_epochs = self._open_volume_epochs(txn).by_number
            part, following = self._scan(txn, first or b"", most)
            records = [(key, decode(value)) for key, value in part]
            return [(key, record, tuple(replicas_of(record, volume_epochs))) for key, record in records], following

        found, following = self._read(work)
        blocks = [
            IndexedBlock(BlockKey(key), self._name_of(record[0]), record[1], held_by) for key, record, held_by in found if held_by
        ]
        return blocks, None if following is None else BlockKey(following)

    # ---- anti-entropy ----
    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        records = self.records_in_ranges(key_range, 1)
        if not self._read(lambda txn: volume_epoch in self._open_volume_epochs(txn).by_number):
            return []
        return [BlockKey(key) for key, value in records if volume_epoch in decode(value)[2::2]]

    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        last = first + count
        check_ranges(first, count)
        found: list[tuple[bytes, bytes]] = []
        position: bytes | None = (first << 4).to_bytes(2, "big")
        end = (last << 4).to_bytes(2, "big") if last < limits.DIGEST_RANGES else None

        def work(txn: Txn) -> bytes | None:
            part, following = self._scan(txn, position or b"", _SCAN_PART, end)
            found.extend(part)
            return following

        while position is not None:
            position = self._read(work)
        return found

    def packed_records(self, first: int, count: int) -> PackedRecords:
        records = self.records_in_ranges(first, count)
        return PackedRecords(b"".join([key for key, _ in records]), [value for _, value in records])

    def sweep(self, max_entries: int) -> bool:
        if max_entries < 1:
            raise InvalidArgument("max_entries must be positive", max_entries=max_entries)

        def work(txn: Txn) -> bool:
            if not txn.stat(self._dead)["entries"]:
                return True
            volume_epochs = self._open_volume_epochs(txn).by_number
            position, running = self._sweep_state(txn)
            part, following = self._scan(txn, position, max_entries)
            for key, value in part:
                record = decode(value)
                replicas = replicas_of(record, volume_epochs)
                if not replicas:
                    txn.delete(key, db=self._blocks)
                elif len(replicas) * 2 + 2 < len(record):
                    txn.put(key, encode(record[0], record[1], replicas), db=self._blocks)
            if following is None:
                with txn.cursor(db=self._dead) as cursor:
                    swept = [volume_epoch for volume_epoch, due in cursor if _U64.unpack(due)[0] <= running]
                for volume_epoch in swept:
                    txn.delete(volume_epoch, db=self._dead)
                running += 1
            txn.put(b"sweep", _U64.pack(running) + (following or b""), db=self._meta)
            return not txn.stat(self._dead)["entries"]

        return self._write(work)

    # ---- namespaces ----
    def put_namespace(self, namespace: NamespaceId, spec: bytes) -> None:
        check_namespace(namespace)

        def work(txn: Txn) -> None:
            ordinal = self._ordinal_or_new(txn, namespace)
            if ordinal is None:
                raise CapacityExceeded("too many namespaces", limit=limits.MAX_NAMESPACES)
            value = _U32.pack(ordinal) + b"\x01" + spec
            if txn.get(namespace, db=self._namespaces) != value:
                txn.put(namespace, value, db=self._namespaces)
                self._announce(txn)

        self._write(work)

    def spec_of(self, namespace: NamespaceId) -> bytes | None:
        value = self._read(lambda txn: txn.get(namespace, None, self._namespaces)) if len(namespace) == KEY_BYTES else None
        return value[5:] if value is not None and value[4] else None

    def namespaces(self) -> list[tuple[NamespaceId, bytes]]:
        def work(txn: Txn) -> list[tuple[NamespaceId, bytes]]:
            with txn.cursor(db=self._namespaces) as cursor:
                entries = sorted((value[:4], key, value[5:]) for key, value in cursor if value[4])
            return [(NamespaceId(key), spec) for _, key, spec in entries]

        return self._read(work)

    # ---- notes and heartbeats ----
    def put_notes(self, notes: Mapping[str, bytes | None], *, announce: bool = True) -> None:
        check_notes(notes)
        entries = [(note_key(name), None if value is None else encode_note(name, value)) for name, value in notes.items()]

        def work(txn: Txn) -> None:
            changed = [(key, entry) for key, entry in entries if txn.get(key, db=self._notes) != entry]
            for key, entry in changed:
                if entry is None:
                    txn.delete(key, db=self._notes)
                else:
                    txn.put(key, entry, db=self._notes)
            if announce and changed:
                self._announce(txn)

        self._write(work)

    def note(self, name: str) -> bytes | None:
        key = note_key(name)
        entry = self._read(lambda txn: txn.get(key, db=self._notes))
        return None if entry is None else decode_note(entry)[1]

    def notes(self, prefix: str) -> dict[str, bytes]:
        first = note_key_prefix(prefix)

        def work(txn: Txn) -> list[bytes]:
            with txn.cursor(db=self._notes) as cursor:
                if not (cursor.set_range(first) if first else cursor.first()):
                    return []
                return [entry for _, entry in takewhile(lambda record: record[0].startswith(first), cursor)]

        found = dict(map(decode_note, self._read(work)))
        return {name: value for name, value in found.items() if name.startswith(prefix)}

    def put_beats(self, beats: Mapping[NodeId, Beat | None]) -> None:
        check_beats(beats)
        puts = sorted((beat_key(node_id), encode_beat(node_id, beat)) for node_id, beat in beats.items() if beat is not None)
        deletes = [beat_key(node_id) for node_id, beat in beats.items() if beat is None]

        def work(txn: Txn) -> None:
            with txn.cursor(db=self._beats) as cursor:
                cursor.putmulti(puts)
            for key in deletes:
                txn.delete(key, db=self._beats)

        self._write(work)

    def beats(self) -> dict[NodeId, Beat]:
        def work(txn: Txn) -> list[bytes]:
            with txn.cursor(db=self._beats) as cursor:
                return list(cursor.iternext(keys=False, values=True))

        return dict(map(decode_beat, self._read(work)))

    # ---- the whole ----
    @property
    def revision(self) -> int:
        return int.from_bytes(self._read(lambda txn: txn.get(b"revision", b"", self._meta)), "big")

    def stats(self) -> IndexStats:
        def work(txn: Txn) -> IndexStats:
            now_s = time.monotonic()
            return IndexStats(
                blocks=txn.stat(self._blocks)["entries"],
                bytes=(self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"],
                dead_volume_epochs=txn.stat(self._dead)["entries"],
                failing=self._changes.reason(now_s),
                failing_s=self._changes.seconds(now_s),
            )

        return self._read(work)

    def close(self) -> None:
        with self._write_lock, self._gate:
            if self._closed is not None:
                return
            self._closed = "the index is closed"
            self._files.close()

    # ---- transactions ----
    def _read(self, work: Callable[[Txn], T]) -> T:
        """Run work on a snapshot. It must be short, because it holds the gate."""
        try:
            while True:
                with self._gate:
                    if self._closed is not None:
                        raise Unavailable(self._closed, path=self._files.path)
                    try:
                        with self._env.begin() as txn:
                            return work(txn)
                    except lmdb.MapResizedError:
                        pass
                with self._write_lock, self._gate:
                    self._adopt_size()
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _write(self, work: Callable[[Txn], T]) -> T:
        """Run work and commit it as a whole. Work may run twice (if the map had to grow), so it must only change ``txn``."""
        if self._files.read_only:
            raise Unsupported("the index is open for reading only", path=self._files.path)
        try:
            with self._write_lock:
                while True:
                    if self._closed is not None:
                        raise Unavailable(self._closed, path=self._files.path)
                    try:
                        self._files.make_writable()
                    except KVStoreError as error:
                        self._record_failure(error)
                        raise
                    try:
                        with self._env.begin(write=True) as txn:
                            done = work(txn)
                    except lmdb.MapFullError:
                        with self._gate:
                            self._files.grow()
                    except lmdb.MapResizedError:
                        with self._gate:
                            self._adopt_size()
                    else:
                        self._changes.succeeded(time.monotonic())
                        return done
        except lmdb.Error as error:
            failed = self._failed(error)
            self._record_failure(failed)
            raise failed from error

    def _record_failure(self, error: KVStoreError) -> None:
        limited.warning("index change failed: %s (%s)", self._files.path, error)
        self._changes.failed(time.monotonic(), error)

    def _adopt_size(self) -> None:
        if self._closed is None:
            self._files.adopt_size()

    def _failed(self, error: lmdb.Error) -> KVStoreError:
        if isinstance(error, DAMAGE):
            if not self._damaged:  # reported once: each lookup finds it
                self._damaged = True
                logger.error("index damaged: %s (%s; dropped at the next opening)", self._files.path, error)
                self._files.mark_damaged()
                self._on_damage()
        else:
            self._count(metadata_metrics.INDEX_ERRORS, 1)
        if isinstance(error, lmdb.ReadersFullError):
            self._env.reader_check()  # frees the slots of killed readers for the next call
        return as_store_error(error, self._files.path)

    # ---- parts of transactions ----
    def _open_volume_epochs(self, txn: Txn) -> _OpenVolumeEpochs:
        """Open volume epochs in this snapshot. Only committed data is cached: writers ask before they change anything."""
        revision = txn.get(b"revision", b"", self._meta)
        known = self._known
        if known.revision == revision:
            return known
        with txn.cursor(db=self._volume_epochs_db) as cursor:
            volume_epochs = [decode_volume_epoch(VolumeEpoch(_U32.unpack(key)[0]), value) for key, value in cursor]
        by_boot = {(info.volume_id, info.boot_id): info.volume_epoch for info in volume_epochs}
        self._known = _OpenVolumeEpochs(revision, {info.volume_epoch: info for info in volume_epochs}, by_boot)
        return self._known

    def _visible_of(self, known: _OpenVolumeEpochs, visible: Container[VolumeEpoch]) -> Container[VolumeEpoch]:
        """The open volume epochs among the visible ones; computed once per frozen set."""
        revision, judged, open_visible = self._open_visible
        if judged is visible and revision == known.revision:
            return open_visible
        open_visible = frozenset([volume_epoch for volume_epoch in known.by_number if volume_epoch in visible])
        if isinstance(visible, frozenset):
            self._open_visible = known.revision, visible, open_visible
        return open_visible

    def _ordinal(self, txn: Txn, namespace: NamespaceId) -> int | None:
        """Number of a namespace. A committed number never changes, so it is cached."""
        ordinal = self._ordinals.get(namespace)
        if ordinal is None:
            if len(namespace) != KEY_BYTES or (value := txn.get(namespace, db=self._namespaces)) is None:
                return None
            ordinal = self._ordinals[namespace] = _U32.unpack_from(value)[0]
        return ordinal

    def _ordinal_or_new(self, txn: Txn, namespace: NamespaceId) -> int | None:
        """Number of a namespace, for a writer. A namespace whose blocks arrive before its spec gets a number now.

        Returns:
            None if the index holds as many namespaces as it may.
        """
        known = self._ordinals.get(namespace)
        if known is not None:
            return known
        value = txn.get(namespace, db=self._namespaces)  # not cached: it may not be committed yet
        if value is None:
            if txn.stat(self._namespaces)["entries"] >= limits.MAX_NAMESPACES:
                return None
            value = _U32.pack(self._next(txn, b"next_namespace")) + b"\x00"
            txn.put(namespace, value, db=self._namespaces)
        ordinal: int = _U32.unpack_from(value)[0]
        return ordinal

    def _name_of(self, ordinal: int) -> NamespaceId:
        """The namespace with a committed number. Numbers never change, so names are cached."""
        name = self._names.get(ordinal)
        if name is None:

            def work(txn: Txn) -> dict[int, NamespaceId]:
                with txn.cursor(db=self._namespaces) as cursor:
                    return {_U32.unpack_from(value)[0]: NamespaceId(key) for key, value in cursor}

            self._names = self._read(work)
            name = self._names[ordinal]
        return name

    def _next(self, txn: Txn, counter: bytes) -> int:
        number: int = _U32.unpack(txn.get(counter, b"\x00\x00\x00\x00", self._meta))[0] + 1
        txn.put(counter, _U32.pack(number), db=self._meta)
        return number

    def _announce(self, txn: Txn) -> None:
        revision = int.from_bytes(txn.get(b"revision", b"", self._meta), "big") + 1
        txn.put(b"revision", _U64.pack(revision), db=self._meta)

    def _sweep_state(self, txn: Txn) -> tuple[bytes, int]:
        """(key to continue from, empty at the start of a sweep; number of the sweep)."""
        value = txn.get(b"sweep", _U64.pack(0), self._meta)
        return value[8:], _U64.unpack_from(value)[0]

    def _scan(
        self, txn: Txn, first: bytes, most: int, end: bytes | None = None
    ) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Up to ``most`` records of ``[first, end)``, and the key to continue from (None: there are no more)."""
        with txn.cursor(db=self._blocks) as cursor:
            if not (cursor.set_range(first) if first else cursor.first()):
                return [], None
            records: Iterator[tuple[bytes, bytes]] = cursor.iternext(keys=True, values=True)
            if end is not None:  # otherwise each of the 4,096 ranges would read hundreds of later records
                records = takewhile(lambda record: record[0] < end, records)
            part = list(islice(records, most + 1))
        return part[:most], part[most][0] if len(part) > most else None

    def abandon_after_fork(self) -> None:
        self._closed = "the index was opened before a fork: open it in the child"
        self._write_lock, self._gate = threading.Lock(), threading.Lock()  # another thread of the parent may hold the old ones
        self._files.abandon()
        _inherited.append(self._env)


_opened: weakref.WeakSet[LmdbIndex] = weakref.WeakSet()
_inherited: list[lmdb.Environment] = []
"""Environments of a parent process. They must stay referenced: freeing one would close the parent's files."""


def _abandon_all() -> None:
    for index in list(_opened):
        index.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_all)


def _defect(env: lmdb.Environment) -> str:
    """Why the content of the environment is not an index of this format; empty: it is one."""
    try:
        meta = env.open_db(b"meta", create=False)
        with env.begin(db=meta) as txn:
            found, epoch = txn.get(b"format", b""), txn.get(b"epoch", b"")
        if found.startswith(_FORMAT_NAME) and found != _FORMAT:
            return f"its format is {found[:32].decode(errors='replace')}, this version reads {_FORMAT.decode()}"
        for name in _DATABASES:
            env.open_db(name, create=False)
    except lmdb.NotFoundError:
        return "content is not an index"
    return "" if found == _FORMAT and len(epoch) == KEY_BYTES else "content is not an index"


def _defect_unless_empty(env: lmdb.Environment) -> str:
    """As :func:`_defect`, after an empty environment was made an index."""
    if env.stat()["entries"]:
        return _defect(env)
    databases = [env.open_db(name) for name in _DATABASES]
    with env.begin(db=databases[0], write=True) as txn:
        txn.put(b"epoch", secrets.token_bytes(KEY_BYTES))
        txn.put(b"format", _FORMAT)
    return ""
