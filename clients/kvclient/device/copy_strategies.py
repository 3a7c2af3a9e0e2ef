"""Copy strategies between host memory and pages. All of them only enqueue work; none waits.

* ``staged``: copy engines move layers of many blocks into one of two staging buffers, and one launch per buffer moves them into
  pages, while the next copy runs. The only strategy that converts bytes and that reads unpinned memory.
* ``batched``: one driver call names all pages of some layers (CUDA 12.8); copy engines write directly into pages. As
  ``batched_ahead``, loads allow the driver to read blocks ahead of the stream, and ask it to leave multiprocessors to kernels.
* ``direct``: one kernel per group of layers reads pinned memory over the bus. It uses multiprocessors that the model could use.

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

from kvclient.device.copy_plan import PIECE_BYTES, Numbers, cut_batch, layer_groups, rows_of, staging_plan
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.pins.pinned_range import PinnedRange
from kvclient.device.streams import Device, DeviceStream, Event
from kvstore.core.errors import Internal, Unsupported

_BATCH_PIECES = 1024
"""Pieces that are worth a call of the driver."""
_LAUNCH_BYTES = 16 << 20
"""Bytes over the bus that are worth a launch."""
JOINED_BYTES = 512 << 10
"""Length of a piece of several layers in one batch, if they are neighbours in a page.

