"""A volume that another node owns, read through a folder that this host mounts too: of 3FS, CephFS, Lustre, or a plain one.

The owner is not asked and need not live. Which slot holds a block is known from the volume's *roster*; whatever lies in that
slot by now is read whole, and counts only if its header names the volume, namespace, key, place and generation that were looked
for, and the payload matches the header's checksum of every Layer Block. The owner may evict and rewrite slots at any moment: a
read that met it sees another block's header, or a mixture whose checksums fail. Both are a miss, here called *stale*.

Nothing is written or locked. Where the file system grants O_DIRECT, reads go past this host's page cache. An engine mounts its
own node's volume: that is how blocks get from the disk into device memory without a way through the node's arena. It is told by
the node where they lie, and so reads no more of the roster than whose volume it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.core import checksum
from kvstore.core.errors import Conflict, CorruptBlock, InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.nvme.slab_io import NOTHING, IoChoice, SlotIO
from kvstore.tiers.nvme.slot_header import FIXED_BYTES, check_shape, header_bytes, parse_header, slot_bytes
from kvstore.tiers.nvme.slot_manifest import SlotManifestReader
from kvstore.tiers.nvme.volume_open import SLAB_FILE

_log = logging.getLogger(__name__)


class _WantedSlot(SlotIO):
    """A slot of which only the place and the block are known: its header is to prove the rest."""

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
    """The reader's end of a shared volume. Thread-safe. Every method but ``find`` may block for as long as the file system does.

    Args:
        path: folder of the volume, as mounted here.
        volume_id: the volume that is expected there.
        io_threads: I/O requests under way at once.
        direct: use O_DIRECT where it works.
        counters: where failures are counted.
        gds: kvikio, for reads into device memory; None: they go through host memory.
        gds_required: where it cannot open the volume, neither can we.
        places: False: ``find`` knows nothing, as the caller knows better.

    Raises:
        Conflict: another volume lies there.
        CorruptBlock: the roster is damaged.
        OSError: there is nothing, or it cannot be read.
        Unsupported: ``gds`` is required and cannot open it.
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
        places: bool = True,
    ) -> None:
        self.volume_id = volume_id
        self._path = path
        self._counters = counters or Counters()
        self._manifest = SlotManifestReader(path, entries=places)
        self._turn = threading.Lock()
        self._uid = b""
        self._catch_up()
        choice = IoChoice(io_threads, direct, gds, gds_required)
        self._file = choice.open(path / SLAB_FILE, writable=False, counters=self._counters)
        known = f"{len(self._manifest.slots)} blocks, " if places else ""
        _log.info("volume %s mounted at %s: %s%s", volume_id, path, known, self._file.engine)

    @property
    def io_engine(self) -> str:
        """What is really in use."""
        return self._file.engine

    @property
    def answered_s(self) -> float:
        """When its file system answered an I/O request last, by ``CLOCK_MONOTONIC``."""
        return self._file.answered_s

    @property
    def blocks(self) -> int:
        """Blocks that the owner is known to have."""
        return len(self._manifest.slots)

    def catch_up(self) -> None:
        """Takes in what came and went since.

        Raises:
            Conflict: the volume was replaced by another one: open this one anew.
            CorruptBlock: the roster is damaged.
            OSError: it cannot be read.
        """
        with self._turn:
            self._catch_up()

    def _catch_up(self) -> None:
        self._manifest.catch_up()
        superblock = self._manifest.superblock
        assert superblock is not None  # it has caught up
        if superblock.volume_id != self.volume_id or superblock.uid != (self._uid or superblock.uid):
            raise Conflict("another volume lies here now", path=self._path, expected=self.volume_id, found=superblock.volume_id)
        self._uid = superblock.uid

    def find(self, keys: Sequence[BlockKey], shape: BlockShape) -> list[Slot | None]:
        """Where blocks are said to lie. Memory only."""
        size = slot_bytes(shape)
        found = map(self._manifest.slots.get, keys)
        return [slot if slot is not None and slot.size == size else None for slot in found]

    def read(
        self, namespace: NamespaceId, shape: BlockShape, items: Sequence[tuple[BlockKey, Slot, memoryview]]
    ) -> list[tuple[Outcome, bytes]]:
        """Reads Full Blocks into writable views.

        Returns:
            One entry an item. HIT, and the checksums by which the payload was verified; MISS: the slot does not hold the
            block (any more), and is forgotten; UNAVAILABLE: it cannot be read.

        Raises:
            InvalidArgument: a view is no Full Block.
        """
        slots: list[_WantedSlot] = []
        for key, slot, payload in items:
            wanted = self._wanted(namespace, shape, key, slot, payload.nbytes)
            flat = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
            slots.append(_WantedSlot(self._uid, slot, wanted, flat))
        self._file.read(slots, verify=True)
        return self._answers([(key, slot) for key, slot, _ in items], slots)

    def read_device(
        self, namespace: NamespaceId, shape: BlockShape, items: Sequence[tuple[BlockKey, Slot, DeviceMemory]]
    ) -> list[tuple[Outcome, bytes]]:
        """As ``read``, into device memory; what is not a HIT leaves it undefined.

        What went there straight is fetched back to be verified: the owner may have rewritten the slot meanwhile.
        """
        pairs: list[tuple[_WantedSlot, DeviceMemory]] = []
        for key, slot, memory in items:
            wanted = self._wanted(namespace, shape, key, slot, memory.nbytes)
            pairs.append((_WantedSlot(self._uid, slot, wanted, NOTHING), memory))
        self._file.read_device(pairs, verify=True)
        return self._answers([(key, slot) for key, slot, _ in items], [slot for slot, _ in pairs])

    @staticmethod
    def _wanted(namespace: NamespaceId, shape: BlockShape, key: BlockKey, slot: Slot, nbytes: int) -> BlockRecord:
        check_shape(shape)
        if nbytes != shape.block_bytes or slot.size != slot_bytes(shape):
            raise InvalidArgument("a payload is one Full Block and fits its slot", bytes=nbytes)
        return BlockRecord(namespace, key, None, 0, shape, b"")

    def _answers(self, places: Sequence[tuple[BlockKey, Slot]], slots: Sequence[_WantedSlot]) -> list[tuple[Outcome, bytes]]:
        answers: list[tuple[Outcome, bytes]] = []
        for (key, slot), io in zip(places, slots, strict=True):
            answers.append((io.outcome, io.record.checksums))
            if io.outcome is Outcome.MISS:
                self._forget(key, slot)
        return answers

    def _forget(self, key: BlockKey, slot: Slot) -> None:
        """Until the roster speaks of the block again, it is not looked for."""
        self._counters.add(volumes_metrics.MOUNT_STALE_BLOCKS)
        known = self._manifest.slots
        with self._turn:
            if known.get(key) == slot:
                del known[key]

    def close(self) -> None:
        """Waits for I/O under way, then closes."""
        self._file.close()
