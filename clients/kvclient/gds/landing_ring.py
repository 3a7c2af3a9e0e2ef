"""A ring of device memory between NVMe and the pages of a KV cache.

How a block gets into the engine's pages:

1. The node has named its slot on a volume and keeps it there under a lease (``kvclient.load.sources.gds``).
2. GPUDirect Storage reads the slot into a slot of the ring. The header, read afterwards, must name the block.
3. The device hashes the bytes in the ring. They must match the checksums in the header.
4. One launch scatters the blocks of the ring into pages. The slot of the ring is free after its copy has ended.

A block that fails a step is not a hit, and the node reads it into its arena as usual. Memory that may still be written to is not
used again: a late read gives its slots back when it ends, and slots of a device that hangs are lost.

The ring is used only if GPUDirect Storage works for the volumes of the node, and if the device computes checksums. Otherwise the
host would have to verify the bytes, and they would cross the bus twice. The memory is allocated at the first read, when the
engine serves requests, and bounds the bytes under way. A load reads into all free slots, then hashes and copies them. These take
little time compared to the reads, so the two steps do not overlap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import torch

from kvclient.gds.ring_slots import RingSlots
from kvclient.gds.volume_reader import DiskRead, GdsMode, GdsReader, ReadsPending, ReadTarget
from kvclient.memory.device_buffer import DeviceBuffer, DeviceChecksums, DeviceHung, PoolMemory
from kvclient.memory.engine_pool import DiskLocations, StoredVolume
from kvstore.core.buffers import BlockBuffer
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import device as device_metrics
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.slot_header import slot_bytes

if TYPE_CHECKING:
    from kvclient.device.copier import DeviceCopier
    from kvclient.device.streams import Event

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

RING_BYTES = 128 << 20
IN_FLIGHT = 8
ALIGNMENT = 4096
"""Alignment of slots in the ring, in bytes. The driver needs a bounce buffer to read to other addresses."""
WAIT_SHARE = 0.25
WAIT_S = 1.0
"""Share of a load's remaining time, and longest time, to wait for a free slot or new memory. Then the node reads."""
_NAP_S = 50e-6

_kept: list[torch.Tensor] = []
"""Rings that a hung device or a late read may still access."""


