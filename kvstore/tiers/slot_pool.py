"""Thread-safe slots of one volume, and the part of the volume contract that they implement."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvstore.core import checksum
from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, Outcome
from kvstore.observe.counters import Counters
from kvstore.observe.metrics import Event
from kvstore.tiers.allocator import SlotAllocator
from kvstore.tiers.contract import BlockRecord, Slot, Volume, VolumeUsage
from kvstore.tiers.nvme.slot_header import check_shape


class SlotPool:
    """A ``SlotAllocator`` with its lock. Sizes are bytes of a slot.

    Args:
        capacity_bytes: see ``SlotAllocator``.
        chunk_bytes: see ``SlotAllocator``.
        first_generation: see ``SlotAllocator``.
    """

    def __init__(self, capacity_bytes: int, *, chunk_bytes: int | None = None, first_generation: int = 1) -> None:
        self._lock = threading.Lock()
        self._allocator = SlotAllocator(capacity_bytes, chunk_bytes=chunk_bytes, first_generation=first_generation)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk."""
        return self._allocator.chunk_bytes

    @property
    def next_generation(self) -> int:
        """Generation of the next slot: those of all earlier ones are lower."""
        with self._lock:
            return self._allocator.next_generation

    def allocate(self, size: int, count: int) -> list[Slot] | None:
        """See ``SlotAllocator.allocate``."""
        with self._lock:
            return self._allocator.allocate(size, count)

    def free(self, slots: Sequence[Slot]) -> None:
        """See ``SlotAllocator.free``."""
        with self._lock:
            self._allocator.free(slots)

    def take(self, slot: Slot, first_chunk: int, chunks: int) -> bool:
        """See ``SlotAllocator.take``."""
        with self._lock:
            return self._allocator.take(slot, first_chunk, chunks)

    def skip_to(self, generation: int) -> None:
        """See ``SlotAllocator.skip_to``."""
        with self._lock:
            self._allocator.skip_to(generation)

    def plan_eviction(self, size: int, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int) -> list[BlockKey] | None:
        """See ``SlotAllocator.plan_eviction``."""
        with self._lock:
            return self._allocator.plan_eviction(size, count, coldest, limit)

    def coldest_spans(self, size: int, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        """See ``SlotAllocator.coldest_spans``. Locked for one span at a time."""
        spans = self._allocator.coldest_spans(size, cold)
        while True:
            with self._lock:
                slots = next(spans, None)
            if slots is None:
                return
            yield slots

    def usage(self) -> VolumeUsage:
        """Capacity and slots in use."""
        with self._lock:
            return VolumeUsage(self._allocator.capacity_bytes, self._allocator.used_bytes, self._allocator.slots_used)

    def holds(self, slot: Slot) -> bool:
        """See ``SlotAllocator.holds``. Takes no lock: it reads one entry that changes in one step."""
        return self._allocator.holds(slot)

    def span_at(self, offset: int) -> tuple[int, int]:
        """See ``SlotAllocator.span_at``. Takes no lock: the caller holds a slot of the span."""
        return self._allocator.span_at(offset)

    def fits(self, size: int) -> bool:
        """See ``SlotAllocator.fits``."""
        return self._allocator.fits(size)

    def reset(self, replace_memory: Callable[[], int]) -> bool:
        """Start with an empty pool of another capacity, if no slot is in use. Generations continue.

        Args:
            replace_memory: called while no slot can be allocated; returns the new capacity.

        Returns:
            Whether no slot was in use. If one was, nothing has changed.
        """
        with self._lock:
            if self._allocator.slots_used:
                return False
            capacity_bytes = replace_memory()
            self._allocator = SlotAllocator(capacity_bytes, first_generation=self._allocator.next_generation)
            return True


class PooledVolume(Volume):
    """A volume whose slots are in a ``SlotPool``."""

    slot_pool: SlotPool

    @staticmethod
    @abstractmethod
    def _slot_bytes(shape: BlockShape) -> int:
        """Bytes of a slot for a block of this shape."""

    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        check_shape(shape)
        return self.slot_pool.allocate(self._slot_bytes(shape), count)

    def free(self, slots: Sequence[Slot]) -> None:
        self.slot_pool.free(slots)

    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        check_shape(shape)
        return self.slot_pool.plan_eviction(self._slot_bytes(shape), count, coldest, limit)

    def coldest_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        check_shape(shape)
        return self.slot_pool.coldest_spans(self._slot_bytes(shape), cold)

    def usage(self) -> VolumeUsage:
        return self.slot_pool.usage()


class MemoryVolume(PooledVolume):
    """A volume whose blocks a subclass copies, one at a time."""

    _corrupt_event: ClassVar[Event]
    """Counts blocks that are not what the caller asks for."""
    _counters: Counters

    @staticmethod
    def _slot_bytes(shape: BlockShape) -> int:
        return shape.block_bytes

    @abstractmethod
    def _copy_in(self, slot: Slot, shape: BlockShape, payload: memoryview) -> None:
        """Copy a block into its slot, which is held."""

    @abstractmethod
    def _copy_out(self, slot: Slot, shape: BlockShape, destination: memoryview) -> None:
        """Copy a block out of its slot, which may be given to another block during the copy."""

    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        results: list[Exception | None] = []
        for slot, record, payload in items:
            size = record.shape.block_bytes
            if payload.nbytes != size or size > slot.size:
                results.append(
                    InvalidArgument("a payload must be one full block and fit its slot", bytes=payload.nbytes, expected=size)
                )
            elif not self.slot_pool.holds(slot):
                results.append(Internal("the slot of a write is not allocated", slot=slot))
            else:
                self._copy_in(slot, record.shape, payload)
                results.append(None)
        return results

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        """See the contract. The slot is checked again after the copy: a slot that was allocated again is not a hit."""
        outcomes: list[Outcome] = []
        for slot, record, destination in items:
            size = record.shape.block_bytes
            if destination.nbytes != size or size > slot.size:
                raise InvalidArgument("a destination must be one full block", bytes=destination.nbytes, expected=size)
            outcome = Outcome.CORRUPT
            if self.slot_pool.holds(slot):
                self._copy_out(slot, record.shape, destination)
                if (not verify or checksum.verify(destination, record.shape, record.checksums)) and self.slot_pool.holds(slot):
                    outcome = Outcome.HIT
            if outcome is Outcome.CORRUPT:
                self._counters.add(self._corrupt_event)
            outcomes.append(outcome)
        return outcomes
