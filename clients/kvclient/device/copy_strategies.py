"""Ways between host memory and pages, all of the same contract: everything is enqueued, nothing is waited for.

* ``staged``: copy engines bring layers of many blocks into one of two staging buffers, and one launch a layer moves them into
  pages, while the next copy runs. The only one that can convert on the way, and that takes memory which is not pinned.
* ``batched``: one driver call a layer names every page (CUDA 12.8): copy engines write straight into pages.
* ``direct``: one kernel a layer reads pinned memory over the bus. Takes multiprocessors from whoever computes.

Each way has streams of its own, and each direction has a way of its own, so that stores hold up no load. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvclient.device.copy_plan import Numbers, cut_batch, layers_at_once, rows_of, runs_of
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.pinned_range import PinnedRange
from kvclient.device.streams import Device, DeviceStream, Event

OnLayer = Callable[[int, Event], None]
"""``on_layer(layer, event)``: behind the event, a layer of all blocks is in its pages."""


class Codec(Protocol):
    """What the store keeps of a row, if not the row itself. Runs on the device; enqueues only."""

    name: str
    """As part of the layout of a namespace; changes with any change of the bytes."""
    dtype_name: str

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes that the store keeps of a row."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows, uint8 ``[blocks, row_bytes]``, as the store keeps them: uint8 ``[blocks, coded_bytes]``."""

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """The rows again."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that blocks lie in.

    Attributes:
        base: where the pinned range begins, or anywhere at or before the blocks.
        pins: what of it is pinned; None: nothing.
    """

    base: int
    pins: PinnedRange | None

    def chunk_of(self, starts: Numbers, nbytes: int) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """See ``plan.ChunkOf``."""
        if self.pins is None:
            return np.zeros(len(starts), np.int64), np.zeros(len(starts), bool)
        return self.pins.chunk_of(starts, nbytes)

    def chunk_end(self, chunk: int) -> int:
        """Address behind a chunk."""
        assert self.pins is not None
        return self.base + (chunk + 1) * self.pins.chunk_bytes


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """What is copied.

    Attributes:
        host: whose memory the blocks lie in.
        starts: address of each Full Block, or of its first layer here.
        pitch: bytes of a Full Block.
        page_ids: int64 ``[blocks * pages_per_block]``, on the host.
        first_layer: of the cache: layers ``[first_layer, first_layer + layers)`` are copied.
        layers: how many.
        shift: bytes from the start of a block to ``first_layer``.
        after: the pages may be touched behind this event.
    """

    host: HostMemory
    starts: Numbers
    pitch: int
    page_ids: torch.Tensor
    first_layer: int
    layers: int
    shift: int
    after: Event

    def __len__(self) -> int:
        return len(self.starts)


class CopyStrategy(Protocol):
    """One way, in one direction. Whatever it has begun before it raises is behind the events of ``record``."""

    name: str

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        """Enqueues the copies from host memory into pages.

        Raises:
            Internal: the device refused; some copies may have begun.
            Unsupported: it has no copies of this way, as it turns out.
        """

    def store(self, blocks: CopyRequest) -> None:
        """Enqueues the copies from pages into host memory; errors as ``load``."""

    def record(self) -> list[Event]:
        """Events behind all that has been enqueued."""


