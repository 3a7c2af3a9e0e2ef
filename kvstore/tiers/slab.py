"""NVMe slab: a volume in one preallocated file, with a catalog beside it.

A volume is a folder::

    slab.kv    superblock (1 MiB), then slots: [header pages][payload, padded to 4 KiB]
    catalog/   LMDB: block key -> slot header
    lock       held (flock) by the one process that has the volume open

Order of things, which is all of crash safety: slots are written; ``commit`` syncs the slab, then changes the catalog in one
synced transaction; slots of removed blocks are given out again only after that. A crash at any point leaves every block whose
commit had returned, and nothing else visible. Nothing is trusted on the way back: a read compares the header with the one that
was asked for, byte for byte, and the payload with its checksums.

If syncing the slab ever fails, the kernel may have thrown written pages away and will not say so again; so from then on this
opening stores nothing more (reads and removals go on). Opening the volume anew begins anew.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Conflict, CorruptBlock, Internal, InvalidArgument, NotFound, Unavailable
from kvstore.core.types import BlockKey, BlockShape, Outcome, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.tiers.allocator import ALIGNMENT, SlotAllocator, chunk_bytes_for
from kvstore.tiers.catalog import CATALOG_FILE, Catalog, map_bytes_for, mend_hint
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot, VolumeUsage
from kvstore.tiers.header import check_shape, header_bytes, pack_header, parse_header, slot_bytes
from kvstore.tiers.slab_io import SlabFile, SlotIO
from kvstore.tiers.superblock import DATA_START, SUPERBLOCK_BYTES, Superblock, newest_superblock, pack_superblock

_log = logging.getLogger(__name__)

SLAB_FILE = "slab.kv"
CATALOG_FOLDER = "catalog"
LOCK_FILE = "lock"
_RECOVERY_BATCH = 1024


class VolumeLock:
    """The right of one process to use a volume. Let go of when the process ends, however it ends.

    Raises:
        Conflict: another process has the volume open.
        NotFound: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise NotFound("no volume here", path=path) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise Conflict("another process has this volume open", path=path) from error

    def close(self) -> None:
        """Lets go of the volume."""
        os.close(self._fd)


