"""Offline check and repair of a volume, for ``kvstore volumes check --offline`` and ``repair``.

A check changes nothing. It reads every slot in the catalog, compares headers and checksums, and reports entries that overlap,
are outside of the slab or misplaced, and blocks without their parent (*orphans*: unreachable, harmless, evicted in time).

A repair removes bad blocks from the catalog, which frees their slots, and repairs what a volume needs to open:

* a truncated slab is extended to its length; the lost blocks are bad;
* damaged superblocks are restored from the catalog's copy;
* a lost, damaged or foreign catalog is moved aside and rebuilt from the slab. Every slot header has all of its catalog entry, so
  the
  slab is searched at every 4 KiB for headers. A header counts only with the volume's secret uid, at the position that it names,
  with
  a payload that matches all its checksums: a stored payload cannot imitate a block. If two overlap, the newer generation wins.
  The
  rebuilt catalog may have blocks that were evicted and not yet overwritten; they are valid. Blocks that were invalidated stay
  out (``invalid_namespaces``). Pages that cannot be read are reported, and their blocks are left out.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvstore.core import limits
from kvstore.core.errors import CorruptBlock, NotFound, Unavailable
from kvstore.core.types import BlockKey, NodeId, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.tiers.allocator import ALIGNMENT, SlotAllocator
from kvstore.tiers.nvme.catalog import Catalog, Invalid, invalid_namespaces, map_bytes_for, mend_hint
from kvstore.tiers.nvme.ownership import (
    CATALOG_FOLDER,
    SLAB_FILE,
    VolumeAdopted,
    claim_in_force,
    copy_catalog,
    name_at,
    newest_catalog,
    sync_folder,
)
from kvstore.tiers.nvme.slab_io import SlabFile, SlotIO
from kvstore.tiers.nvme.slot_header import MAGIC, SlotHeader, header_bytes, pack_header, parse_header
from kvstore.tiers.nvme.superblock import (
    DATA_START,
    GENERATION_BITS,
    SUPERBLOCK_BYTES,
    Superblock,
    UnknownVersion,
    newest_superblock,
    pack_superblock,
)
from kvstore.tiers.nvme.volume_open import VolumeLock, reserve

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""``progress(done, total)``: blocks of the catalog, or bytes of a scan."""

_BATCH_BYTES = 32 << 20
_SCAN_BYTES = 8 << 20
_LARGEST_HEADER_BYTES = header_bytes(limits.MAX_LAYERS)
_BAD_SECTOR = (errno.EIO, errno.ENODATA, errno.EILSEQ)
"""Errors of a device that cannot read a sector; others are those of a file system that cannot be read now."""


