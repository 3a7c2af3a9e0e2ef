"""Pages of a KV cache as the buffer of one load or store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockShape, CacheSpec, InvalidArgument
from kvclient.device.driver import Addresses
from kvclient.device.streams import Event
from kvclient.memory.device_buffer import CopyEvent, DeviceBuffer, DeviceChecksums, DeviceHung, Offsets, PoolMemory
from kvstore.core.errors import Internal
from kvstore.native import address_of

Positions = npt.NDArray[np.intp]


@dataclass(slots=True)
class PageRange:
    """The pages that one copy reads or writes: some layers of some blocks.

    Attributes:
        page_ids: pages of these blocks, on the host.
        first_layer: first layer of the cache.
        layers: number of layers.
        shift: bytes from the start of a block to its first layer.
        after: the pages may be accessed after this event.
        begun: if the copy fails, the copier leaves the events of its begun parts here.
    """

    page_ids: torch.Tensor
    first_layer: int
    layers: int
    shift: int
    after: Event
    begun: list[Event] = field(default_factory=list)


class CopyEngine(Protocol):
    """The copies of one KV cache, as its buffers use them: ``kvclient.device.DeviceCopier``."""

    @property
    def pages_per_block(self) -> int:
        """Pages of the cache that hold one block."""

    @property
    def shape(self) -> BlockShape:
        """Layers and sizes of a full block in the store."""

    def check(self, spec: CacheSpec) -> None:
        """Raise ``InvalidArgument`` if a namespace does not match the cache."""

    def load(
        self, base: int, starts: Addresses, pitch: int, pages: PageRange, on_layer: Callable[[int, Event], None]
    ) -> list[Event]:
        """Begin copies from host memory into pages."""

    def store(self, base: int, starts: Addresses, pitch: int, pages: PageRange) -> list[Event]:
        """Begin copies from pages into host memory."""

    def pool_gap(self, device: str) -> str:
        """Explain why a pool on ``device`` cannot be copied to directly; empty if it can."""

    def load_pool(self, memory: torch.Tensor, starts: Addresses, pages: PageRange) -> list[Event]:
        """Begin copies from a pool's memory into pages."""

    def store_pool(self, memory: torch.Tensor, starts: Addresses, pages: PageRange) -> list[Event]:
        """Begin copies from pages into a pool's memory."""

    def wait(self, events: Sequence[Event]) -> None:
        """Wait, for a bounded time, until copies are done."""

    def wait_on_stream(self, event: Event) -> None:
        """Let the caller's current stream wait for an event."""

    def begin_checksums(self, pages: PageRange, after: Sequence[Event]) -> DeviceChecksums | None:
        """Start to hash pages on the device after some events; None: hash on the host."""

    def keep(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Keep host memory for the life of the process, because unfinished copies may still access it."""


class DeviceBlocks(DeviceBuffer):
    """Buffer of one load or store in the pages of a cache; see ``DeviceBuffer``. ``DeviceCopier.blocks`` makes it.

    Args:
        copier: copies of the cache.
        page_ids: int64, on the host; already checked.
        layers: layers of the cache that the blocks consist of.
        after: the pages may be accessed after this event.
    """

    def __init__(self, copier: CopyEngine, page_ids: torch.Tensor, layers: range, after: Event) -> None:
        self._copier = copier
        self._page_ids = page_ids.view(-1, copier.pages_per_block)
        self._layers = layers
        self._after = after
        self._shape = BlockShape(len(layers), copier.shape.layer_block_bytes)
        self._lock = threading.Lock()
        self._events: list[Event] = []
        """Events of all copies whose end no thread has seen yet."""
        self._arrival: dict[int, list[Event]] = {}
        self._host: npt.NDArray[np.uint8] | None = None
        self._by_host = np.zeros(self.count, bool)
        """Blocks that pass through host memory."""
        self._sent = np.zeros(self.count, np.int64)
        """For each of these blocks: number of leading layers whose copy to the device has begun."""

    @property
    def count(self) -> int:
        return len(self._page_ids)

    @property
    def shape(self) -> BlockShape:
        return self._shape

    def check(self, spec: CacheSpec) -> None:
        self._copier.check(spec)

    # ---- through host memory ----
    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        with self._lock:
            host = self._host_memory()
            self._by_host[block] = True
            self._sent[block] = min(int(self._sent[block]), first_layer)  # their bytes will change
        size = self._shape.layer_block_bytes
        return (host[block, first_layer * size : (first_layer + layer_count) * size].data,)

    def _host_memory(self) -> npt.NDArray[np.uint8]:
        if self._host is None:
            self._host = np.empty((self.count, self._shape.block_bytes), np.uint8)
        return self._host

    def host_copy_ready(self, positions: Positions, first_layer: int, layer_count: int) -> None:
        with self._lock:
            by_host = positions[self._by_host[positions]]
            begin = np.clip(self._sent[by_host], first_layer, first_layer + layer_count)
            in_turn = by_host[self._sent[by_host] >= first_layer]  # layers after a gap are copied again when it is filled
            self._sent[in_turn] = np.maximum(self._sent[in_turn], first_layer + layer_count)
            host = self._host
        if host is None:
            return
        base = int(host.__array_interface__["data"][0])
        end = first_layer + layer_count
        for layer in np.unique(begin[begin < end]).tolist():
            some = by_host[begin == layer]
            self._load(base, base + some * self._shape.block_bytes, self._shape.block_bytes, some, layer, end - layer)

    # ---- from and to the arena ----
    def read_arena(self, arena: memoryview, offsets: Offsets, first: int, first_layer: int, layer_count: int) -> None:
        self.read_at(arena, offsets, np.arange(first, first + len(offsets)), first_layer, layer_count)

    def read_at(self, arena: memoryview, offsets: Offsets, positions: Positions, first_layer: int, layer_count: int) -> None:
        """Like ``read_arena``, for blocks at any positions of the buffer."""
        base, starts = self._in_arena(arena, offsets)
        with self._lock:
            self._by_host[positions] = False
        self._load(base, starts, self._slot_bytes, positions, first_layer, layer_count)

    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        self.write_at(arena, offsets, np.arange(self.count))

    def write_at(self, arena: memoryview, offsets: Offsets, positions: Positions) -> None:
        """Like ``write_arena``, for some of the blocks."""
        base, starts = self._in_arena(arena, offsets)
        self._store(base, starts, self._slot_bytes, positions)

    def _in_arena(self, arena: memoryview, offsets: Offsets) -> tuple[int, npt.NDArray[np.int64]]:
        at = np.asarray(offsets).astype(np.int64)
        # later code trusts the addresses
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) <= len(arena) - self._shape.block_bytes:
            raise InvalidArgument("a block is outside the arena", arena_bytes=len(arena), block_bytes=self._shape.block_bytes)
        base = address_of(arena)
        return base, at + base

    def begin_checksums(self, first: int, count: int, first_layer: int, layer_count: int) -> DeviceChecksums | None:
        return self.checksums_at(np.arange(first, first + count), first_layer, layer_count)

    def checksums_at(self, positions: Positions, first_layer: int, layer_count: int) -> DeviceChecksums | None:
        """Like ``begin_checksums``, for blocks at any positions of the buffer."""
        with self._lock:
            events = list(self._events)
        return self._copier.begin_checksums(self._pages(positions, first_layer, layer_count), events)

    # ---- from and to a pool on the same device ----
    def pool_gap(self, memory: PoolMemory) -> str:
        return self._copier.pool_gap(memory.device)

    def read_pool(self, memory: PoolMemory, offsets: Offsets, first: int) -> None:
        self.read_pool_at(memory, offsets, np.arange(first, first + len(offsets)))

    def read_pool_at(self, memory: PoolMemory, offsets: Offsets, positions: Positions) -> None:
        """Like ``read_pool``, for blocks at any positions of the buffer."""
        tensor, starts = self._in_pool(memory, offsets)
        with self._lock:
            self._by_host[positions] = False
        pages = self._pages(positions, 0, len(self._layers))
        self._run_to_end(pages, lambda: self._copier.load_pool(tensor, starts, pages))

    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        self.write_pool_at(memory, offsets, np.arange(self.count))

    def write_pool_at(self, memory: PoolMemory, offsets: Offsets, positions: Positions) -> None:
        """Like ``write_pool``, for some of the blocks."""
        tensor, starts = self._in_pool(memory, offsets)
        pages = self._pages(positions, 0, len(self._layers))
        self._run_to_end(pages, lambda: self._copier.store_pool(tensor, starts, pages))

    def _in_pool(self, memory: PoolMemory, offsets: Offsets) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        tensor, gap = memory.tensor, self.pool_gap(memory)
        flat = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous()
        if gap or not isinstance(tensor, torch.Tensor) or not flat or tensor.data_ptr() % 8 or tensor.storage_offset() % 8:
            raise InvalidArgument("the device cannot copy from this pool memory", device=memory.device, reason=gap)
        at = np.asarray(offsets).astype(np.int64)
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) <= len(tensor) - self._shape.block_bytes:
            raise InvalidArgument("a block is outside the pool", pool_bytes=len(tensor), block_bytes=self._shape.block_bytes)
        return tensor, at

    def _run_to_end(self, pages: PageRange, begin: Callable[[], list[Event]]) -> None:
        """Begin copies and wait for exactly these: another thread that drains may already have taken the others."""
        events = pages.begun
        try:
            events = begin()
            self._await(events)
        except DeviceHung:
            raise
        except BaseException:  # if this thread is interrupted, its copies still run
            self._await(events)
            raise

    def _await(self, events: Sequence[Event]) -> None:
        try:
            self._copier.wait(events)
        except Internal as error:
            raise DeviceHung("copies between a pool and pages did not end in time", error=error) from error

    # ---- copies ----
    def _load(
        self,
        base: int,
        starts: npt.NDArray[np.int64],
        pitch: int,
        positions: Positions,
        first_layer: int,
        layer_count: int,
    ) -> None:
        pages = self._pages(positions, first_layer, layer_count)
        arrived: list[tuple[int, Event]] = []
        try:
            events = self._copier.load(base, starts, pitch, pages, lambda layer, event: arrived.append((layer, event)))
        finally:
            with self._lock:
                self._events += pages.begun
        with self._lock:
            self._events += events
            for layer, event in arrived:
                self._arrival.setdefault(layer - self._layers.start, []).append(event)

    def _store(self, base: int, starts: npt.NDArray[np.int64], pitch: int, positions: Positions) -> None:
        pages = self._pages(positions, 0, len(self._layers))
        try:
            events = self._copier.store(base, starts, pitch, pages)
        finally:
            with self._lock:
                self._events += pages.begun
        with self._lock:
            self._events += events

    def _pages(self, positions: Positions, first_layer: int, layer_count: int) -> PageRange:
        if not (first_layer >= 0 and 0 < layer_count <= len(self._layers) - first_layer):
            raise InvalidArgument("layers out of range", layers=len(self._layers), first=first_layer, count=layer_count)
        ids = self._page_ids[torch.from_numpy(np.asarray(positions, np.int64))].reshape(-1)
        shift = first_layer * self._shape.layer_block_bytes
        return PageRange(ids, self._layers.start + first_layer, layer_count, shift, self._after)

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a full block in an arena; this buffer may hold only one layer of it."""
        return self._copier.shape.block_bytes

    def begun(self) -> Sequence[CopyEvent]:
        with self._lock:
            return list(self._events)

    def drain(self, begun: Sequence[CopyEvent] | None = None) -> None:
        self._wait(self.begun() if begun is None else begun, self._host)

    def _wait(self, events: Sequence[CopyEvent], host: npt.NDArray[np.uint8] | None) -> None:
        try:
            self._copier.wait(events)
        except Internal:
            self._copier.keep(host)  # copies that did not end may still access it
            raise
        # Only now: another thread may wait for the same copies, and copies that failed or were interrupted have not ended.
        waited = set(map(id, events))
        with self._lock:
            self._events = [event for event in self._events if id(event) not in waited]

    def wait_on_stream(self, layer: int) -> None:
        with self._lock:
            events = list(self._arrival.get(layer, ()))
        for event in events:
            self._copier.wait_on_stream(event)

    # ---- subsets ----
    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        return _Picked(self, np.asarray(blocks, np.intp))

    def source(self) -> BlockSource:
        return BlockSource(self)

    def gather(self) -> npt.NDArray[np.uint8]:
        """Copy the blocks into host memory: uint8 ``[blocks, block_bytes]``.

        Raises:
            Internal: the device failed.
        """
        rows = np.empty((self.count, self._shape.block_bytes), np.uint8)
        base = int(rows.__array_interface__["data"][0])
        size = self._shape.block_bytes
        try:
            self._store(base, base + np.arange(self.count) * size, size, np.arange(self.count))
        finally:
            self._wait(self.begun(), rows)
        return rows


class _View(DeviceBuffer):
    """Another buffer's blocks, seen in another way. Copies and streams are those of the buffer."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks

    @property
    def shape(self) -> BlockShape:
        return self._blocks.shape

    def check(self, spec: CacheSpec) -> None:
        self._blocks.check(spec)

    def pool_gap(self, memory: PoolMemory) -> str:
        return self._blocks.pool_gap(memory)

    def begun(self) -> Sequence[CopyEvent]:
        return self._blocks.begun()

    def drain(self, begun: Sequence[CopyEvent] | None = None) -> None:
        self._blocks.drain(begun)

    def wait_on_stream(self, layer: int) -> None:
        self._blocks.wait_on_stream(layer)


class BlockSource(_View):
    """Read-only view of blocks. Their bytes are copied to host memory at the first access."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        self._rows: npt.NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return self._blocks.count

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        with self._lock:
            if self._rows is None:
                self._rows = self._blocks.gather()
        size = self.shape.layer_block_bytes
        return (self._rows[block, first_layer * size : (first_layer + layer_count) * size].data,)

    def read_arena(self, *_: object) -> None:
        raise InvalidArgument("a source is read-only")

    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        self._blocks.write_arena(arena, offsets)

    def read_pool(self, *_: object) -> None:
        raise InvalidArgument("a source is read-only")

    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        self._blocks.write_pool(memory, offsets)

    def begin_checksums(self, first: int, count: int, first_layer: int, layer_count: int) -> DeviceChecksums | None:
        return self._blocks.begin_checksums(first, count, first_layer, layer_count)

    def host_copy_ready(self, *_: object) -> None:
        raise InvalidArgument("a source is read-only")

    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        return _PickedSource(self, self._blocks, np.asarray(blocks, np.intp))

    def source(self) -> BlockSource:
        return self


class _Picked(_View):
    """Some blocks of a buffer, without a copy."""

    def __init__(self, blocks: DeviceBlocks, which: Positions) -> None:
        super().__init__(blocks)
        self._which = which

    @property
    def count(self) -> int:
        return len(self._which)

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        return self._blocks.segments(int(self._which[block]), first_layer, layer_count)

    def read_arena(self, arena: memoryview, offsets: Offsets, first: int, first_layer: int, layer_count: int) -> None:
        self._blocks.read_at(arena, offsets, self._which[first : first + len(offsets)], first_layer, layer_count)

    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        self._blocks.write_at(arena, offsets, self._which)

    def read_pool(self, memory: PoolMemory, offsets: Offsets, first: int) -> None:
        self._blocks.read_pool_at(memory, offsets, self._which[first : first + len(offsets)])

    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        self._blocks.write_pool_at(memory, offsets, self._which)

    def begin_checksums(self, first: int, count: int, first_layer: int, layer_count: int) -> DeviceChecksums | None:
        return self._blocks.checksums_at(self._which[first : first + count], first_layer, layer_count)

    def host_copy_ready(self, positions: Positions, first_layer: int, layer_count: int) -> None:
        self._blocks.host_copy_ready(self._which[positions], first_layer, layer_count)

    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        return _Picked(self._blocks, self._which[np.asarray(blocks, np.intp)])

    def source(self) -> DeviceBuffer:
        return self._blocks.source().pick(self._which.tolist())


class _PickedSource(_Picked):
    """Some blocks of a source."""

    def __init__(self, source: BlockSource, blocks: DeviceBlocks, which: Positions) -> None:
        super().__init__(blocks, which)
        self._source = source

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        return self._source.segments(int(self._which[block]), first_layer, layer_count)

    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        return _PickedSource(self._source, self._blocks, self._which[np.asarray(blocks, np.intp)])

    def source(self) -> DeviceBuffer:
        return self