def uploaded(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on the device. Out of pinned memory, or torch would wait here for all that the stream has to do."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


# ---- staged ----


class _StagingBuffer:
    """A staging buffer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free: Event | None = None
        """Behind the last use."""


class StagedCopy:
    """See the module.

    Args:
        device: where the cache lies.
        cache: its pages.
        mover: between staging buffer and pages.
        codec: what the store keeps; None: rows as they are.
        staging_bytes: of each of two buffers; at least a row.
    """

    name = "staged"

    def __init__(self, device: Device, cache: PagedCache, mover: PageScatter, codec: Codec | None, staging_bytes: int) -> None:
        self._cache = cache
        self._mover = mover
        self._codec = codec
        self._device = device
        self._row = codec.coded_bytes(cache.row_bytes) if codec is not None else cache.row_bytes
        self._room = max(staging_bytes, self._row)
        self._copies = device.stream()
        self._moves = device.stream()
        self._slots: list[_StagingBuffer] = []

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        ids = self._ids(blocks)
        runs = runs_of(blocks.starts, blocks.pitch)
        group = min(layers_at_once(blocks.layers, len(blocks), runs), max(1, self._room // self._row))
        for first in range(0, blocks.layers, group):
            layers = range(first, min(first + group, blocks.layers))
            step = max(1, self._room // (len(layers) * self._row))
            for begin in range(0, len(blocks), step):
                end = min(begin + step, len(blocks))
                with self._using(self._copies, self._moves) as slot:
                    self._copy(blocks, slot, layers, begin, end, to_device=True)
                    self._moves.wait(self._copies.record())
                    for number in layers:
                        rows = self._rows(slot, layers, number, end - begin)
                        self._moves.run(partial(self._scatter, blocks.first_layer + number, rows, ids, begin, end))
                        if end == len(blocks):
                            on_layer(blocks.first_layer + number, self._moves.record())

    def store(self, blocks: CopyRequest) -> None:
        ids = self._ids(blocks)
        # whole blocks where they fit: those are contiguous on the host's side
        group = min(blocks.layers, max(1, self._room // self._row))
        for first in range(0, blocks.layers, group):
            layers = range(first, min(first + group, blocks.layers))
            step = max(1, self._room // (len(layers) * self._row))
            for begin in range(0, len(blocks), step):
                end = min(begin + step, len(blocks))
                with self._using(self._moves, self._copies) as slot:
                    for number in layers:
                        rows = self._rows(slot, layers, number, end - begin)
                        self._moves.run(partial(self._gather, blocks.first_layer + number, rows, ids, begin, end))
                    self._copies.wait(self._moves.record())
                    self._copy(blocks, slot, layers, begin, end, to_device=False)

    def record(self) -> list[Event]:
        return [self._copies.record(), self._moves.record()]

    def _ids(self, blocks: CopyRequest) -> list[torch.Tensor]:
        """Page ids on the device, in a box that is filled in the order of the moves: only they look into it."""
        box: list[torch.Tensor] = []
        self._moves.run(lambda: box.append(uploaded(blocks.page_ids, self._cache.device)))
        self._moves.wait(blocks.after)
        return box

    @contextmanager
    def _using(self, fills: DeviceStream, empties: DeviceStream) -> Iterator[_StagingBuffer]:
        """A staging buffer, from its last use on. What was begun with it is waited for by its next, also where only part was."""
        slot = self._slot()
        if slot.free is not None:
            fills.wait(slot.free)
        try:
            yield slot
        finally:
            empties.wait(fills.record())
            slot.free = empties.record()

    def _slot(self) -> _StagingBuffer:
        if not self._slots:
            self._slots = [
                _StagingBuffer(torch.empty(self._room, dtype=torch.uint8, device=self._cache.device)) for _ in range(2)
            ]
            ready = self._device.mark()  # what had the memory before may still be at work
            self._copies.wait(ready)
            self._moves.wait(ready)
        self._slots.reverse()
        return self._slots[0]

    def _rows(self, slot: _StagingBuffer, layers: range, number: int, count: int) -> torch.Tensor:
        """One layer of the rows in a buffer."""
        width = len(layers) * self._row
        at = (number - layers.start) * self._row
        return slot.memory[: count * width].view(count, width)[:, at : at + self._row]

    def _copy(self, blocks: CopyRequest, slot: _StagingBuffer, layers: range, begin: int, end: int, *, to_device: bool) -> None:
        width = len(layers) * self._row
        starts = blocks.starts[begin:end] + (blocks.shift + layers.start * self._row)
        staging = slot.memory.data_ptr()
        host = blocks.host
        for rows in rows_of(starts, width, blocks.pitch, host.chunk_of, host.chunk_end):
            near, far = staging + rows.first * width + rows.shift, int(starts[rows.first]) + rows.shift
            size, count = rows.width, rows.count
            if blocks.pitch == width:
                size, count = size * count, 1  # one stretch on both sides
            if to_device:
                self._copies.copy_rows(near, width, far, blocks.pitch, size, count)
            else:
                self._copies.copy_rows(far, blocks.pitch, near, width, size, count)

    def _scatter(self, layer: int, rows: torch.Tensor, ids: list[torch.Tensor], begin: int, end: int) -> None:
        each = self._cache.pages_per_block
        if self._codec is not None:
            rows = self._codec.decode(rows)
        self._mover.to_pages(layer, rows, ids[0][begin * each : end * each])

    def _gather(self, layer: int, rows: torch.Tensor, ids: list[torch.Tensor], begin: int, end: int) -> None:
        each = self._cache.pages_per_block
        part = ids[0][begin * each : end * each]
        if self._codec is None:
            self._mover.to_rows(layer, part, rows)
            return
        plain = torch.empty((end - begin, self._cache.row_bytes), dtype=torch.uint8, device=rows.device)
        self._mover.to_rows(layer, part, plain)
        rows.copy_(self._codec.encode(plain))


# ---- batched ----


class BatchedCopy:
    """See the module.

    Args:
        device: where the cache lies; knows batched copies.
        cache: its pages.
    """

    name = "batched"

    def __init__(self, device: Device, cache: PagedCache) -> None:
        self._cache = cache
        self._copies = device.stream()

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        self._copies.wait(blocks.after)
        for number in range(blocks.layers):
            self._layer(blocks, number, to_device=True)
            on_layer(blocks.first_layer + number, self._copies.record())

    def store(self, blocks: CopyRequest) -> None:
        self._copies.wait(blocks.after)
        for number in range(blocks.layers):
            self._layer(blocks, number, to_device=False)

    def record(self) -> list[Event]:
        return [self._copies.record()]

    def _layer(self, blocks: CopyRequest, number: int, *, to_device: bool) -> None:
        cache = self._cache
        layer, page = cache.layers[blocks.first_layer + number], cache.page
        parts = np.arange(page.parts)
        ids = blocks.page_ids.numpy()
        pages = (layer.address + ids[:, None] * layer.page_stride + parts * layer.part_stride).reshape(-1)
        each = np.arange(cache.pages_per_block * page.parts) * page.part_bytes
        rows = (blocks.starts[:, None] + (blocks.shift + number * cache.row_bytes) + each).reshape(-1)
        sizes = np.full(len(rows), page.part_bytes, np.int64)
        targets, sources = (pages, rows) if to_device else (rows, pages)
        host = blocks.host
        if host.pins is not None:
            targets, sources, sizes = cut_batch(targets, sources, sizes, rows, host.pins.chunk_bytes, host.base)
        self._copies.copy_batch(targets, sources, sizes)


# ---- direct ----


class DirectCopy:
    """See the module.

    Args:
        device: where the cache lies; reads host memory.
        cache: its pages.
    """

    name = "direct"

    def __init__(self, device: Device, cache: PagedCache) -> None:
        from kvclient.device.triton_scatter import TritonScatter  # only who goes this way needs Triton

        self._cache = cache
        self._mover = TritonScatter(cache)
        self._moves = device.stream()

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        move = self._begin(blocks)
        for number in range(blocks.layers):
            self._moves.run(partial(move, number, to_pages=True))
            on_layer(blocks.first_layer + number, self._moves.record())

    def store(self, blocks: CopyRequest) -> None:
        move = self._begin(blocks)
        for number in range(blocks.layers):
            self._moves.run(partial(move, number, to_pages=False))

    def record(self) -> list[Event]:
        return [self._moves.record()]

    def _begin(self, blocks: CopyRequest) -> Callable[..., None]:
        cache, base = self._cache, blocks.host.base + blocks.shift
        away = blocks.starts - blocks.host.base
        word = math.gcd(cache.word, base, cache.row_bytes, int(np.gcd.reduce(away)) if len(away) else 0)
        table: list[torch.Tensor] = []
        parts = (torch.from_numpy(away // word), blocks.page_ids)
        self._moves.run(lambda: table.extend(uploaded(part, cache.device) for part in parts))
        self._moves.wait(blocks.after)

        def move(number: int, *, to_pages: bool) -> None:
            at = base + number * cache.row_bytes
            self._mover.by_table(blocks.first_layer + number, at, table[0], table[1], word=word, to_pages=to_pages, host=True)

        return move
