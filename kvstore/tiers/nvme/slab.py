"""NVMe slab: a volume in one preallocated file, with a catalog.

A volume is a folder::

    slab.kv    superblock (1 MiB), then slots: [header pages][payload, padded to 4 KiB]
    claim.N    node that has adopted the volume, by token (``kvstore.tiers.nvme.ownership``)
    catalog/   LMDB: block key -> slot header
    lock       flock of the process that has the volume open
    rules      last retention rules of the node (``kvstore.node.control.rules_file``); not used by the volume
    invalid    invalid namespaces (``kvstore.tiers.nvme.catalog``)
    roster     slot manifest for nodes that mount the folder (``kvstore.tiers.nvme.slot_manifest``); derived, a hint

The names of catalog, lock, ``invalid`` and slot manifest end in ``.N`` if their owner's token N is not 0.

Crash safety follows from the order of writes. First slots are written; then ``commit`` syncs the slab; then one synced
transaction changes the catalog; only then may slots of removed blocks be allocated again. After a crash at any point, exactly
the committed blocks are in the volume. A read verifies the slot's header byte for byte and the payload by its checksums.

If a sync of the slab fails, the kernel may have dropped written pages and does not report it again. So the volume stores nothing
more until it is opened again: it is read-only, and only ``commit`` without new blocks still changes the catalog.

Before each commit, and in ``check_files``, the volume checks that slab and catalog are still at its path. If they were removed,
moved or mounted over, it is read-only until they are back.

There, before each batch of slots and after each commit, it also checks that no other node has adopted it. If one has, it is
read-only for good.

If the file system accepts no writes when the volume is opened, it is *read-only*: it allocates and removes nothing, but can be
read, until ``resume`` succeeds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.core import limits
from kvstore.core.errors import CorruptBlock, Internal, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, NodeId, Outcome, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.nvme.catalog import INVALID_FILE, Catalog, Invalid, note_invalid
from kvstore.tiers.nvme.ownership import (
    SLAB_FILE,
    Claim,
    Owner,
    Step,
    VolumeAdopted,
    VolumeObservation,
    claim_in_force,
    home_of,
    is_claimed,
    name_at,
    next_step,
    remove_old_files,
)
from kvstore.tiers.nvme.sealed_slot import SealedSlotIO
from kvstore.tiers.nvme.slab_io import IoChoice, SlotIO
from kvstore.tiers.nvme.slot_header import check_shape, header_bytes, pack_header, parse_header, place_in, slot_bytes
from kvstore.tiers.nvme.slot_manifest import SlotManifestWriter
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock, newest_superblock
from kvstore.tiers.nvme.volume_open import (
    CannotWriteError,
    OpenParts,
    VolumeLock,
    begin_epoch,
    make_volume,
    open_catalog,
    open_parts,
    owned_claim,
    publish_token,
    writing,
)
from kvstore.tiers.slot_pool import PooledVolume, SlotPool

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

_RECOVERY_BATCH = 1024


class NvmeSlab(PooledVolume, DurableVolume):
    """A durable volume on a local file system, created by ``open``. Thread-safe."""

    def __init__(
        self, path: Path, lock: VolumeLock, claim: Claim, parts: OpenParts, *, verify_headers: bool, counters: Counters
    ) -> None:
        superblock = parts.superblock
        self._claim = claim
        self._adopted_by: NodeId | None = None
        self._ownership_lock = threading.Lock()
        self.volume_id = superblock.volume_id
        self.tier = Tier.NVME
        self._path = path
        self._volume_lock = lock
        self._file = parts.file
        self._catalog: Catalog | None = parts.catalog  # None: closed, while read-only after recovery
        self._read_only = parts.read_only
        self._superblock = superblock
        self._uid = superblock.uid
        self._invalid = parts.invalid
        self._verify_headers = verify_headers
        self._counters = counters
        self.slot_pool = SlotPool(
            superblock.capacity_bytes, chunk_bytes=superblock.chunk_bytes, first_generation=superblock.first_generation
        )
        self._commit_lock = threading.Lock()
        self._manifest = SlotManifestWriter(path, superblock, self._listed, counters)
        self._to_drop: list[BlockKey] = []
        self._recovered = False
        self._stores_nothing: str | None = None
        """Why no commit can store blocks until the volume is opened again. Removals are still committed."""
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
        node_id: NodeId | None = None,
        io_threads: int = 4,
        direct: bool = True,
        verify_headers: bool = False,
        counters: Counters | None = None,
    ) -> NvmeSlab:
        """Open a volume. Create it if the folder is missing or empty.

        On a file system that accepts no writes (full, read-only, failing), an existing volume is opened read-only, with its
        current capacity.

        Args:
            path: folder of the volume.
            volume_id: name of the volume; must be the one that it was created with.
            capacity_bytes: space for slots. The volume grows if it had less. 0: the present one.
            node_id: node that opens it; None: the node that the volume is named after.
            io_threads: number of concurrent I/O requests.
            direct: use O_DIRECT if the file system supports it (see ``io_engine``).
            verify_headers: ``recover`` reads every slot's header (one I/O per block) and drops blocks whose header differs.
            counters: counts fallbacks and failures.

        Raises:
            Conflict: another process has the volume open, or the folder has another volume.
            VolumeAdopted: another node owns the volume.
            InvalidArgument: the capacity is less than before or too large for the address space, or an argument is invalid.
            CorruptBlock: superblock, slab or catalog is damaged or lost, or the file of invalid namespaces is damaged; the
                message says how to repair it.
            CapacityExceeded: not enough space to create or enlarge the volume.
            Unavailable: the catalog cannot be opened.
            OSError: another error of the file system.
        """
        counters = counters or Counters()
        capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        new = not (path / SLAB_FILE).exists()
        if (capacity_bytes < ALIGNMENT and (new or capacity_bytes)) or not 0 < len(volume_id.encode()) <= limits.MAX_NAME_BYTES:
            raise InvalidArgument("a volume must have a name and at least one page of 4096 bytes", capacity_bytes=capacity_bytes)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        claim = owned_claim(path, volume_id, node_id or home_of(volume_id))
        lock = VolumeLock(path, claim.token)
        try:
            if not (path / SLAB_FILE).exists():
                make_volume(path, volume_id, capacity_bytes, claim)
            parts = open_parts(path, volume_id, capacity_bytes, IoChoice(io_threads, direct=direct), counters, claim)
        except BaseException:
            lock.close()
            raise
        superblock = parts.superblock
        if parts.read_only is None:
            remove_old_files(path, claim.token)
        _log.info(
            "volume opened: %s (path=%s, mib=%d, engine=%s, epoch=%d, token=%d)",
            volume_id, path, superblock.capacity_bytes >> 20, parts.file.engine, superblock.epoch, claim.token,
        )  # fmt: skip
        return cls(path, lock, claim, parts, verify_headers=verify_headers, counters=counters)

    @property
    def path(self) -> Path:
        """Folder of the volume."""
        return self._path

    @property
    def token(self) -> int:
        """Token of its owner, this node."""
        return self._claim.token

    @property
    def io_engine(self) -> str:
        return self._file.engine if self.read_only is None else f"{self._file.engine}, read-only ({self.read_only})"

    @property
    def uid(self) -> bytes:
        """16 random bytes of its creation."""
        return self._uid

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is in use."""
        return self._file.direct

    @property
    def read_only(self) -> str | None:
        return self._read_only or self._stores_nothing

    @property
    def files_present(self) -> bool:
        return not self._gone

    @property
    def answered_s(self) -> float:
        return self._file.answered_s

    @property
    def adopted_by(self) -> NodeId | None:
        return self._adopted_by

    def _owned(self) -> bool:
        """Whether this node still owns the volume. If not, the volume becomes read-only for good.

        Raises:
            Unavailable: the claims cannot be read.
        """
        with self._ownership_lock:
            if self._adopted_by is not None:
                return False
            held = self._claim.token
            try:
                claimed = held + 1 if is_claimed(self._path, held + 1) else held
            except OSError as error:
                self._counters.add(volumes_metrics.FENCING_CHECKS_FAILED)
                raise Unavailable("claims of this volume cannot be read", volume_id=self.volume_id, reason=error) from error
            newest = self._published()
            step = next_step(VolumeObservation(Owner.SELF, claimed, newest.token, held, held))
            if step is Step.RESTORE:
                step = self._restore_token(newest)
            if step is Step.DROP:
                self._become_adopted()
            return step is not Step.DROP

    def _published(self) -> Superblock:
        """The superblock in the slab; the last known one if it cannot be read. Then the claims alone fence this node."""
        try:
            return newest_superblock(self._file.pread(0, 2 * SUPERBLOCK_BYTES))[0]
        except (OSError, CorruptBlock) as error:
            self._counters.add(volumes_metrics.NVME_READ_ERRORS)
            _limited.warning("superblock not read: %s (error=%s)", self.volume_id, error)
            return self._superblock

    def _restore_token(self, newest: Superblock) -> Step:
        """Publish this owner's token again. Returns the step after that."""
        self._counters.add(volumes_metrics.FENCING_TOKENS_RESTORED)
        _log.warning("volume token restored: %s (found=%d, token=%d)", self.volume_id, newest.token, self._claim.token)
        try:
            publish_token(self._path, self._file, self._superblock, self._claim.token)
        except CannotWriteError as error:
            self._sync_failed(error)  # the kernel reports lost pages of blocks once
            self._counters.add(volumes_metrics.FENCING_CHECKS_FAILED)
            raise Unavailable("the token of this volume cannot be written", volume_id=self.volume_id, reason=error) from error
        except VolumeAdopted:
            return Step.DROP
        return Step.KEEP

    def _become_adopted(self) -> None:
        try:
            by = claim_in_force(self._path, self._claim.node_id)
        except OSError:
            by = Claim(-1, NodeId("unknown"))
        self._adopted_by = by.node_id
        self._read_only = f"node {by.node_id} has adopted it (token {by.token}, ours {self._claim.token})"
        self._counters.add(volumes_metrics.FENCED_VOLUMES)
        _log.error(
            "volume fenced: %s (path=%s, adopted_by=%s, token=%d, ours=%d); this node writes to it no more",
            self.volume_id, self._path, by.node_id, by.token, self._claim.token,
        )  # fmt: skip

    def check_files(self) -> bool:
        try:
            if not self._owned():
                return True  # its new owner may remove files
        except KVStoreError as error:
            _limited.warning("volume owner not checked: %s (error=%s)", self.volume_id, error)
        found = all(_is_at(path, file) for path, file in self._places)
        if found or self._gone:
            return found
        with self._commit_lock:
            self._lose()
        return False

    def _lose(self) -> None:
        """Become read-only because the files are not at their path. The caller holds the commit lock."""
        if self._gone or self._closed:
            return
        self._gone = True
        self._read_only = self._read_only or f"its files are no longer in {self._path}: removed, moved or mounted over"
        self._counters.add(volumes_metrics.NVME_FILES_GONE)
        _log.error(
            "volume files missing: %s (path=%s); they were removed, moved or mounted over. Its blocks are lost when this process "
            "ends, and it stores no more; put the files back, or restart the node to begin with an empty volume",
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
        return None if self.read_only is not None else super().allocate(shape, count)

    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        check_shape(shape)
        # a read-only volume would lose blocks for blocks that it cannot store
        return None if self.read_only is not None else super().plan_eviction(shape, count, coldest, limit)

    def coldest_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        check_shape(shape)
        return iter(()) if self.read_only is not None else super().coldest_spans(shape, cold)

    # ---- bytes ----
    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        if reason := self.read_only or self._why_not_written():
            return [self._refusal(reason)] * len(items)
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
                continue  # freed or allocated to another block since: ``Volume.read``
            slots.append(self._slot_io(slot, record, payload))
            places.append(place)
        self._file.read(slots, verify=verify)
        for place, io in zip(places, slots, strict=True):
            answers[place] = (io.outcome, io.record.checksums)
        return answers

    @staticmethod
    def _check_checksums(record: BlockRecord) -> None:
        if record.seal is not None:
            raise Internal("a block to write has no checksums", key=record.key.hex())

    def _slot_io(self, slot: Slot, record: BlockRecord, payload: memoryview) -> SlotIO:
        shape = record.shape
        if payload.nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
            raise InvalidArgument(
                "a payload must be one full block and fit its slot", bytes=payload.nbytes, expected=shape.block_bytes
            )
        if not self.slot_pool.holds(slot):
            raise Internal("the slot is not allocated", slot=slot)
        if payload.format != "B" or payload.ndim != 1:
            payload = payload.cast("B")
        return self._place_io(slot, record, payload)

    def _place_io(self, slot: Slot, record: BlockRecord, payload: memoryview) -> SlotIO:
        space = header_bytes(record.shape.layers)
        if record.seal is not None:
            return SealedSlotIO(self._uid, slot, self.slot_pool.span_at(slot.offset), space, record, payload)
        return SlotIO(slot.offset, slot.size, self._header(slot, record), space, record, payload)

    def _header(self, slot: Slot, record: BlockRecord) -> bytes:
        first_chunk, chunks = self.slot_pool.span_at(slot.offset)
        return pack_header(self._uid, slot, first_chunk, chunks, record)

    # ---- durability ----
    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        entries: list[tuple[BlockKey, bytes]] = []
        for slot, record in stored:
            if not self.slot_pool.holds(slot):
                raise Internal("the slot of a committed block is not allocated", slot=slot)
            entries.append((record.key, self._header(slot, record)))
        with self._commit_lock:
            self._commit(entries, [(record.key, slot) for slot, record in stored], removed)

    def remove_replicas(self, replicas: Sequence[tuple[BlockKey, Slot]]) -> None:
        with self._commit_lock:
            header_of = self._open_catalog().header
            self._commit([], [], [key for key, slot in replicas if (found := header_of(key)) and place_in(found) == slot])

    @property
    def next_generation(self) -> int:
        return self.slot_pool.next_generation

    def note_invalid(self, namespace: NamespaceId, generation: int | None = None) -> None:
        with self._commit_lock:
            self._open_catalog()  # a volume that was opened read-only does not know its newest generation
            path = self._path / name_at(INVALID_FILE, self._claim.token)
            now = self.next_generation
            note_invalid(path, self._uid, namespace, Invalid(now if generation is None else generation, now))

    def _open_catalog(self) -> Catalog:
        if self._catalog is None or self._read_only is not None:
            raise self._refusal(self._read_only or "closed")
        return self._catalog

    def _commit(
        self, entries: Sequence[tuple[BlockKey, bytes]], stored: Sequence[tuple[BlockKey, Slot]], removed: Sequence[BlockKey]
    ) -> None:
        catalog = self._open_catalog()
        if entries:
            self._sync()
        if not all(_is_at(path, file) for path, file in self._places):
            self._check_owned()  # a new owner removes the catalog of the old one
            self._lose()
            raise self._refusal(self._read_only or "its files are gone")
        catalog.commit(entries, removed)
        self._check_owned_after_commit(stores=bool(entries))
        self._manifest.append(stored, removed)

    def _listed(self) -> Iterator[list[tuple[BlockKey, Slot]]]:
        """Entries of the catalog for the slot manifest, in pages. The caller holds the commit lock whenever it takes one."""
        if self._catalog is not None:
            for page in self._catalog.pages():
                yield [(BlockKey(key), place_in(header)) for key, header in page]

    def _why_not_written(self) -> str | None:
        """Why this node may not write because of the volume's owner; None: it may."""
        try:
            if self._owned():
                return None
        except Unavailable as error:
            return str(error)
        self._counters.add(volumes_metrics.FENCED_WRITES_REFUSED)
        return self._read_only or "another node has adopted it"

    def _check_owned(self) -> None:
        if reason := self._why_not_written():
            raise self._refusal(reason)

    def _check_owned_after_commit(self, *, stores: bool) -> None:
        """Check that a new owner, if there will be one, copies a commit that has just ended.

        If the owner is unknown, a commit that only removes counts: the freed slots are written only after a later check.
        """
        try:
            self._check_owned()
        except Unavailable:
            if self._adopted_by is not None:
                raise
            if stores:  # the catalog names slots that callers free now: nothing may be committed on top
                self._stores_nothing = "its owner was unknown after a commit; restart the node to store blocks again"
                _log.error("volume became read-only: %s (reason=%s)", self.volume_id, self._stores_nothing)
                raise

    def _refusal(self, reason: str) -> Unavailable:
        return Unavailable("this volume is read-only", volume_id=self.volume_id, reason=reason)

    def _sync(self) -> None:
        if self._stores_nothing is not None:
            raise self._refusal(self._stores_nothing)
        try:
            self._file.sync()
        except OSError as error:
            self._sync_failed(error)
            raise

    def _sync_failed(self, error: Exception) -> None:
        self._stores_nothing = "a sync of its slab failed; restart the node to store blocks again"
        self._counters.add(volumes_metrics.NVME_SYNC_ERRORS)
        _log.error(
            "volume sync failed: %s (error=%s); the volume is read-only until it is opened again",
            self.volume_id, error, exc_info=error,
        )  # fmt: skip

    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        if self._recovered:
            raise Internal("recover must be called once, right after open")
        assert self._catalog is not None  # open until recover ends
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
            _log.warning("invalid catalog entries dropped: %s (entries=%d)", self.volume_id, len(bad))
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
        """Remove invalid entries from the catalog. Their slots must not be allocated before that."""
        try:
            with writing():
                if self._to_drop:
                    catalog.commit((), self._to_drop)
                self._to_drop = []
        except CannotWriteError as error:
            self._read_only = str(error)
            self._counters.add(volumes_metrics.NVME_OPENED_READ_ONLY)
            _log.warning("volume became read-only: %s (reason=%s)", self.volume_id, error)

    def resume(self) -> bool:
        with self._commit_lock:
            if self.read_only is None:
                return True
            if self._closed or not self._recovered or self._adopted_by is not None:
                return False
            if self._gone:
                if not all(_is_at(path, file) for path, file in self._places):
                    return False
                self._gone = False
                if self._stores_nothing is not None:
                    self._read_only = None  # that of the lost files
            if self._stores_nothing is not None:
                return False
            try:
                if not self._owned():
                    return False
                if self._catalog is None:  # an open catalog is up to date
                    self._begin_writing()
                self._read_only = None
            except (CannotWriteError, KVStoreError, OSError) as error:
                if str(error) != self._read_only:
                    self._read_only = str(error)
                    _log.warning("volume stays read-only: %s (reason=%s)", self.volume_id, error)
                return False
        self._counters.add(volumes_metrics.NVME_RESUMED)
        _log.warning("volume became writable: %s", self.volume_id)
        return True

    def _begin_writing(self) -> None:
        catalog: Catalog | None = None
        try:
            with writing():
                self._file.make_writable()
                catalog = open_catalog(self._path, self._superblock.capacity_bytes, self._claim.token)
            noted = catalog.superblock()
            if noted is not None and noted.epoch > self._superblock.epoch:
                self._superblock = replace(noted, token=self._claim.token)  # an earlier attempt failed after this step
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
        """Allocate the slot of one catalog entry; None: the entry is invalid."""
        try:
            header = parse_header(value)
        except CorruptBlock:
            return None
        record = header.record
        if record.key != key or header.volume_uid != self._uid:
            return None
        if header.slot.generation < self._invalid.get(record.namespace, Invalid()).entries_below:
            return None
        if not self.slot_pool.take(header.slot, header.first_chunk, header.chunks):
            return None
        return header.slot, record

    def _with_good_headers(
        self, batch: list[tuple[Slot, BlockRecord]], bad: list[BlockKey]
    ) -> Iterator[tuple[Slot, BlockRecord]]:
        """Blocks of a batch whose slot has the expected header; all blocks without ``verify_headers``."""
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
    """Whether the file is at the path."""
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)
