"""A volume in device memory. It uses the allocator of arenas and slabs; torch copies the bytes.

Host memory never maps a GPU's, so the volume offers no views: copies from and to the host pass through pinned memory in pieces. A
volume on ``cpu`` copies directly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from kvclient.hbm import memory
from kvclient.hbm.tensors import stretches, until_done
from kvclient.memory.arena import copy_from_arena, copy_to_arena
from kvclient.memory.device_buffer import DeviceHung
from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument
from kvstore.core.types import BlockShape, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics
from kvstore.tiers.contract import Slot
from kvstore.tiers.slot_pool import MemoryVolume, SlotPool

_log = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]

STAGING_BYTES = 16 << 20
"""Pinned memory for copies between host and a GPU."""
COPY_S = 10.0
"""Copies of one filling of the staging memory that have not ended after this time are assumed to hang."""
COPY_THREADS = 2


class HbmVolume(MemoryVolume):
    """Blocks in the memory of one device. Thread-safe.

    Args:
        volume_id: name of the volume.
        device: see ``memory.find_device``.
        capacity_bytes: its size.
        counters: counts events.

    Raises:
        CapacityExceeded: the device refused the allocation.
    """

    _corrupt_event = device_metrics.HBM_CORRUPT_BLOCKS

    def __init__(
        self, volume_id: VolumeId, device: torch.device, capacity_bytes: int, *, counters: Counters | None = None
    ) -> None:
        self.volume_id = volume_id
        self.tier = Tier.HBM
        self.device = device
        self._counters = counters or Counters()
        self.slot_pool = SlotPool(capacity_bytes)
        self._closed = False
        self._hung = False
        self._memory: torch.Tensor | None = memory.take(device, capacity_bytes)
        self._staging_lock = threading.Lock()
        self._staging: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def memory(self) -> torch.Tensor:
        """All of the memory: uint8 ``[capacity_bytes]``; slot offsets are relative to its start. The caller holds the slots.

        Raises:
            Internal: the volume is closed.
        """
        found = self._memory
        if found is None:
            raise Internal("the volume is closed", volume_id=self.volume_id)
        return found

    @property
    def host_view(self) -> memoryview | None:
        """The memory as a host buffer; None for a GPU."""
        if self.device.type != "cpu":
            return None
        view: memoryview = self.memory.numpy().data
        return view

    # ---- slots ----
    def check_fits(self, shape: BlockShape) -> None:
        """Check that a block would fit if the volume were empty.

        Raises:
            InvalidArgument: it would not.
        """
        self.plan_eviction(shape, 0, iter(()), 0)

    def resize(self, capacity_bytes: int) -> bool:
        """Release all memory and allocate another size. False if slots are reserved or the device hangs; then nothing changes.

        If the device refuses the new size, one page is allocated.

        Raises:
            CapacityExceeded: the device refused.
            Internal: the volume is closed.
        """
        if self._hung:
            return False
        failure: CapacityExceeded | None = None

        def replace_memory() -> int:
            nonlocal failure
            with self._staging_lock:
                if self._closed:
                    raise Internal("the volume is closed", volume_id=self.volume_id)
                self._memory = None  # released first: the device may not have memory for both
                memory.give_back(self.device)
                try:
                    self._memory = memory.take(self.device, capacity_bytes)
                except CapacityExceeded as error:
                    failure = error
                    self._memory = memory.take(self.device, memory.PAGE_BYTES)
                    return memory.PAGE_BYTES
                return capacity_bytes

        resized = self.slot_pool.reset(replace_memory)
        if failure is not None:
            raise failure
        return resized

    # ---- many blocks, between this memory and the host's ----
    def copy_in(self, offsets: Offsets, source: BlockBuffer, checksums: npt.NDArray[np.uint64] | None = None) -> None:
        """Copy all blocks of a buffer into slots that the caller holds.

        Args:
            offsets: of the slots, one per block.
            source: the blocks.
            checksums: ``[blocks, layers]``, filled with the checksums of the bytes; None: none are computed.

        Raises:
            DeviceHung: the copies did not end in time. All memory is kept for the life of the process.
        """
        view = self.host_view
        if view is not None:
            copy_to_arena(source, view, offsets.astype(np.uint64), checksums=checksums, threads=COPY_THREADS)
            return
        size = source.shape.block_bytes
        self._check(offsets, size)
        with self._staged(size) as (staging, step):
            for at in range(0, len(offsets), step):
                count = min(step, len(offsets) - at)
                copy_to_arena(
                    source,
                    staging.numpy().data,
                    np.arange(count, dtype=np.uint64) * np.uint64(size),
                    range(at, at + count),
                    checksums=None if checksums is None else checksums[at : at + count],
                    threads=COPY_THREADS,
                )
                for first, last in stretches(offsets[at : at + count], size):
                    start = int(offsets[at + first])
                    self.memory[start : start + (last - first) * size].copy_(
                        staging[first * size : last * size], non_blocking=True
                    )
                until_done(self.device, COPY_S)  # before the staging memory is reused

    def copy_out(self, offsets: Offsets, destination: BlockBuffer, first: int) -> None:
        """Copy slots that the caller holds to blocks ``[first, first + len(offsets))`` of a buffer.

        Raises the errors of ``copy_in``.
        """
        view = self.host_view
        size = destination.shape.block_bytes
        if view is not None:
            blocks = np.arange(first, first + len(offsets), dtype=np.int64)
            copy_from_arena(view, offsets.astype(np.uint64), destination, blocks, threads=COPY_THREADS)
            return
        self._check(offsets, size)
        with self._staged(size) as (staging, step):
            for at in range(0, len(offsets), step):
                count = min(step, len(offsets) - at)
                for begin, end in stretches(offsets[at : at + count], size):
                    start = int(offsets[at + begin])
                    staging[begin * size : end * size].copy_(self.memory[start : start + (end - begin) * size], non_blocking=True)
                until_done(self.device, COPY_S)
                blocks = np.arange(first + at, first + at + count, dtype=np.int64)
                packed = np.arange(count, dtype=np.uint64) * np.uint64(size)
                copy_from_arena(staging.numpy().data, packed, destination, blocks, threads=COPY_THREADS)

    def _check(self, offsets: Offsets, size: int) -> None:
        if len(offsets) and not 0 <= int(offsets.min()) <= int(offsets.max()) <= len(self.memory) - size:
            raise InvalidArgument("a block is outside the volume", volume_id=self.volume_id, block_bytes=size)

    @contextmanager
    def _staged(self, size: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield staging memory for one copy at a time, and the number of blocks that fit into it.

        Copies within use their own stream: on the default stream they and the engine's kernels would wait for each other.
        """
        # with torch.cuda.stream alone, restoring GPU 0, which is current in a new thread, would create a context there
        with self._staging_lock, torch.cuda.device(self.device):
            if self._hung:
                raise DeviceHung("the device hung earlier", device=self.device, volume_id=self.volume_id)
            if self._staging is None or len(self._staging) < size:
                self._staging = self._take_staging(max(STAGING_BYTES, size))
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            try:
                with torch.cuda.stream(self._stream):
                    yield self._staging, len(self._staging) // size
            except DeviceHung:
                self.keep()
                raise

    def _take_staging(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # memlock limit; a failed device shows in the copy
            self._counters.add(device_metrics.HBM_UNPINNED_STAGING)
            _log.warning("pinned memory not allocated: copies of %s are slower (error=%s)", self.device, error)
            return torch.empty(nbytes, dtype=torch.uint8)

    # ---- one block at a time: the Volume contract ----
    def _copy_in(self, slot: Slot, shape: BlockShape, payload: memoryview) -> None:
        self.copy_in(np.array([slot.offset]), _as_block(payload, shape))

    def _copy_out(self, slot: Slot, shape: BlockShape, destination: memoryview) -> None:
        self.copy_out(np.array([slot.offset]), _as_block(destination, shape), 0)

    def keep(self) -> None:
        """Copy no more, and keep all memory for the life of the process, because a hung device may still access it."""
        self._hung = True
        for one in (self._memory, self._staging):
            if one is not None:
                memory.keep_for_process(one)

    def close(self) -> None:
        """Release the memory after its last use, unless it is kept."""
        with self._staging_lock:
            self._closed = True
            self._memory = self._staging = None
        if not self._hung:  # the driver would wait for the device
            memory.give_back(self.device)


def _as_block(view: memoryview, shape: BlockShape) -> DenseBlocks:
    return DenseBlocks(np.frombuffer(view, np.uint8).reshape(1, shape.layers, shape.layer_block_bytes))
