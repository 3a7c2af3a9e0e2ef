"""NVMe slab: a volume in one preallocated file, with a catalog beside it.

A volume is a folder::

    slab.kv    superblock (1 MiB), then slots: [header pages][payload, padded to 4 KiB]
    catalog/   LMDB: block key -> slot header
    lock       held (flock) by the one process that has the volume open
    rules      what may stay of namespaces, as the node heard it last (``kvstore.node.control.rules_file``): not the volume's
    roster     block key -> slot, for nodes that mount the folder: derived, a hint (``kvstore.tiers.nvme.slot_manifest``)
    rules      what may stay of namespaces, as the node heard it last (``kvstore.node.control.rules_file``): not the volume's
    roster     block key -> slot, for nodes that mount the folder: derived, a hint (``kvstore.tiers.nvme.slot_manifest``)

Order of things, which is all of crash safety: slots are written; ``commit`` syncs the slab, then changes the catalog in one
synced transaction; slots of removed blocks are given out again only after that. A crash at any point leaves every block whose
commit had returned, and nothing else visible. Nothing is trusted on the way back: a read compares the header with the one that
was asked for, byte for byte, and the payload with its checksums.

If syncing the slab ever fails, the kernel may have thrown written pages away and will not say so again; so from then on this
opening stores nothing more (reads and removals go on). Opening the volume anew begins anew.

Nor is a file that nobody finds again worth anything: before each commit, and when asked, the volume looks whether slab and
catalog still lie under its path. If they were removed, moved or mounted over, it is read-only until they are back.

Where the file system takes no writes at all when the volume is opened, it is *read-only*: it gives no room, removes nothing and
serves what it holds, until ``resume`` succeeds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.core import limits
from kvstore.core.errors import CorruptBlock, Internal, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, BlockShape, Outcome, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import BlockRecord, DurableVolume, ReclaimableSpan, Slot
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.sealed_slot import SealedSlotIO
from kvstore.tiers.nvme.slab_io import NOTHING, IoChoice, SlotIO
from kvstore.tiers.nvme.slot_header import check_shape, header_bytes, pack_header, parse_header, place_in, slot_bytes
from kvstore.tiers.nvme.slot_manifest import SlotManifestWriter
from kvstore.tiers.nvme.volume_open import (
    SLAB_FILE,
    CannotWriteError,
    OpenParts,
    VolumeLock,
    begin_epoch,
    make_volume,
    open_catalog,
    open_parts,
    writing,
)
from kvstore.tiers.slot_pool import PooledVolume, SlotPool

_log = logging.getLogger(__name__)

_RECOVERY_BATCH = 1024


class NvmeSlab(PooledVolume, DurableVolume):
    """A durable volume on a local file system. Made by ``open``. Thread-safe."""

    def __init__(self, path: Path, lock: VolumeLock, parts: OpenParts, *, verify_headers: bool, counters: Counters) -> None:
        superblock = parts.superblock
        self.volume_id = superblock.volume_id
        self.tier = Tier.NVME
        self._path = path
        self._volume_lock = lock
        self._file = parts.file
        self._catalog: Catalog | None = parts.catalog  # None: closed, while read-only after recovery
        self._read_only = parts.read_only
        self._superblock = superblock
        self._uid = superblock.uid
        self._verify_headers = verify_headers
        self._counters = counters
        self.slot_pool = SlotPool(
            superblock.capacity_bytes, chunk_bytes=superblock.chunk_bytes, first_generation=superblock.first_generation
        )
        self._commit_lock = threading.Lock()
        self._manifest = SlotManifestWriter(path, superblock, self._listed, counters)
        self._to_drop: list[BlockKey] = []
        self._recovered = False
        self._sync_failed = False
        self._places = [(path / SLAB_FILE, os.fstat(parts.file.fd)), (parts.catalog.file, os.stat(parts.catalog.file))]
        self._gone = False
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        volume_id: VolumeId,
        capacity_bytes: int,
        io_threads: int = 4,
        direct: bool = True,
        verify_headers: bool = False,
        counters: Counters | None = None,
        gds: Kvikio | None = None,
        gds_required: bool = False,
        gds_host_reads: bool = False,
    ) -> NvmeSlab:
        """Opens a volume, and makes it where the folder is missing or empty.

        One that exists on a file system that takes no writes (full, read-only, failing) is opened read-only (``read_only``), with
        the capacity that it has.

        Args:
            path: folder of the volume.
            volume_id: its name; must be the one that it was made with.
            capacity_bytes: room for slots. More than before: the volume grows.
            io_threads: I/O requests under way at once.
            direct: use O_DIRECT where it works (``io_engine`` says what is in use).
            verify_headers: ``recover`` reads every slot's header and drops those that differ (an I/O a block).
            counters: where fallbacks and failures are counted.
            gds: kvikio, for reads into device memory; None: they go through host memory.
            gds_required: refuse to open where kvikio cannot open the slab, rather than do without it.
            gds_host_reads: reads into host memory go through kvikio as well, for tests and benchmarks.

        Raises:
            Conflict: another process has it open, or it is another volume.
            InvalidArgument: it was larger before, or the arguments are out of bounds.
            CorruptBlock: superblock, slab or catalog is damaged or lost; the message names the command that mends it.
            CapacityExceeded: the file system has no room to make or to enlarge it.
            Unavailable: its catalog cannot be opened.
            Unsupported: ``gds_required``, and kvikio cannot open the slab.
            OSError: anything else that the file system says.
        """
        counters = counters or Counters()
        capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        if capacity_bytes < ALIGNMENT or not 0 < len(volume_id.encode()) <= limits.MAX_NAME_BYTES:
            raise InvalidArgument("a volume takes a name and at least one page of 4096 bytes", capacity_bytes=capacity_bytes)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = VolumeLock(path)
        try:
            if not (path / SLAB_FILE).exists():
                make_volume(path, volume_id, capacity_bytes)
            engine = IoChoice(io_threads, direct=direct, gds=gds, gds_required=gds_required, gds_host_reads=gds_host_reads)
            parts = open_parts(path, volume_id, capacity_bytes, engine, counters)
        except BaseException:
            lock.close()
            raise
        superblock = parts.superblock
        size, epoch = superblock.capacity_bytes >> 20, superblock.epoch
        _log.info("volume %s at %s: %d MiB, %s, epoch %d", volume_id, path, size, parts.file.engine, epoch)
        return cls(path, lock, parts, verify_headers=verify_headers, counters=counters)

    @property
    def io_engine(self) -> str:
        return self._file.engine if self._read_only is None else f"{self._file.engine}, read-only ({self._read_only})"

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is in use."""
        return self._file.direct

    @property
    def read_only(self) -> str | None:
        return self._read_only

    @property
    def files_present(self) -> bool:
        return not self._gone

    @property
    def answered_s(self) -> float:
        return self._file.answered_s

    def check_files(self) -> bool:
        found = all(_is_at(path, file) for path, file in self._places)
        if found or self._gone:
            return found
        with self._commit_lock:
            self._lose()
        return False

    def _lose(self) -> None:
        """The files are not where they were. The caller has the commit lock."""
        if self._gone or self._closed:
            return
        self._gone = True
        self._read_only = self._read_only or f"its files are no longer in {self._path}: removed, moved or mounted over"
        self._counters.add(volumes_metrics.NVME_FILES_GONE)
        _log.error(
            "volume %s: its files are no longer in %s: they were removed, moved or mounted over. Nothing it holds outlives this "
            "process, and it stores nothing more; put them back, or restart the node to begin with an empty volume",
            self.volume_id, self._path,
        )  # fmt: skip

    # ---- slots ----
    @staticmethod
    def _slot_bytes(shape: BlockShape) -> int:
        return slot_bytes(shape)

    def fits(self, shape: BlockShape) -> bool:
        return self.slot_pool.fits(slot_bytes(shape))

    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        check_shape(shape)
        if not self._recovered:
            raise Internal("allocate was called before recover() had returned all blocks: slots in use could be allocated")
        return None if self._read_only is not None else super().allocate(shape, count)

    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        check_shape(shape)
        # a read-only volume cannot evict: its catalog cannot remove entries
        return None if self._read_only is not None else super().plan_eviction(shape, count, coldest, limit)

    def reclaimable_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> list[ReclaimableSpan]:
        check_shape(shape)
        return [] if self._read_only is not None else super().reclaimable_spans(shape, cold)

    # ---- bytes ----
    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        if self._read_only is not None:
            return [self._refusal(self._read_only)] * len(items)
        results: list[Exception | None] = [None] * len(items)
        slots: list[SlotIO] = []
        places: list[int] = []
        for place, (slot, record, payload) in enumerate(items):
            try:
                self._check_checksums(record)
                slots.append(self._slot_io(slot, record, payload))
                places.append(place)
            except (InvalidArgument, Internal) as error:
                results[place] = error
        self._file.write(slots)
        for place, io in zip(places, slots, strict=True):
            results[place] = io.error
        return results

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        return [outcome for outcome, _ in self._read(items, verify)]

    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        return self._read(items, verify=True)

    def _read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], verify: bool) -> list[tuple[Outcome, bytes]]:
        answers = [(Outcome.CORRUPT, b"")] * len(items)
        slots: list[SlotIO] = []
        places: list[int] = []
        for place, (slot, record, payload) in enumerate(items):
            if not self.slot_pool.holds(slot):
                continue  # given to another block since: whatever lies there is not what was asked for
            slots.append(self._slot_io(slot, record, payload))
            places.append(place)
        self._file.read(slots, verify=verify)
        for place, io in zip(places, slots, strict=True):
            answers[place] = (io.outcome, io.record.checksums)
        return answers

    def read_device(self, items: Sequence[tuple[Slot, BlockRecord, DeviceMemory]], *, verify: bool = True) -> list[Outcome]:
        """As ``read``, into device memory: straight from the disk where the I/O engine can, else through host memory.

        What is not a HIT leaves the memory undefined.

        Args:
            items: each with memory of one Full Block, which nothing else uses meanwhile.
            verify: compare checksums; what went straight to the device is fetched back for that. Headers always are.

        Raises:
            InvalidArgument: memory is no Full Block.
        """
        outcomes = [Outcome.CORRUPT] * len(items)
        pairs: list[tuple[SlotIO, DeviceMemory]] = []
        places: list[int] = []
        for place, (slot, record, memory) in enumerate(items):
            shape = record.shape
            if memory.nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
                raise InvalidArgument("device memory is one Full Block and fits its slot", bytes=memory.nbytes)
            if not self.slot_pool.holds(slot):
                continue  # as for read
            pairs.append((self._place_io(slot, record, NOTHING), memory))
            places.append(place)
        self._file.read_device(pairs, verify=verify)
        for place, (io, _) in zip(places, pairs, strict=True):
            outcomes[place] = io.outcome
        return outcomes

    @staticmethod
    def _check_checksums(record: BlockRecord) -> None:
        if record.seal is not None:
            raise Internal("a block is written without its checksums", key=record.key.hex())

    def _slot_io(self, slot: Slot, record: BlockRecord, payload: memoryview) -> SlotIO:
        shape = record.shape
        if payload.nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
            raise InvalidArgument(
                "a payload is one Full Block and fits its slot", bytes=payload.nbytes, expected=shape.block_bytes
            )
        if not self.slot_pool.holds(slot):
            raise Internal("a slot is used that is not held", slot=slot)
        if payload.format != "B" or payload.ndim != 1:
            payload = payload.cast("B")
        return self._place_io(slot, record, payload)

    def _place_io(self, slot: Slot, record: BlockRecord, payload: memoryview) -> SlotIO:
        room = header_bytes(record.shape.layers)
        if record.seal is not None:
            return SealedSlotIO(self._uid, slot, self.slot_pool.span_at(slot.offset), room, record, payload)
        return SlotIO(slot.offset, slot.size, self._header(slot, record), room, record, payload)

    def _header(self, slot: Slot, record: BlockRecord) -> bytes:
        first_chunk, chunks = self.slot_pool.span_at(slot.offset)
        return pack_header(self._uid, slot, first_chunk, chunks, record)

    # ---- durability ----
    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        entries: list[tuple[BlockKey, bytes]] = []
        for slot, record in stored:
            if not self.slot_pool.holds(slot):
                raise Internal("a block is committed in a slot that is not held", slot=slot)
            entries.append((record.key, self._header(slot, record)))
        with self._commit_lock:
            if self._catalog is None or self._read_only is not None:
                raise self._refusal(self._read_only or "closed")
            if entries:
                self._sync()
            if not all(_is_at(path, file) for path, file in self._places):
                self._lose()
                raise self._refusal(self._read_only or "its files are gone")
            self._catalog.commit(entries, removed)
            self._manifest.append([(record.key, slot) for slot, record in stored], removed)

    def _listed(self) -> Iterator[tuple[BlockKey, Slot]]:
        """What the catalog holds, for the roster. The caller has the catalog to itself."""
        if self._catalog is not None:
            for key, header in self._catalog.entries():
                yield BlockKey(key), place_in(header)

    def _refusal(self, reason: str) -> Unavailable:
        return Unavailable("this volume is read-only", volume_id=self.volume_id, reason=reason)

    def _sync(self) -> None:
        if self._sync_failed:
            raise Unavailable(
                "syncing this volume failed before: it stores nothing until it is opened anew", volume_id=self.volume_id
            )
        try:
            self._file.sync()
        except OSError as error:
            self._sync_failed = True
            self._counters.add(volumes_metrics.NVME_SYNC_ERRORS)
            _log.exception(
                "volume %s: sync failed (%s): nothing more is stored until it is opened anew", self.volume_id, error.strerror
            )
            raise

    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        if self._recovered:
            raise Internal("a volume is recovered once, right after opening")
        assert self._catalog is not None  # until it is recovered
        bad = self._to_drop
        batch: list[tuple[Slot, BlockRecord]] = []
        for key, value in self._catalog.entries():
            found = self._take(key, value)
            if found is None:
                bad.append(BlockKey(key))
                continue
            batch.append(found)
            if len(batch) == _RECOVERY_BATCH:
                yield from self._with_good_headers(batch, bad)
                batch = []
        yield from self._with_good_headers(batch, bad)
        if bad:
            self._counters.add(volumes_metrics.NVME_RECOVERY_DROPPED, len(bad))
            _log.warning("volume %s: %d catalog entries cannot be: dropped", self.volume_id, len(bad))
        with self._commit_lock:
            if self._read_only is None:
                self._drop_bad(self._catalog)
            if self._read_only is not None:
                self._catalog.close()
                self._catalog = None
            else:
                self._manifest.begin()
        self._recovered = True

    def _drop_bad(self, catalog: Catalog) -> None:
        """Takes entries that cannot be out of the catalog. Until it has forgotten them, their places must not be given out."""
        try:
            with writing():
                if self._to_drop:
                    catalog.commit((), self._to_drop)
                self._to_drop = []
        except CannotWriteError as error:
            self._read_only = str(error)
            self._counters.add(volumes_metrics.NVME_OPENED_READ_ONLY)
            _log.warning("volume %s cannot be written to (%s): it is read-only and serves what it holds", self.volume_id, error)

    def resume(self) -> bool:
        with self._commit_lock:
            if self._read_only is None:
                return True
            if self._closed or not self._recovered:
                return False
            if self._gone:
                if not all(_is_at(path, file) for path, file in self._places):
                    return False
                self._gone = False
            try:
                if self._catalog is None:  # else it was writable, and is as it was
                    self._begin_writing()
                self._read_only = None
            except (CannotWriteError, KVStoreError, OSError) as error:
                if str(error) != self._read_only:
                    self._read_only = str(error)
                    _log.warning("volume %s stays read-only: %s", self.volume_id, error)
                return False
        self._counters.add(volumes_metrics.NVME_RESUMED)
        _log.warning("volume %s can be written to again: it stores blocks", self.volume_id)
        return True

    def _begin_writing(self) -> None:
        catalog: Catalog | None = None
        try:
            with writing():
                self._file.make_writable()
                catalog = open_catalog(self._path, self._superblock.capacity_bytes)
            noted = catalog.superblock()
            if noted is not None and noted.epoch > self._superblock.epoch:
                self._superblock = noted  # an attempt that came only half way
            self._superblock = begin_epoch(self._file, catalog, self._superblock)
            if self._to_drop:
                catalog.commit((), self._to_drop)
        except BaseException:
            if catalog is not None:
                catalog.close()
            raise
        self.slot_pool.skip_to(self._superblock.first_generation)
        self._to_drop, self._catalog, self._read_only = [], catalog, None
        self._manifest.begin(self._superblock)

    def _take(self, key: bytes, value: bytes) -> tuple[Slot, BlockRecord] | None:
        """Takes the slot of one catalog entry, or None where the entry cannot be."""
        try:
            header = parse_header(value)
        except CorruptBlock:
            return None
        record = header.record
        if record.key != key or header.volume_uid != self._uid:
            return None
        if not self.slot_pool.take(header.slot, header.first_chunk, header.chunks):
            return None
        return header.slot, record

    def _with_good_headers(
        self, batch: list[tuple[Slot, BlockRecord]], bad: list[BlockKey]
    ) -> Iterator[tuple[Slot, BlockRecord]]:
        """Those of a batch whose slot begins with their header; all of it where that is not asked for."""
        if not self._verify_headers:
            yield from batch
            return
        headers = self._file.read_headers([(slot.offset, header_bytes(record.shape.layers)) for slot, record in batch])
        for (slot, record), header in zip(batch, headers, strict=True):
            expected = self._header(slot, record)
            if header is not None and header[: len(expected)] == expected:
                yield slot, record
            else:
                bad.append(record.key)
                self.free([slot])

    def close(self) -> None:
        if self._closed:
            return
        with self._commit_lock:
            self._closed = True
            self._manifest.close()
            self._file.close()
            if self._catalog is not None:
                self._catalog.close()
            self._volume_lock.close()


def _is_at(path: Path, file: os.stat_result) -> bool:
    """Whether a path leads to a file."""
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)