@dataclass(slots=True)
class CheckReport:
    """Results of a check, and of a repair."""

    path: Path
    volume_id: VolumeId
    capacity_bytes: int
    blocks: int = 0
    """Number of checked catalog entries, or of headers found by a scan."""
    good: int = 0
    bytes_read: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Number of invalid blocks, by reason."""
    orphans: int = 0
    """Number of valid blocks whose parent is not in the volume."""
    dropped: int = 0
    """Number of bad blocks removed from the catalog."""
    damage: list[str] = field(default_factory=list)
    """Damage that prevents the volume from opening."""
    mended: list[str] = field(default_factory=list)
    """Repaired damage."""

    @property
    def ok(self) -> bool:
        """Whether nothing bad is left."""
        return sum(self.bad.values()) == self.dropped and len(self.damage) == len(self.mended)


def check_volume(
    path: Path,
    *,
    repair: bool = False,
    progress: Progress | None = None,
    io_threads: int = 4,
    direct: bool = True,
    token: int | None = None,
) -> CheckReport:
    """Check a volume that no process has open.

    Args:
        path: folder of the volume.
        repair: remove bad blocks and repair damage.
        progress: called from time to time.
        io_threads: number of concurrent I/O requests.
        direct: use O_DIRECT if the file system supports it.
        token: of the node that repairs the volume while it adopts it. Then blocks that cannot be read are not removed, because
            no operator has judged whether they are lost.

    Raises:
        NotFound: no volume is in the folder.
        Conflict: a process has the volume open.
        VolumeAdopted: another node has claimed the volume.
        Unavailable: with ``token``, a block, or a page of a slab whose catalog is lost, cannot be read.
        CorruptBlock: neither slab nor catalog identifies the volume.
        UnknownVersion: the volume has another format.
        OSError: an error of the file system.
    """
    if not (path / SLAB_FILE).exists():
        raise NotFound("the folder has no slab of a volume", path=path)
    attended = token is None
    if token is None:
        token = claim_in_force(path, NodeId("")).token
    _check_claim(path, token)
    lock = VolumeLock(path, token)
    try:
        file = SlabFile(path / SLAB_FILE, io_threads=io_threads, direct=direct, writable=repair, counters=Counters())
        try:
            return _Check(path, file, token, repair, progress or _silent, attended=attended).run()
        finally:
            file.close()
    finally:
        lock.close()


def _check_claim(path: Path, token: int) -> None:
    """Raise ``VolumeAdopted`` if a higher token is claimed: the files belong to another node now."""
    found = claim_in_force(path, NodeId(""))
    if found.token != token:
        raise VolumeAdopted(path, None, found.node_id, found.token)


def _silent(_done: int, _total: int) -> None:
    pass


class _Check:
    """One running check."""

    def __init__(self, path: Path, file: SlabFile, token: int, repair: bool, progress: Progress, *, attended: bool) -> None:
        self._path = path
        self._token = token
        self._file = file
        self._repair = repair
        self._attended = attended
        self._progress = progress
        self._bad: Counter[str] = Counter()
        self._unreadable: set[int] = set()
        """Positions of pages that a scan could not read."""

    def run(self) -> CheckReport:
        catalog, catalog_damage = self._open_catalog()
        try:
            superblock, superblock_damage = self._superblock(catalog)
            report = CheckReport(self._path, superblock.volume_id, superblock.capacity_bytes)
            self._report = report
            self._superblock_in_force = superblock
            self._allocator = SlotAllocator(superblock.capacity_bytes, chunk_bytes=superblock.chunk_bytes)
            if superblock_damage:
                self._mend(superblock_damage, "superblock restored from the catalog's copy", self._rewrite_superblock)
            self._check_length()
            if catalog is not None:
                noted = catalog.superblock()
                if noted is None or noted.uid != superblock.uid:
                    catalog.close()
                    catalog, catalog_damage = None, "the catalog belongs to another volume"
            if catalog is not None:
                try:
                    self._check_catalog(catalog)
                except CorruptBlock as error:  # a damaged inner page: rebuild from the slab
                    catalog.close()
                    catalog, catalog_damage = None, str(error)
                    self._begin_again()
            if catalog is None:
                self._rebuild(catalog_damage)
        finally:
            if catalog is not None:
                catalog.close()
        report.bad = dict(self._bad)
        return report

    def _begin_again(self) -> None:
        """Reset the results about blocks."""
        self._bad.clear()
        self._report.blocks = self._report.good = self._report.orphans = self._report.dropped = 0
        superblock = self._superblock_in_force
        self._allocator = SlotAllocator(superblock.capacity_bytes, chunk_bytes=superblock.chunk_bytes)

    def _mend(self, damage: str, remedy: str, action: Callable[[], None]) -> None:
        self._report.damage.append(damage)
        if self._repair:
            _check_claim(self._path, self._token)
            action()
            self._report.mended.append(remedy)
            _log.warning("volume repaired: %s (damage=%s, remedy=%s)", self._path, damage, remedy)

    # ---- superblock and catalog ----
    def _open_catalog(self) -> tuple[Catalog | None, str]:
        newest = newest_catalog(self._path, self._token)
        if newest < 0:
            return None, "the catalog is lost"
        try:
            if self._repair and newest < self._token:  # the volume was adopted, and its catalog was not copied yet
                _check_claim(self._path, self._token)
                copy_catalog(self._path, newest, self._token)
                newest = self._token
            folder = self._path / name_at(CATALOG_FOLDER, newest)
            size = map_bytes_for(os.fstat(self._file.fd).st_size)
            catalog = Catalog(folder, map_bytes=size, readonly=not self._repair)
        except CorruptBlock as error:
            return None, str(error)
        try:
            catalog.superblock()
        except UnknownVersion:
            catalog.close()
            raise
        except CorruptBlock as error:
            catalog.close()
            return None, str(error)
        return catalog, ""

    def _superblock(self, catalog: Catalog | None) -> tuple[Superblock, str]:
        noted = catalog.superblock() if catalog is not None else None
        try:
            current, _ = newest_superblock(self._file.pread(0, 2 * SUPERBLOCK_BYTES))
        except UnknownVersion:
            raise
        except CorruptBlock as error:
            if noted is None:
                raise CorruptBlock(f"neither slab nor catalog identifies the volume: {error.message}", path=self._path) from error
            return noted, f"no good superblock: {error.message}"
        if noted is not None and noted.uid == current.uid and noted.epoch > current.epoch:
            return replace(noted, token=current.token), ""
        return current, ""

    def _rewrite_superblock(self) -> None:
        _check_claim(self._path, self._token)
        page = pack_superblock(self._superblock_in_force)
        self._file.pwrite(0, page)
        self._file.pwrite(SUPERBLOCK_BYTES, page)
        self._file.sync()

    def _check_length(self) -> None:
        expected = self._superblock_in_force.file_bytes
        size = os.fstat(self._file.fd).st_size
        if size < expected:
            self._mend(
                f"the slab is truncated: {size} of {expected} bytes", "length restored", lambda: reserve(self._file.fd, expected)
            )

    # ---- blocks ----
    def _check_catalog(self, catalog: Catalog) -> None:
        bad: list[BlockKey] = []
        good: dict[bytes, bytes | None] = {}
        total = len(catalog)
        for batch in _batches(self._placed(catalog, bad)):
            for header, matches in self._read(batch):
                if matches:
                    good[header.record.key] = header.record.parent
                else:
                    bad.append(header.record.key)
            self._progress(self._report.blocks, total)
        self._count(good)
        if self._repair:
            _check_claim(self._path, self._token)
            catalog.put_superblock(self._superblock_in_force)  # a damaged list of free pages is detected only by a write
            if bad:
                catalog.commit((), bad)
                self._report.dropped = len(bad)

    def _placed(self, catalog: Catalog, bad: list[BlockKey]) -> Iterator[SlotHeader]:
        """Valid entries. Invalid ones are counted in ``bad``."""
        for key, value in catalog.entries():
            self._report.blocks += 1
            header = self._fitting(key, value)
            if header is None:
                bad.append(BlockKey(key))
            else:
                yield header

    def _fitting(self, key: bytes, value: bytes) -> SlotHeader | None:
        try:
            header = parse_header(value)
        except CorruptBlock:
            self._bad["malformed entry"] += 1
            return None
        if header.record.key != key or header.volume_uid != self._superblock_in_force.uid:
            self._bad["foreign entry"] += 1
            return None
        if not self._allocator.take(header.slot, header.first_chunk, header.chunks):
            self._bad["misplaced or overlapping entry"] += 1
            return None
        return header

    def _read(self, headers: list[SlotHeader]) -> list[tuple[SlotHeader, bool]]:
        """Read slots and verify them. Bad ones are counted."""
        memory = memoryview(mmap.mmap(-1, sum(header.slot.size for header in headers)))
        slots: list[SlotIO] = []
        at = 0
        for header in headers:
            record, slot = header.record, header.slot
            payload = memory[at : at + record.shape.block_bytes]
            packed = _repack(header)
            slots.append(SlotIO(slot.offset, slot.size, packed, header_bytes(record.shape.layers), record, payload))
            at += slot.size
        self._file.read(slots, verify=True)
        if any(io.outcome is Outcome.UNAVAILABLE for io in slots):
            self._check_attended()
        results: list[tuple[SlotHeader, bool]] = []
        for header, io in zip(headers, slots, strict=True):
            self._report.bytes_read += header.slot.size
            if io.outcome is Outcome.UNAVAILABLE:
                self._bad["cannot be read"] += 1
            elif io.outcome is not Outcome.HIT:
                self._bad["header or payload differs"] += 1
            results.append((header, io.outcome is Outcome.HIT))
        return results

    def _check_attended(self) -> None:
        """Raise ``Unavailable`` if nobody has judged that what cannot be read now is lost."""
        if self._repair and not self._attended:
            raise Unavailable(
                "blocks of this volume cannot be read now, and a repair would remove them; if they are lost,"
                f" {mend_hint(self._path)}"
            )

    def _count(self, good: dict[bytes, bytes | None]) -> None:
        self._report.good = len(good)
        self._report.orphans = sum(1 for parent in good.values() if parent is not None and parent not in good)

    # ---- without a catalog ----
    def _rebuild(self, damage: str) -> None:
        invalid = invalid_namespaces(self._path, self._superblock_in_force.uid)
        found = sorted(self._scan(), key=lambda header: -header.slot.generation)
        self._report.blocks = len(found)
        good: dict[bytes, bytes | None] = {}
        entries: list[tuple[BlockKey, bytes]] = []
        valid = (
            header for header in found if header.slot.generation >= invalid.get(header.record.namespace, Invalid()).slots_below
        )
        for batch in _batches(valid):
            for header, matches in self._read(batch):
                record = header.record
                if not matches or record.key in good:
                    continue
                if self._allocator.take(header.slot, header.first_chunk, header.chunks):
                    good[record.key] = record.parent
                    entries.append((record.key, _repack(header)))
        self._bad.clear()  # slots of earlier generations are not damage
        self._count(good)
        # both copies of the superblock may be older than the newest slot; a generation must not be used again
        epoch = max([self._superblock_in_force.epoch, *(header.slot.generation >> GENERATION_BITS for header in found)]) + 1
        self._superblock_in_force = replace(self._superblock_in_force, epoch=epoch)
        if self._unreadable:
            self._mend(f"unreadable pages of the slab: {len(self._unreadable)}", "their blocks left out", lambda: None)
        self._mend(damage, f"catalog rebuilt from {len(entries)} slot headers", lambda: self._write_catalog(entries))

    def _scan(self) -> Iterator[SlotHeader]:
        """All headers in the slab with this volume's uid and their own position."""
        uid = self._superblock_in_force.uid
        capacity = self._superblock_in_force.capacity_bytes
        present = (os.fstat(self._file.fd).st_size - DATA_START) // ALIGNMENT * ALIGNMENT
        end = min(capacity, present)  # a check does not extend a truncated slab
        wanted = int.from_bytes(MAGIC, "little")
        for start in range(0, end, _SCAN_BYTES):
            data = self._pages(start, min(_SCAN_BYTES, end - start))
            self._report.bytes_read += len(data)
            self._progress(start + len(data), capacity)
            words = np.frombuffer(data, "<u8", len(data) // 8)[:: ALIGNMENT // 8]
            for page in np.flatnonzero(words == wanted).tolist():
                at = page * ALIGNMENT
                piece = data[at : at + _LARGEST_HEADER_BYTES]
                if len(piece) < _LARGEST_HEADER_BYTES:  # it may continue in the next piece
                    piece = self._pages(start + at, min(_LARGEST_HEADER_BYTES, end - start - at))
                try:
                    header = parse_header(piece)
                except CorruptBlock:
                    continue
                if (
                    header.volume_uid == uid
                    and header.slot.offset == start + at
                    and header.slot.offset + header.slot.size <= capacity
                ):
                    yield header

    def _pages(self, start: int, size: int) -> bytes:
        """Read whole pages of the slab. Those that cannot be read are zeros, and noted.

        Raises:
            Unavailable: no operator attends the repair, and a page cannot be read.
            OSError: another error than that of a bad sector.
        """
        data = self._read_sectors(start, size)
        if len(data) == size:
            return data
        if size > ALIGNMENT:  # an error ends a read of many pages early, or fails all of it
            return b"".join(self._pages(at, ALIGNMENT) for at in range(start, start + size, ALIGNMENT))
        self._check_attended()
        self._unreadable.add(start)
        return bytes(size)

    def _read_sectors(self, start: int, size: int) -> bytes:
        try:
            return self._file.pread(DATA_START + start, size)
        except OSError as error:
            if error.errno not in _BAD_SECTOR:
                raise
            return b""

    def _write_catalog(self, entries: list[tuple[BlockKey, bytes]]) -> None:
        folder = self._path / name_at(CATALOG_FOLDER, self._token)
        if folder.exists():
            number = 0
            while (aside := self._path / f"{folder.name}.damaged.{number}").exists():
                number += 1
            folder.rename(aside)
        folder.mkdir(mode=0o700)
        catalog = Catalog(folder, map_bytes=map_bytes_for(self._superblock_in_force.capacity_bytes))
        try:
            catalog.commit(entries, ())
            catalog.put_superblock(self._superblock_in_force)
        finally:
            catalog.close()
        sync_folder(folder)
        sync_folder(self._path)
        self._rewrite_superblock()


def _batches(headers: Iterator[SlotHeader]) -> Iterator[list[SlotHeader]]:
    """Headers in groups whose slots fit in a bounded amount of memory."""
    batch: list[SlotHeader] = []
    size = 0
    for header in headers:
        if batch and size + header.slot.size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(header)
        size += header.slot.size
    if batch:
        yield batch


def _repack(header: SlotHeader) -> bytes:
    return pack_header(*header)