class LandingRing:
    """Device memory that blocks are read into before they are copied into pages. Thread-safe; a context manager.

    ``KVClient.connect(…, device=copier, gds=ring)``. Close its clients first.

    Args:
        copier: copies of the cache. They must not be suspended when the ring is created.
        gds: whether volumes are read directly; see ``GdsMode``. The engine needs permission to read the folders of the volumes.
        ring_bytes: device memory of the ring. At least one block is allocated.
        in_flight: blocks read in parallel from each volume; see ``gds_in_flight`` of ``HbmPool``.

    Raises:
        InvalidArgument: an unknown mode, a size out of range, or ``gds=required`` on a device that cannot.
    """

    def __init__(
        self, copier: DeviceCopier, *, gds: GdsMode = "auto", ring_bytes: int = RING_BYTES, in_flight: int = IN_FLIGHT
    ) -> None:
        if isinstance(ring_bytes, bool) or not isinstance(ring_bytes, int) or ring_bytes < 1:
            raise InvalidArgument("ring_bytes must be a positive integer of bytes", ring_bytes=ring_bytes)
        self.copier = copier
        self.slot_bytes = -(-copier.shape.block_bytes // ALIGNMENT) * ALIGNMENT
        self.slots = RingSlots(max(1, ring_bytes // self.slot_bytes))
        self.counters = copier.counters
        self.clock = MonotonicClock()
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._earlier: Event | None = None
        """The end of kernels that may still use the new memory; None: they have ended."""
        self._refused = False
        self._closed = False
        self.reader = GdsReader(self._target(), gds, in_flight)
        if not copier.hashes and gds == "required":
            raise InvalidArgument("gds=required requires checksums on the device", device=copier.memory_device)
        if not copier.hashes and (gds == "forced" or (gds == "auto" and copier.memory_device.type == "cuda")):
            self.refuse("the device computes no checksums")

    def _target(self) -> ReadTarget:
        return ReadTarget(
            name=f"landing ring on {self.copier.memory_device}",
            setting="LandingRing(gds=...)",
            device=self.copier.memory_device,
            counters=self.counters,
            clock=self.clock,
            memory=lambda: self._memory,
            closed=lambda: self._closed,
            release=lambda slots: self.slots.give_back([slot.offset // self.slot_bytes for slot in slots]),
            verify_on_host=False,
        )

    def attach(self, spec: CacheSpec) -> RingReader:
        """Register a namespace. For ``KVClient.connect``.

        Raises:
            InvalidArgument: the namespace does not match the cache.
        """
        self.copier.check(spec)
        return RingReader(self, NamespaceRegistry().of_spec(spec))

    @property
    def open(self) -> bool:
        """Whether the ring was neither refused nor closed."""
        return not self._refused and not self._closed

    @property
    def usable(self) -> bool:
        """Whether loads may use the ring now. Not while the engine sleeps, because blocks could not be verified."""
        return self.open and self.copier.hashes

    def refuse(self, reason: object) -> None:
        """Use the ring no more: the node reads all blocks."""
        with self._lock:
            first, self._refused = not self._refused, True
        if first:
            self.counters.add(device_metrics.DEVICE_GDS_REFUSED)
            _log.warning("landing ring not used: %s (reason=%s); the node reads", self.copier.memory_device, reason)

    def memory(self, wait_s: float) -> torch.Tensor | None:
        """Return the memory of the ring. It is allocated at the first call. None: it cannot be used, or not yet.

        Args:
            wait_s: how long to wait for kernels that the engine began before the allocation: they may still use the memory.
        """
        with self._lock:
            if not self.usable:
                return None
            try:
                if self._memory is None:
                    with self.reader.memory_changes():
                        self._memory, self._earlier = self._allocate()
                memory, earlier = self._memory, self._earlier
            except (RuntimeError, KVStoreError) as error:  # torch: out of memory, or the device failed
                failure = error
                memory = None
        if memory is None:
            self.refuse(failure)
        elif earlier is None or self._ends(earlier, wait_s):
            return memory
        return None

    def _allocate(self) -> tuple[torch.Tensor, Event]:
        size = self.slots.count * self.slot_bytes
        whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self.copier.memory_device)
        skipped = -whole.data_ptr() % ALIGNMENT
        _log.info("landing ring allocated: %s (mib=%d, slots=%d)", self.copier.memory_device, size >> 20, self.slots.count)
        return whole[skipped : skipped + size], self.copier.mark()

    def _ends(self, earlier: Event, wait_s: float) -> bool:
        """Whether earlier kernels end in time. A step of the engine may take longer than a load may wait."""
        until_s = self.clock.now_s() + wait_s
        try:
            while not earlier.done():
                if self.clock.now_s() >= until_s:
                    self.report_busy("the engine computes")
                    return False
                time.sleep(_NAP_S)
        except KVStoreError as error:
            self.lose(error)
            return False
        self._earlier = None
        return True

    def report_busy(self, reason: str) -> None:
        """Count and log that a load is left to the node."""
        self.counters.add(device_metrics.DEVICE_GDS_BUSY)
        _limited.warning("landing ring busy: %s (reason=%s); the node reads", self.copier.memory_device, reason)

    def lose(self, error: Exception) -> None:
        """Keep the memory for the life of the process, because the device may still access it, and use it no more."""
        with self._lock:
            if self._memory is not None and not any(self._memory is one for one in _kept):
                _kept.append(self._memory)
        self.refuse(error)

    def close(self) -> None:
        """Stop reading. Does not wait for reads; waits if the ring is being allocated.

        Memory of a late read is kept for the life of the process.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self.slots.free == self.slots.count
            if not idle and self._memory is not None:
                _kept.append(self._memory)
        self.reader.close(idle=idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive blocks of one load that are in the ring at the same time.

    Attributes:
        slots: slots of the ring, one per block.
        offsets: their offsets in bytes.
        wanted: the reads.
        first: position of the first block in the buffer.
    """

    slots: Sequence[int]
    offsets: npt.NDArray[np.int64]
    wanted: Sequence[DiskRead]
    first: int


class RingReader:
    """One namespace of a ring; see ``DiskReader``."""

    def __init__(self, ring: LandingRing, namespace: NodeNamespace) -> None:
        self._ring = ring
        self._namespace = namespace

    def prepare_disks(self, volumes: Sequence[StoredVolume]) -> None:
        """See ``DiskReader``."""
        if self._ring.open:
            self._ring.reader.prepare(volumes)

    def reads_disks(self, volumes: Sequence[StoredVolume]) -> bool:
        """See ``DiskReader``."""
        return self._ring.usable and self._ring.reader.ready(volumes)

    def accepts(self, buffer: BlockBuffer) -> bool:
        """See ``DiskReader``: pages of the cache."""
        if not isinstance(buffer, DeviceBuffer) or buffer.shape != self._namespace.shape:
            return False
        return not buffer.pool_gap(PoolMemory(str(self._ring.copier.memory_device), None))

    def fetch_stored(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,  # noqa: ARG002
        depth: int,  # noqa: ARG002
        volumes: Sequence[StoredVolume],
        places: DiskLocations,
        buffer: BlockBuffer,
        first: int,
        scope: CancelScope,
        *,
        verify: bool,
    ) -> int:
        """See ``DiskReader``."""
        ring, size = self._ring, slot_bytes(self._namespace.shape)
        good = 0
        memory = ring.memory(min(WAIT_S, scope.left_s() * WAIT_SHARE)) if isinstance(buffer, DeviceBuffer) else None
        while memory is not None and good < len(keys) and not scope.ended and ring.usable:
            slots = ring.slots.take(len(keys) - good, min(WAIT_S, scope.left_s() * WAIT_SHARE))
            if not slots:
                ring.report_busy(f"all {ring.slots.count} slots are in use")
                break
            offsets = np.array(slots, np.int64) * ring.slot_bytes
            wanted = [
                DiskRead(
                    keys[good + at],
                    int(places.volumes[good + at]),
                    Slot(int(places.offsets[good + at]), size, int(places.generations[good + at])),
                    Slot(int(offset), ring.slot_bytes, 0),
                )
                for at, offset in enumerate(offsets.tolist())
            ]
            landed = self._land(_Batch(slots, offsets, wanted, first + good), volumes, memory, buffer, scope, verify=verify)
            good += landed
            if landed < len(slots):
                break
        ring.counters.add_all(
            (device_metrics.DEVICE_GDS_BLOCKS, device_metrics.DEVICE_GDS_FAILED_BLOCKS), (good, len(keys) - good)
        )
        return good

    def _land(
        self,
        batch: _Batch,
        volumes: Sequence[StoredVolume],
        memory: torch.Tensor,
        buffer: BlockBuffer,
        scope: CancelScope,
        *,
        verify: bool,
    ) -> int:
        """Read, verify and scatter blocks. Returns the number of leading blocks that are in the buffer now."""
        assert isinstance(buffer, DeviceBuffer)
        ring = self._ring
        held = True
        try:
            rows = ring.reader.read(self._namespace, volumes, batch.wanted, ring.clock.now_s() + scope.left_s())
            expected = np.frombuffer(b"".join(rows), "<u8").reshape(len(rows), self._namespace.shape.layers)
            held = False  # if the wait below fails, the device may still read these slots
            sound = self._leading(expected, lambda: ring.copier.begin_memory_checksums(memory, batch.offsets[: len(rows)]))
            held = True
            if sound:
                buffer.read_pool(PoolMemory(str(memory.device), memory), batch.offsets[:sound], batch.first)
            if sound and verify:
                shape = self._namespace.shape
                sound = self._leading(expected[:sound], lambda: buffer.begin_checksums(batch.first, sound, 0, shape.layers))
        except DeviceHung as error:
            held = False
            if not isinstance(error, ReadsPending):
                ring.lose(error)
            return 0
        except KVStoreError as error:
            if not held:
                ring.lose(error)
            _limited.warning("copies from the landing ring failed: %s (error=%s); the node reads", memory.device, error)
            return 0
        else:
            return sound
        finally:
            if held:
                ring.slots.give_back(batch.slots)

    def _leading(self, expected: npt.NDArray[np.uint64], begin: Callable[[], DeviceChecksums | None]) -> int:
        """Count the leading blocks whose checksums on the device are the expected ones."""
        pending = begin() if len(expected) else None
        if pending is None:
            return 0
        same = (pending.result() == expected).all(axis=1)
        good = int(np.argmin(same)) if not same.all() else len(same)
        if good < len(same):
            self._ring.counters.add(device_metrics.DEVICE_GDS_CORRUPT_BLOCKS)
            _limited.warning("block with wrong checksums: %s; the node reads it", self._ring.copier.memory_device)
        return good
