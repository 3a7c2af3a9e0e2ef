"""A volume of another node, read through a mount of its folder (3FS, CephFS, Lustre, or a plain directory).

The owner is not involved and may be down. The volume's *slot manifest* has the slot of each block. The slot is read completely,
and is a hit only if its header has the expected volume, namespace, key, position and generation, and if the payload matches the
checksum of every layer block in the header. The owner may evict and rewrite a slot at any time; then the read finds another
block's header, or wrong checksums. Both are a miss, counted as *stale*.

Nothing is written or locked. With O_DIRECT, reads bypass this host's page cache. Engines mount volumes of their own node in this
way, to read blocks into device memory without the arena. The node sends them the slots, so they read only the manifest's head.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.core import checksum
from kvstore.core.errors import Conflict, CorruptBlock, InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.nvme.ownership import SLAB_FILE, read_superblock
from kvstore.tiers.nvme.slab_io import NOTHING, IoChoice, SlotIO
from kvstore.tiers.nvme.slot_header import FIXED_BYTES, check_shape, header_bytes, parse_header, slot_bytes
from kvstore.tiers.nvme.slot_manifest import SlotManifestReader

_log = logging.getLogger(__name__)


class _WantedSlot(SlotIO):
    """A slot with a known position and block. Its header must prove the rest."""

    __slots__ = ("generation", "volume_uid")

    def __init__(self, volume_uid: bytes, slot: Slot, wanted: BlockRecord, payload: memoryview) -> None:
        layers = wanted.shape.layers
        super().__init__(slot.offset, slot.size, bytes(FIXED_BYTES + 8 * layers), header_bytes(layers), wanted, payload)
        self.volume_uid = volume_uid
        self.generation = slot.generation

    def judge(self, header: memoryview, *, verify: bool) -> Outcome:
        try:
            found = parse_header(header)
        except CorruptBlock:
            return Outcome.MISS
        record, wanted = found.record, self.record
        same = (
            found.volume_uid == self.volume_uid
            and found.slot == (self.offset, self.size, self.generation)
            and (record.namespace, record.key, record.shape) == (wanted.namespace, wanted.key, wanted.shape)
        )
        if not same or (verify and not checksum.verify(self.payload, record.shape, record.checksums)):
            return Outcome.MISS
        self.record = record
        return Outcome.HIT


class MountedSlab:
    """Reader of a shared volume. Thread-safe. Every method except ``find`` may block as long as the file system does.

    Args:
        path: folder of the volume, as mounted here.
        volume_id: expected volume.
        io_threads: number of concurrent I/O requests.
        direct: use O_DIRECT if the file system supports it.
        counters: counts failures.
        gds: kvikio, for reads into device memory; None: these go through host memory.
        gds_required: fail if kvikio cannot open the volume.
        reads_manifest: False: do not read the manifest's entries; ``find`` returns nothing.

    Raises:
        Conflict: the folder has another volume.
        CorruptBlock: the slot manifest is damaged.
        OSError: the volume does not exist, or cannot be read.
        Unsupported: ``gds_required``, and kvikio cannot open the volume.
    """

    def __init__(
        self,
        path: Path,
        volume_id: VolumeId,
        *,
        io_threads: int = 4,
        direct: bool = True,
        counters: Counters | None = None,
        gds: Kvikio | None = None,
        gds_required: bool = False,
        reads_manifest: bool = True,
    ) -> None:
        self.volume_id = volume_id
        self._path = path
        self._counters = counters or Counters()
        self._reads_manifest = reads_manifest
        self._manifest = SlotManifestReader(path, read_superblock(path).token, entries=reads_manifest)
        self._turn = threading.Lock()
        self._uid = b""
        self._catch_up()
        choice = IoChoice(io_threads, direct, gds, gds_required)
        self._file = choice.open(path / SLAB_FILE, writable=False, counters=self._counters)
        known = f"{len(self._manifest.slots)} blocks, " if reads_manifest else ""
        _log.info("volume mounted: %s (path=%s, %s%s)", volume_id, path, known, self._file.engine)

    @property
    def io_engine(self) -> str:
        """The I/O engine in use."""
        return self._file.engine

    @property
    def answered_s(self) -> float:
        """Time of the last completed I/O request by ``CLOCK_MONOTONIC``."""
        return self._file.answered_s

    @property
    def blocks(self) -> int:
        """Number of blocks in the slot manifest."""
        return len(self._manifest.slots)

    def catch_up(self) -> None:
        """Read the manifest's new entries.

        Raises:
            Conflict: the folder now has another volume; open it again.
            CorruptBlock: the slot manifest is damaged.
            OSError: the manifest cannot be read.
        """
        with self._turn:
            self._catch_up()

    def _catch_up(self) -> None:
        token = read_superblock(self._path).token
        if token == self._manifest.token:
            self._manifest.catch_up()
        else:
            following = SlotManifestReader(self._path, token, entries=self._reads_manifest)
            with suppress(FileNotFoundError):  # the new owner has not opened the volume yet: the old slots can still be read
                following.catch_up()
                _log.info("volume has a new owner: %s (token=%d -> %d)", self.volume_id, self._manifest.token, token)
                self._manifest = following
        superblock = self._manifest.superblock
        assert superblock is not None  # set by catch_up
        if superblock.volume_id != self.volume_id or superblock.uid != (self._uid or superblock.uid):
            raise Conflict(
                "the folder now has another volume", path=self._path, expected=self.volume_id, found=superblock.volume_id
            )
        self._uid = superblock.uid

    def find(self, keys: Sequence[BlockKey], shape: BlockShape) -> list[Slot | None]:
        """Slots of blocks according to the manifest. No I/O."""
        size = slot_bytes(shape)
        found = map(self._manifest.slots.get, keys)
        return [slot if slot is not None and slot.size == size else None for slot in found]

    def read(
        self, namespace: NamespaceId, shape: BlockShape, items: Sequence[tuple[BlockKey, Slot, memoryview]]
    ) -> list[tuple[Outcome, BlockRecord]]:
        """Read full blocks into writable views.

        Returns:
            One entry per item: HIT and the verified record, with the block's parent, depth and checksums; MISS if the slot does
            not have the block (the block is forgotten); UNAVAILABLE if the slot cannot be read.

        Raises:
            InvalidArgument: a view does not have the size of a full block.
        """
        slots: list[_WantedSlot] = []
        for key, slot, payload in items:
            wanted = self._wanted(namespace, shape, key, slot, payload.nbytes)
            flat = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
            slots.append(_WantedSlot(self._uid, slot, wanted, flat))
        self._file.read(slots, verify=True)
        return self._answers([(key, slot) for key, slot, _ in items], slots)

    def read_device(
        self,
        namespace: NamespaceId,
        shape: BlockShape,
        items: Sequence[tuple[BlockKey, Slot, DeviceMemory]],
        *,
        verify: bool = True,
    ) -> list[tuple[Outcome, BlockRecord]]:
        """As ``read``, into device memory. Memory of a block that is not a HIT is undefined.

        Data read directly is copied back to be verified, because the owner may have rewritten the slot. Without ``verify``, only
        the header is compared, and the caller must compare the checksums that it names with the bytes on the device.
        """
        pairs: list[tuple[_WantedSlot, DeviceMemory]] = []
        for key, slot, memory in items:
            wanted = self._wanted(namespace, shape, key, slot, memory.nbytes)
            pairs.append((_WantedSlot(self._uid, slot, wanted, NOTHING), memory))
        self._file.read_device(pairs, verify=verify)
        return self._answers([(key, slot) for key, slot, _ in items], [slot for slot, _ in pairs])

    @staticmethod
    def _wanted(namespace: NamespaceId, shape: BlockShape, key: BlockKey, slot: Slot, nbytes: int) -> BlockRecord:
        check_shape(shape)
        if nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
            raise InvalidArgument("a payload must be one full block and fit its slot", bytes=nbytes)
        return BlockRecord(namespace, key, None, 0, shape, b"")

    def _answers(
        self, places: Sequence[tuple[BlockKey, Slot]], slots: Sequence[_WantedSlot]
    ) -> list[tuple[Outcome, BlockRecord]]:
        answers: list[tuple[Outcome, BlockRecord]] = []
        for (key, slot), io in zip(places, slots, strict=True):
            answers.append((io.outcome, io.record))
            if io.outcome is Outcome.MISS:
                self._forget(key, slot)
        return answers

    def _forget(self, key: BlockKey, slot: Slot) -> None:
        """Ignore the block until the manifest has a new entry for it."""
        self._counters.add(volumes_metrics.MOUNT_STALE_BLOCKS)
        known = self._manifest.slots
        with self._turn:
            if known.get(key) == slot:
                del known[key]

    def close(self) -> None:
        """Wait for running I/O, then close the file."""
        self._file.close()