Longer pieces are no faster (``PIECE_BYTES``), and the first layers would arrive later: each piece has its own event.
"""
_CODED_BYTES = {"cpu": 1 << 20}
"""Bytes of rows that a codec converts at a time, by type of device: with all intermediate results they fit into a CPU's cache."""
_CODED_BYTES_ELSEWHERE = 16 << 20
"""On other devices: intermediate results take five times as much of their memory."""

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

    def cut(self, targets: Numbers, sources: Numbers, sizes: Numbers, host: Numbers) -> tuple[Numbers, ...]:
        """Divide copies at the borders of pinned chunks; see ``copy_plan.cut_batch``."""
        if self.pins is None:
            return targets, sources, sizes
        return cut_batch(targets, sources, sizes, host, self.pins.chunk_bytes, self.base)


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
        pinned: whether all of these blocks are in pinned memory, or the device needs no pins.
    """

    host: HostMemory
    starts: Numbers
    pitch: int
    page_ids: torch.Tensor
    first_layer: int
    layers: int
    shift: int
    after: Event
    pinned: bool = False

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
        """No event could be recorded after the last use, so the end of that use is unknown."""


class StagedCopy:
    """Strategy ``staged``; see the module.

    Args:
        device: device of the cache.
        cache: its pages.
        mover: moves rows between staging buffer and pages.
        codec: encoding of the store; None: rows are stored unchanged.
        staging_bytes: size of each of two buffers; at least a row is allocated.
        on_refused: called with the error if the device turns out to support no batched copies. Rows are then copied one by one.
    """

    name = "staged"

    def __init__(
        self,
        device: Device,
        cache: PagedCache,
        mover: PageScatter,
        codec: Codec | None,
        staging_bytes: int,
        on_refused: Callable[[Unsupported], None] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._mover = mover
        self._codec = codec
        self._device = device
        self._on_refused = on_refused
        self._batches = device.has_batch
        self._row = codec.coded_bytes(cache.row_bytes) if codec is not None else cache.row_bytes
        self._space = max(staging_bytes, self._row)
        self._copies = device.stream()
        self._moves = device.stream()
        self._slots: list[_StagingBuffer] = []

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        ids = self._ids(blocks)
        # without batches each piece costs a call: then whole blocks, and no layer before the others
        piece = PIECE_BYTES if blocks.pinned and self._batches else self._space
        for layers, some in staging_plan(len(blocks), blocks.layers, self._row, self._space, piece):
            with self._using(self._copies, self._moves) as slot:
                self._copy(blocks, slot, layers, some, to_device=True)
                self._moves.wait(self._copies.record())
                self._moves.run(
                    partial(self._scatter, blocks.first_layer + layers.start, self._rows(slot, layers, some), ids, some)
                )
                if some.stop == len(blocks):
                    there = self._moves.record()
                    for number in layers:
                        on_layer(blocks.first_layer + number, there)

    def store(self, blocks: CopyRequest) -> None:
        ids = self._ids(blocks)
        for layers, some in staging_plan(len(blocks), blocks.layers, self._row, self._space, self._space):
            with self._using(self._moves, self._copies) as slot:
                self._moves.run(
                    partial(self._gather, blocks.first_layer + layers.start, self._rows(slot, layers, some), ids, some)
                )
                self._copies.wait(self._moves.record())
                self._copy(blocks, slot, layers, some, to_device=False)

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

    def _rows(self, slot: _StagingBuffer, layers: range, some: range) -> torch.Tensor:
        """Rows in a buffer: ``[blocks, layers, bytes of a row]``."""
        return slot.memory[: len(some) * len(layers) * self._row].view(len(some), len(layers), self._row)

    def _copy(self, blocks: CopyRequest, slot: _StagingBuffer, layers: range, some: range, *, to_device: bool) -> None:
        width = len(layers) * self._row
        starts = blocks.starts[some.start : some.stop] + (blocks.shift + layers.start * self._row)
        if blocks.pinned and self._batches and len(some) > 1:
            try:
                self._copy_batch(blocks, slot, starts, width, to_device=to_device)
            except Unsupported as error:
                self._batches = False
                self._on_refused(error)
            else:
                return
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

    def _copy_batch(self, blocks: CopyRequest, slot: _StagingBuffer, starts: Numbers, width: int, *, to_device: bool) -> None:
        heads = np.flatnonzero(np.diff(starts, prepend=starts[0] - width - 1) != width)  # neighbours are one piece
        sizes = np.diff(heads, append=len(starts)) * width
        on_host, on_device = starts[heads], slot.memory.data_ptr() + heads * width
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        self._copies.copy_batch(*blocks.host.cut(targets, sources, sizes, on_host))

    def _scatter(self, first_layer: int, rows: torch.Tensor, ids: list[torch.Tensor], some: range) -> None:
        if self._codec is None:
            self._mover.to_pages(first_layer, rows, self._part(ids, some))
            return
        for blocks, layers in self._pieces(rows):
            piece = rows[blocks.start : blocks.stop, layers.start : layers.stop]
            plain = self._codec.decode(piece.reshape(-1, self._row)).view(*piece.shape[:2], self._cache.row_bytes)
            self._mover.to_pages(first_layer + layers.start, plain, self._part(ids, some[blocks.start : blocks.stop]))

    def _gather(self, first_layer: int, rows: torch.Tensor, ids: list[torch.Tensor], some: range) -> None:
        if self._codec is None:
            self._mover.to_rows(first_layer, self._part(ids, some), rows)
            return
        for blocks, layers in self._pieces(rows):
            piece = rows[blocks.start : blocks.stop, layers.start : layers.stop]
            plain = torch.empty((*piece.shape[:2], self._cache.row_bytes), dtype=torch.uint8, device=rows.device)
            self._mover.to_rows(first_layer + layers.start, self._part(ids, some[blocks.start : blocks.stop]), plain)
            piece.copy_(self._codec.encode(plain.view(-1, self._cache.row_bytes)).view(piece.shape))

    def _pieces(self, rows: torch.Tensor) -> Iterator[tuple[range, range]]:
        """Divide rows for a codec, whose intermediate results are larger: blocks and layers of each piece.

        Rather many blocks than many layers, since torch indexing has a call per layer.
        """
        most = max(1, _CODED_BYTES.get(rows.device.type, _CODED_BYTES_ELSEWHERE) // self._cache.row_bytes)
        count, layers = rows.shape[:2]
        blocks_each = min(most, count)
        layers_each = most // blocks_each
        for layer in range(0, layers, layers_each):
            for block in range(0, count, blocks_each):
                yield range(block, min(block + blocks_each, count)), range(layer, min(layer + layers_each, layers))

    def _part(self, ids: list[torch.Tensor], some: range) -> torch.Tensor:
        each = self._cache.pages_per_block
        return ids[0][some.start * each : some.stop * each]


# ---- batched ----


def batch_piece_bytes(cache: PagedCache) -> int:
    """Length of the contiguous pieces that ``BatchedCopy`` names for a cache."""
    if not cache.has_joined_layers:
        return cache.page.part_bytes
    return cache.row_bytes * len(layer_groups(len(cache.layers), cache.row_bytes, JOINED_BYTES)[0])


class BatchedCopy:
    """Strategy ``batched``; see the module.

    Args:
        device: device of the cache; supports batched copies.
        cache: its pages.
        ahead: strategy ``batched_ahead``, for loads only: blocks are leased and complete, so they may be read ahead of the
            stream. Pages may still be computed when a store begins, so stores never allow that.
    """

    def __init__(self, device: Device, cache: PagedCache, *, ahead: bool = False) -> None:
        self.name = "batched_ahead" if ahead else "batched"
        self._ahead = ahead
        self._cache = cache
        self._copies = device.stream()
        self._joined = cache.has_joined_layers

    def load(self, blocks: CopyRequest, on_layer: OnLayer) -> None:
        self._copies.wait(blocks.after)
        for layers in self._groups(blocks):
            self._copy(blocks, layers, to_device=True)
            there = self._copies.record()
            for number in layers:
                on_layer(blocks.first_layer + number, there)

    def store(self, blocks: CopyRequest) -> None:
        self._copies.wait(blocks.after)
        for layers in self._groups(blocks):
            self._copy(blocks, layers, to_device=False)

    def record(self) -> list[Event]:
        return [self._copies.record()]

    def _groups(self, blocks: CopyRequest) -> list[range]:
        if self._joined:
            return layer_groups(blocks.layers, self._cache.row_bytes, JOINED_BYTES)
        pieces = len(blocks) * self._cache.pages_per_block * self._cache.page.parts
        return layer_groups(blocks.layers, pieces, _BATCH_PIECES)

    def _copy(self, blocks: CopyRequest, layers: range, *, to_device: bool) -> None:
        cache, page = self._cache, self._cache.page
        count, width = (1, len(layers) * page.part_bytes) if self._joined else (len(layers), page.part_bytes)
        some = cache.layers[blocks.first_layer + layers.start :][:count]
        address, page_stride, part_stride = (
            np.array([getattr(layer, name) for layer in some], np.int64)[:, None, None]
            for name in ("address", "page_stride", "part_stride")
        )
        ids = blocks.page_ids.numpy()[None, :, None]
        pages = (address + ids * page_stride + np.arange(page.parts) * part_stride).reshape(-1)
        within = np.arange(cache.pages_per_block * page.parts) * page.part_bytes
        shifts = blocks.shift + np.arange(layers.start, layers.start + count) * cache.row_bytes
        rows = (shifts[:, None, None] + blocks.starts[None, :, None] + within).reshape(-1)
        sizes = np.full(len(rows), width, np.int64)
        targets, sources = (pages, rows) if to_device else (rows, pages)
        self._copies.copy_batch(*blocks.host.cut(targets, sources, sizes, rows), final_sources=self._ahead and to_device)


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
        move = self._begin(blocks, to_pages=True)
        for layers in layer_groups(blocks.layers, len(blocks) * self._cache.row_bytes, _LAUNCH_BYTES):
            self._moves.run(partial(move, layers))
            there = self._moves.record()
            for number in layers:
                on_layer(blocks.first_layer + number, there)

    def store(self, blocks: CopyRequest) -> None:
        self._moves.run(partial(self._begin(blocks, to_pages=False), range(blocks.layers)))

    def record(self) -> list[Event]:
        return [self._moves.record()]

    def _begin(self, blocks: CopyRequest, *, to_pages: bool) -> Callable[[range], None]:
        cache, base = self._cache, blocks.host.base
        away = blocks.starts + blocks.shift - base
        common = math.gcd(int(np.gcd.reduce(away)), cache.row_bytes) if len(away) else 1
        table: list[torch.Tensor] = []
        parts = (torch.from_numpy(away), blocks.page_ids)
        self._moves.run(lambda: table.extend(uploaded(part, cache.device) for part in parts))
        self._moves.wait(blocks.after)

        def move(layers: range) -> None:
            at = base + layers.start * cache.row_bytes
            first = blocks.first_layer + layers.start
            self._mover.by_table(first, len(layers), at, table[0], common, table[1], to_pages=to_pages, host=True)

        return move
