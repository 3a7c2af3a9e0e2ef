"""Copy strategies between host memory and pages. All of them only enqueue work; none waits.

* ``staged``: copy engines move layers of many blocks into one of two staging buffers, and one launch per layer moves them into
  pages, while the next copy runs. The only strategy that converts bytes and that reads unpinned memory.
* ``batched``: one driver call per layer names every page (CUDA 12.8); copy engines write directly into pages.
* ``direct``: one kernel per layer reads pinned memory over the bus. It uses multiprocessors that the model could use.

Each strategy has its own streams, and each direction has its own strategy, so that stores do not delay loads. Not thread-safe.
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
from kvclient.device.pins.pinned_range import PinnedRange
from kvclient.device.streams import Device, DeviceStream, Event
from kvstore.core.errors import Internal

OnLayer = Callable[[int, Event], None]
"""``on_layer(layer, event)``: after the event, one layer of all blocks is in its pages."""


class Codec(Protocol):
    """Conversion between rows and the bytes that the store keeps. Runs on the device; only enqueues."""

    name: str
    """Part of the layout of a namespace; changes with any change of the bytes."""
    dtype_name: str

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes that the store keeps per row."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows, uint8 ``[blocks, row_bytes]``, to uint8 ``[blocks, coded_bytes]``."""

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """Decode to rows."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that contains blocks.

    Attributes:
        base: start of the pinned range, or any address at or before the blocks.
        pins: pinned chunks of it; None: nothing is pinned.
    """

    base: int
    pins: PinnedRange | None

    def chunk_of(self, starts: Numbers, nbytes: int) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """See ``copy_plan.ChunkOf``."""
        if self.pins is None:
            return np.zeros(len(starts), np.int64), np.zeros(len(starts), bool)
        return self.pins.chunk_of(starts, nbytes)

    def chunk_end(self, chunk: int) -> int:
        """Address after a chunk."""
        assert self.pins is not None
        return self.base + (chunk + 1) * self.pins.chunk_bytes


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Blocks and pages of one copy.

    Attributes:
        host: host memory that contains the blocks.
        starts: address of each full block, or of its first layer here.
        pitch: bytes of a full block.
        page_ids: int64 ``[blocks * pages_per_block]``, on the host.
        first_layer: of the cache: layers ``[first_layer, first_layer + layers)`` are copied.
        layers: number of layers.
        shift: bytes from the start of a block to ``first_layer``.
        after: the pages may be accessed after this event.
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
    """One strategy, in one direction. If a call raises, the work that it began is before the events of ``record``."""

    name: str

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        """Enqueue copies from host memory into pages.

        Raises:
            Internal: the device refused; some copies may have begun.
            Unsupported: the device does not support this strategy.
        """

    def store(self, blocks: CopyRequest) -> None:
        """Enqueue copies from pages into host memory; errors as ``load``."""

    def record(self) -> list[Event]:
        """Events after all enqueued work."""


def uploaded(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device. From pinned memory, because torch would otherwise wait here for the whole stream."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


# ---- staged ----


class _StagingBuffer:
    """A staging buffer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free: Event | None = None
        """After the last use."""
        self.lost = False
        """No event could be recorded after the last use, so the buffer may be in use for ever."""


class StagedCopy:
    """Strategy ``staged``; see the module.

    Args:
        device: device of the cache.
        cache: its pages.
        mover: moves rows between staging buffer and pages.
        codec: encoding of the store; None: rows are stored unchanged.
        staging_bytes: size of each of two buffers; at least a row is allocated.
    """

    name = "staged"

    def __init__(self, device: Device, cache: PagedCache, mover: PageScatter, codec: Codec | None, staging_bytes: int) -> None:
        self._cache = cache
        self._mover = mover
        self._codec = codec
        self._device = device
        self._row = codec.coded_bytes(cache.row_bytes) if codec is not None else cache.row_bytes
        self._space = max(staging_bytes, self._row)
        self._copies = device.stream()
        self._moves = device.stream()
        self._slots: list[_StagingBuffer] = []

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        ids = self._ids(blocks)
        runs = runs_of(blocks.starts, blocks.pitch)
        group = min(layers_at_once(blocks.layers, len(blocks), runs), max(1, self._space // self._row))
        for first in range(0, blocks.layers, group):
            layers = range(first, min(first + group, blocks.layers))
            step = max(1, self._space // (len(layers) * self._row))
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
        # whole blocks if they fit: these are contiguous in host memory
        group = min(blocks.layers, max(1, self._space // self._row))
        for first in range(0, blocks.layers, group):
            layers = range(first, min(first + group, blocks.layers))
            step = max(1, self._space // (len(layers) * self._row))
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
        """Page ids on the device, in a list that is filled in stream order: only the moves read it."""
        box: list[torch.Tensor] = []
        self._moves.run(lambda: box.append(uploaded(blocks.page_ids, self._cache.device)))
        self._moves.wait(blocks.after)
        return box

    @contextmanager
    def _using(self, fills: DeviceStream, empties: DeviceStream) -> Iterator[_StagingBuffer]:
        """Yield a staging buffer after its last use.

        Its next user waits for the work begun here, even if only part of it was enqueued.
        """
        slot = self._slot()
        if slot.lost:
            raise Internal("a staging buffer is lost: the device rejected an event", device=self._cache.device)
        if slot.free is not None:
            fills.wait(slot.free)
        try:
            yield slot
        finally:
            slot.lost = True
            empties.wait(fills.record())
            slot.free = empties.record()
            slot.lost = False

    def _slot(self) -> _StagingBuffer:
        if not self._slots:
            self._slots = [
                _StagingBuffer(torch.empty(self._space, dtype=torch.uint8, device=self._cache.device)) for _ in range(2)
            ]
            ready = self._device.mark()  # earlier users of the memory may still run
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
            on_device, on_host = staging + rows.first * width + rows.shift, int(starts[rows.first]) + rows.shift
            size, count = rows.width, rows.count
            if blocks.pitch == width:
                size, count = size * count, 1  # contiguous on both sides
            if to_device:
                self._copies.copy_rows(on_device, width, on_host, blocks.pitch, size, count)
            else:
                self._copies.copy_rows(on_host, blocks.pitch, on_device, width, size, count)

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
    """Strategy ``batched``; see the module.

    Args:
        device: device of the cache; supports batched copies.
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
    """Strategy ``direct``; see the module.

    Args:
        device: device of the cache; its kernels can read host memory.
        cache: its pages.
    """

    name = "direct"

    def __init__(self, device: Device, cache: PagedCache) -> None:
        from kvclient.device.triton_scatter import TritonScatter  # the other strategies do not need Triton

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