class NvmeSlab(DurableVolume):
    """A durable volume on a local file system. Made by ``open``. Thread-safe."""

    def __init__(
        self,
        lock: VolumeLock,
        file: SlabFile,
        catalog: Catalog,
        superblock: Superblock,
        *,
        verify_headers: bool,
        counters: Counters,
    ) -> None:
        self.volume_id = superblock.volume_id
        self.tier = Tier.NVME
        self._volume_lock = lock
        self._file = file
        self._catalog = catalog
        self._uid = superblock.uid
        self._verify_headers = verify_headers
        self._counters = counters
        self._allocator = SlotAllocator(
            superblock.capacity_bytes, chunk_bytes=superblock.chunk_bytes, first_generation=superblock.first_generation
        )
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._recovered = False
        self._sync_failed = False
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
    ) -> NvmeSlab:
        """Opens a volume, and makes it where the folder is missing or empty.

        Args:
            path: folder of the volume.
            volume_id: its name; must be the one that it was made with.
            capacity_bytes: room for slots. More than before: the volume grows.
            io_threads: I/O requests under way at once.
            direct: use O_DIRECT where it works (``io_engine`` says what is in use).
            verify_headers: ``recover`` reads every slot's header and drops those that differ (an I/O a block).
            counters: where fallbacks and failures are counted.

        Raises:
            Conflict: another process has it open, or it is another volume.
            InvalidArgument: it was larger before, or the arguments are out of bounds.
            CorruptBlock: superblock, slab or catalog is damaged or lost; the message names the command that mends it.
            CapacityExceeded: the file system has no room for it.
            OSError: anything else that the file system says.
        """
        counters = counters or Counters()
        capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        if capacity_bytes < ALIGNMENT or not 0 < len(volume_id.encode()) <= limits.MAX_NAME_BYTES:
            raise InvalidArgument("a volume takes a name and at least one page of 4096 bytes", capacity_bytes=capacity_bytes)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = VolumeLock(path)
        file: SlabFile | None = None
        catalog: Catalog | None = None
        try:
            if not (path / SLAB_FILE).exists():
                _make_volume(path, volume_id, capacity_bytes)
            file = SlabFile(path / SLAB_FILE, io_threads=io_threads, direct=direct, writable=True, counters=counters)
            catalog = _open_catalog(path, capacity_bytes)
            superblock = _next_epoch(path, file, catalog, volume_id, capacity_bytes)
        except BaseException:
            if catalog is not None:
                catalog.close()
            if file is not None:
                file.close()
            lock.close()
            raise
        _log.info("volume %s at %s: %d MiB, %s, epoch %d", volume_id, path, capacity_bytes >> 20, file.engine, superblock.epoch)
        return cls(lock, file, catalog, superblock, verify_headers=verify_headers, counters=counters)

    @property
    def io_engine(self) -> str:
        return self._file.engine

    # ---- room ----
    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        check_shape(shape)
        with self._lock:
            if not self._recovered:
                raise Internal("a durable volume was asked for room before recover() was used up: it could give out slots in use")
            return self._allocator.allocate(slot_bytes(shape), count)

    def free(self, slots: Sequence[Slot]) -> None:
        with self._lock:
            self._allocator.free(slots)

    def room_plan(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        check_shape(shape)
        with self._lock:
            return self._allocator.room_plan(slot_bytes(shape), count, coldest, limit)

    def usage(self) -> VolumeUsage:
        with self._lock:
            return VolumeUsage(self._allocator.capacity_bytes, self._allocator.used_bytes, self._allocator.slots_used)

    # ---- bytes ----
    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        results: list[Exception | None] = [None] * len(items)
        slots: list[SlotIO] = []
        places: list[int] = []
        for place, (slot, record, payload) in enumerate(items):
            try:
                slots.append(self._slot_io(slot, record, payload))
                places.append(place)
            except (InvalidArgument, Internal) as error:
                results[place] = error
        self._file.write(slots)
        for place, io in zip(places, slots, strict=True):
            results[place] = io.error
        return results

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        outcomes = [Outcome.CORRUPT] * len(items)
        slots: list[SlotIO] = []
        places: list[int] = []
        for place, (slot, record, payload) in enumerate(items):
            if not self._allocator.holds(slot):
                continue  # given to another block since: whatever lies there is not what was asked for
            slots.append(self._slot_io(slot, record, payload))
            places.append(place)
        self._file.read(slots, verify=verify)
        for place, io in zip(places, slots, strict=True):
            outcomes[place] = io.outcome
        return outcomes

    def _slot_io(self, slot: Slot, record: BlockRecord, payload: memoryview) -> SlotIO:
        shape = record.shape
        if payload.nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
            raise InvalidArgument(
                "a payload is one Full Block and fits its slot", bytes=payload.nbytes, expected=shape.block_bytes
            )
        if not self._allocator.holds(slot):
            raise Internal("a slot is used that is not held", slot=slot)
        if payload.format != "B" or payload.ndim != 1:
            payload = payload.cast("B")
        return SlotIO(slot.offset, slot.size, self._header(slot, record), header_bytes(shape.layers), record, payload)

    def _header(self, slot: Slot, record: BlockRecord) -> bytes:
        first_chunk, chunks = self._allocator.span_at(slot.offset)
        return pack_header(self._uid, slot, first_chunk, chunks, record)

    # ---- durability ----
    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        entries: list[tuple[BlockKey, bytes]] = []
        for slot, record in stored:
            if not self._allocator.holds(slot):
                raise Internal("a block is committed in a slot that is not held", slot=slot)
            entries.append((record.key, self._header(slot, record)))
        with self._commit_lock:
            if entries:
                self._sync()
            self._catalog.commit(entries, removed)

    def _sync(self) -> None:
        if self._sync_failed:
            raise Unavailable(
                "syncing this volume failed before: it stores nothing until it is opened anew", volume_id=self.volume_id
            )
        try:
            self._file.sync()
        except OSError as error:
            self._sync_failed = True
            self._counters.add("nvme_sync_errors_total")
            _log.exception(
                "volume %s: sync failed (%s): nothing more is stored until it is opened anew", self.volume_id, error.strerror
            )
            raise

    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        if self._recovered:
            raise Internal("a volume is recovered once, right after opening")
        bad: list[BlockKey] = []
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
            self._counters.add("nvme_recovery_dropped_total", len(bad))
            _log.warning("volume %s: dropped %d catalog entries that cannot be", self.volume_id, len(bad))
            self._catalog.commit((), bad)
        with self._lock:
            self._recovered = True

    def _take(self, key: bytes, value: bytes) -> tuple[Slot, BlockRecord] | None:
        """Takes the slot of one catalog entry, or None where the entry cannot be."""
        try:
            header = parse_header(value)
        except CorruptBlock:
            return None
        record = header.record
        if record.key != key or header.volume_uid != self._uid:
            return None
        with self._lock:
            if not self._allocator.take(header.slot, header.first_chunk, header.chunks):
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
        self._closed = True
        self._file.close()
        self._catalog.close()
        self._volume_lock.close()


def _make_volume(path: Path, volume_id: VolumeId, capacity_bytes: int) -> None:
    """Makes an empty volume. The slab's name appears last: until then a crash leaves nothing that looks like a volume.

    Raises:
        CorruptBlock: a catalog with blocks is there, but its slab is lost.
        CapacityExceeded: the file system has no room.
    """
    superblock = Superblock(secrets.token_bytes(16), volume_id, capacity_bytes, chunk_bytes_for(capacity_bytes), 0)
    catalog_path = path / CATALOG_FOLDER
    catalog_path.mkdir(exist_ok=True, mode=0o700)
    catalog = Catalog(catalog_path, map_bytes=map_bytes_for(capacity_bytes))
    try:
        if len(catalog):
            raise CorruptBlock(
                f"the slab of this volume is lost, but its catalog is there; move {catalog_path} away to begin anew"
            )
        catalog.put_superblock(superblock, anew=True)
    finally:
        catalog.close()
    temporary = path / f"{SLAB_FILE}.new"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        reserve(fd, superblock.file_bytes)
        os.pwrite(fd, pack_superblock(superblock), 0)
        os.fsync(fd)
        temporary.rename(path / SLAB_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    _sync_folder(path)


def reserve(fd: int, size: int) -> None:
    """Preallocates: later writes then need no new extents, cannot meet a full disk, and are twice as fast."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise CapacityExceeded("the file system has no room for this volume", bytes=size, reason=error.strerror) from error
        raise


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_catalog(path: Path, capacity_bytes: int) -> Catalog:
    if not (path / CATALOG_FOLDER / CATALOG_FILE).exists():
        raise CorruptBlock(f"the catalog of this volume is lost; {mend_hint(path)}")
    try:
        return Catalog(path / CATALOG_FOLDER, map_bytes=map_bytes_for(capacity_bytes))
    except CorruptBlock as error:
        raise CorruptBlock(f"{error}; {mend_hint(path)}") from error


def _next_epoch(path: Path, file: SlabFile, catalog: Catalog, volume_id: VolumeId, capacity_bytes: int) -> Superblock:
    """Checks an existing slab, grows its file where asked, and begins the next epoch on disk: both places, synced."""
    try:
        current, next_at = newest_superblock(file.pread(0, 2 * SUPERBLOCK_BYTES))
    except CorruptBlock as error:
        raise CorruptBlock(
            f"{path / SLAB_FILE} has no good superblock ({error.message}); if it is a volume, {mend_hint(path)}"
        ) from error
    if current.volume_id != volume_id:
        raise Conflict("this is another volume", path=path, found=current.volume_id, expected=volume_id)
    noted = catalog.superblock()
    if noted is None or noted.uid != current.uid:
        raise CorruptBlock(f"the catalog here belongs to another volume; {mend_hint(path)}")
    if noted.epoch > current.epoch:
        current = noted  # the newer copy in the slab was damaged: its epoch must not come back
    if capacity_bytes < current.capacity_bytes:
        raise InvalidArgument(
            "a volume does not shrink: give it at least the capacity that it has, or make a new one",
            path=path, capacity_bytes=capacity_bytes, has=current.capacity_bytes,
        )  # fmt: skip
    size = os.fstat(file.fd).st_size
    if size < current.file_bytes:
        raise CorruptBlock(f"{path / SLAB_FILE} was cut off ({size} of {current.file_bytes} bytes); {mend_hint(path)}")
    if capacity_bytes > current.capacity_bytes:
        reserve(file.fd, DATA_START + capacity_bytes)
        os.fsync(file.fd)
        _log.info("volume %s grows from %d to %d MiB", volume_id, current.capacity_bytes >> 20, capacity_bytes >> 20)
    following = replace(current, capacity_bytes=capacity_bytes, epoch=current.epoch + 1)
    catalog.put_superblock(following)
    file.pwrite(next_at, pack_superblock(following))
    file.sync()
    return following
