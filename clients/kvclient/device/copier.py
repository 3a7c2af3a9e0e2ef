"""Copies between the node's arena and an engine's paged KV cache: which way they go, and what is pinned for them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockShape, CacheSpec, InvalidArgument
from kvclient.device.blocks import DeviceBlocks, PageRange
from kvclient.device.copy_plan import Numbers
from kvclient.device.copy_strategies import (
    BatchedCopy,
    Codec,
    CopyRequest,
    CopyStrategy,
    DirectCopy,
    HostMemory,
    OnLayer,
    StagedCopy,
    uploaded,
)
from kvclient.device.fp8 import Fp8Codec
from kvclient.device.layouts import LAYOUT_VERSION, PagedCache, check_spec
from kvclient.device.page_scatter import PageScatter, TorchScatter
from kvclient.device.pinned_range import CHUNK_BYTES, PinnedRange, PinReport, cpus_near
from kvclient.device.pool_copy import PoolCopy, PoolCopyRequest
from kvclient.device.streams import CpuDevice, CudaDevice, Device, Event
from kvstore.core.errors import Internal, Unsupported
from kvstore.observe.counters import Counters
from kvstore.transport.layout import address_of

_log = logging.getLogger(__name__)

StrategyName = Literal["auto", "staged", "batched", "direct"]
STRATEGIES = ("auto", "staged", "batched", "direct")
DRAIN_S = 10.0
"""Copies that have not come to an end by then, once they could begin, never will: the device is lost."""
COMPUTE_S = 300.0
"""Longer than any step computes. What copies wait for that has not ended by then never will."""
_NAP_S = 50e-6


class DeviceCopier:
    """The copies of one KV cache. Thread-safe; make it after forking. ``KVClient.connect(…, device=copier)``.

    Args:
        cache: the engine's pages.
        strategy: one of ``kvclient.device.copy_strategies``. ``auto`` is ``batched`` if the driver supports it, else ``staged``;
            neither uses multiprocessors.
        fp8: store a 16-bit cache as 8-bit floats; see ``kvclient.device.fp8``. Whoever shares blocks must choose the same.
        staging_bytes: of each of four staging buffers, made when first used.
        pin: pin arenas for the device as they are mapped.
        pin_chunk_bytes: pinned at a time.
        device: where the cache lies, if it is to be told.

    Raises:
        InvalidArgument: an impossible choice, or one that this device, driver or installation cannot carry out.
        Unavailable: the cache lies on a CUDA device that has no driver.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        strategy: StrategyName = "auto",
        fp8: bool = False,
        staging_bytes: int = 32 << 20,
        pin: bool = True,
        pin_chunk_bytes: int = CHUNK_BYTES,
        device: Device | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise InvalidArgument("unknown strategy", strategy=strategy, known=", ".join(STRATEGIES))
        for name, size in (("staging_bytes", staging_bytes), ("pin_chunk_bytes", pin_chunk_bytes)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidArgument("a size is a whole number of bytes above 0", name=name, got=size)
        self.cache = cache
        self.device = device or (CudaDevice(cache.device) if cache.device.type == "cuda" else CpuDevice())
        self.codec: Codec | None = Fp8Codec(cache) if fp8 else None
        row = cache.row_bytes
        self.shape = BlockShape(len(cache.layers), row if self.codec is None else self.codec.coded_bytes(row))
        self.counters = Counters()
        self._layout = f"paged/{cache.name}" + (f"/{self.codec.name}" if self.codec is not None else "")
        self._dtype_name = self.codec.dtype_name if self.codec is not None else cache.dtype_name
        self._layout_version = LAYOUT_VERSION
        self._checked: CacheSpec | None = None
        """The namespace that was found right last."""
        self.strategy = self._choose(strategy)
        # a copy may reach over one border, not over two
        self._chunk_bytes = max(pin_chunk_bytes, self.shape.block_bytes)
        self._pin = pin and self.device.pinning is not None
        self._lock = threading.Lock()
        self._ranges: dict[int, PinnedRange] = {}
        self._stuck: list[Event] = []
        self._kept: list[npt.NDArray[np.uint8]] = []
        mover = self._mover()
        self._lanes = [
            _CopyDirection(
                self._make(self.strategy, mover, staging_bytes),
                self._make("staged", mover, staging_bytes),
                PoolCopy(self.device, cache, mover),
            )
            for _ in range(2)
        ]
        _log.info("copies to %s: %s, layout %s", cache.device, self.strategy, self.layout)

    def _choose(self, strategy: StrategyName) -> str:
        if strategy == "auto":
            return "batched" if self.device.has_batch and self.codec is None else "staged"
        if strategy != "staged" and self.codec is not None:
            raise InvalidArgument("only staged copies can quantise", strategy=strategy)
        if strategy == "batched" and not self.device.has_batch:
            raise InvalidArgument("this driver has no batched copies: they came with CUDA 12.8")
        if strategy == "direct" and not self.device.reads_host:
            raise InvalidArgument("kernels on this device do not reach pinned host memory at its own address")
        return strategy

    def _mover(self) -> PageScatter:
        if self.device.memory.type != "cuda":
            return TorchScatter(self.cache)
        try:
            from kvclient.device.triton_scatter import TritonScatter

            rows = TritonScatter(self.cache)
            self.device.run(partial(_try_out, rows, self.cache))
        except Exception as error:  # noqa: BLE001  # no Triton, no compiler, a device it does not know: errors of its own kinds
            self.counters.add("device_without_triton_total")
            _log.warning("Triton does not work here (%s): pages are moved by torch's indexing, which takes more launches", error)
            return TorchScatter(self.cache)
        return rows

    def _make(self, name: str, mover: PageScatter, staging_bytes: int) -> CopyStrategy:
        if name == "batched":
            return BatchedCopy(self.device, self.cache)
        if name == "direct":
            if self.device.memory.type == "cuda" and isinstance(mover, TorchScatter):
                raise InvalidArgument("the direct way takes Triton, which does not work here: the log says why")
            try:
                return DirectCopy(self.device, self.cache)
            except ImportError as error:
                raise InvalidArgument("the direct way takes Triton, which is not installed", error=error) from error
        return StagedCopy(self.device, self.cache, mover, self.codec, staging_bytes)

    # ---- the namespace ----
    @property
    def layout(self) -> str:
        """What the namespace's layout must be: page layout, and quantisation, so that neither is ever mixed up."""
        return self._layout

    def rename(self, spec: CacheSpec) -> None:
        """From now on the namespace is one that an engine's hook has named in its own way, for everybody who shares its blocks.

        Args:
            spec: its layout must keep apart what ``PagedCache.name`` does. ``check`` wants its dtype, layout and version.

        Raises:
            InvalidArgument: its blocks are not of this cache's layers and sizes, or the cache is quantised, which no other says.
        """
        if self.codec is not None or (spec.layers, spec.layer_block_bytes) != (self.shape.layers, self.shape.layer_block_bytes):
            raise InvalidArgument(
                "the namespace is not that of this KV cache", layers=spec.layers, layer_block_bytes=spec.layer_block_bytes
            )
        self._layout, self._dtype_name, self._layout_version = spec.layout, spec.dtype, spec.layout_version
        self._checked = None

    def spec(self, model: str, block_tokens: int, **fields: object) -> CacheSpec:
        """The namespace of this cache.

        Args:
            model: whose KV it is.
            block_tokens: tokens of a block, that is, of ``pages_per_block`` pages.
            **fields: others of ``CacheSpec``.

        Raises:
            InvalidArgument: impossible values.
        """
        return CacheSpec(
            model=model,
            block_tokens=block_tokens,
            layers=self.shape.layers,
            layer_block_bytes=self.shape.layer_block_bytes,
            dtype=self._dtype_name,
            layout=self.layout,
            layout_version=self._layout_version,
            **fields,  # type: ignore[arg-type]
        )

    def check(self, spec: CacheSpec) -> None:
        """Holds a namespace against the cache. ``KVClient.connect`` does, and every load and store that is given its blocks.

        Raises:
            InvalidArgument: other layers, sizes, dtype or layout.
        """
        if spec is self._checked:  # a client's spec is one object for all of its loads
            return
        check_spec(
            spec,
            layers=self.shape.layers,
            layer_block_bytes=self.shape.layer_block_bytes,
            dtype=self._dtype_name,
            layout=self.layout,
            layout_version=self._layout_version,
        )
        self._checked = spec

    # ---- buffers ----
    @property
    def pages_per_block(self) -> int:
        """Pages of the cache that hold one block."""
        return self.cache.pages_per_block

    def mark(self) -> Event:
        """An event behind what the caller has asked the device to do so far, on its current stream; see ``blocks``."""
        return self.device.mark()

    def blocks(self, page_ids: Sequence[int], *, layer: int | None = None, after: Event | None = None) -> DeviceBlocks:
        """Pages as the buffer of a load or store.

        Args:
            page_ids: ``pages_per_block`` for each block, in order.
            layer: only this one, for stores layer by layer; None: all.
            after: the pages may be touched behind this event; None: behind what the caller has asked the device to do so far.
                Streams belong to threads: who computes in another one gives the event of that one.

        Raises:
            InvalidArgument: no such page or layer, or a page named twice.
        """
        ids = self.cache.check_pages(page_ids)
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.shape.layers):
            raise InvalidArgument("no such layer", layer=layer, layers=self.shape.layers)
        layers = range(self.shape.layers) if layer is None else range(layer, layer + 1)
        return DeviceBlocks(self, ids, layers, self.mark() if after is None else after)

    def clear(self, page_ids: Sequence[int]) -> None:
        """Zeros in some pages: behind what the caller has asked the device to do so far, on its current stream. Does not wait.

        Copies that were given up as they did not end come before it, and before all that the caller asks for from then on: what a
        late one writes is never seen.

        Raises:
            InvalidArgument: as ``blocks``.
            Internal: the device failed.
        """
        ids = self.cache.check_pages(page_ids)
        with self._lock:
            stuck = list(self._stuck)
        for event in stuck:
            if not _done(event):
                self.device.follow(event)

        def zero() -> None:
            there = uploaded(ids, self.cache.device)
            for layer in self.cache.layers:
                layer.words(layer.word).index_fill_(0, there, 0)

        self.device.run(zero)

    def load(self, base: int, starts: Numbers, pitch: int, pages: PageRange, on_layer: OnLayer) -> list[Event]:
        """Begins copies from host memory into pages; for ``DeviceBlocks``.

        Args:
            base: address of an arena, or of other host memory.
            starts: address of each block.
            pitch: bytes of a block there.
            pages: what of them, and into which pages.
            on_layer: told of each layer.

        Returns:
            Events behind all of it.

        Raises:
            Internal: the device failed.
        """
        return self._go(0, base, starts, pitch, pages, on_layer)

    def store(self, base: int, starts: Numbers, pitch: int, pages: PageRange) -> list[Event]:
        """Begins copies from pages into host memory; as ``load``."""
        return self._go(1, base, starts, pitch, pages, None)

    def _go(
        self, direction: int, base: int, starts: Numbers, pitch: int, pages: PageRange, on_layer: OnLayer | None
    ) -> list[Event]:
        lane = self._lanes[direction]
        pins = self._ranges.get(base)
        host = HostMemory(base, pins)
        if not len(starts):
            return []
        width = pages.layers * self.shape.layer_block_bytes
        _, pinned = host.chunk_of(starts + pages.shift, width)
        whole = bool(pinned.all()) or self.device.pinning is None
        moved = len(starts) * width
        names = ("device_loaded_bytes_total", "device_stored_bytes_total")
        self.counters.add(names[direction], moved)
        if not whole:
            self.counters.add("device_unpinned_bytes_total", int(np.count_nonzero(~pinned)) * width)
        blocks = CopyRequest(host, starts, pitch, pages.page_ids, pages.first_layer, pages.layers, pages.shift, pages.after)

        def begin(way: CopyStrategy) -> list[Event]:
            return self._begin(
                lane, way, pages, lambda: way.load(blocks, on_layer) if on_layer is not None else way.store(blocks)
            )

        # memory that is not pinned is taken by ordinary copies alone
        way = lane.way if whole else lane.staged
        try:
            return begin(way)
        except Unsupported as error:
            if way is lane.staged:
                raise Internal("the device has no copies at all", device=self.cache.device, error=error) from error
            self._leave_batches(error)
            return begin(lane.staged)  # what had begun brings the same bytes to the same places, and is waited for

    def _leave_batches(self, error: Unsupported) -> None:
        with self._lock:
            first, self.strategy = self.strategy != "staged", "staged"
            for lane in self._lanes:
                lane.way = lane.staged
        if first:
            self.counters.add("device_batch_refused_total")
            _log.warning("%s does not take batched copies after all, they are staged from now on: %s", self.cache.device, error)

    def pool_gap(self, device: str) -> str:
        """See ``far.FarBlocks.pool_gap``.

        Args:
            device: that the pool lies on.
        """
        if device != str(self.cache.device):
            return f"the pool lies on {device}, the KV cache on {self.cache.device}"
        return "" if self.codec is None else "blocks of 8-bit floats are decoded from host memory alone"

    def load_pool(self, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        """Begins copies from a pool's memory into pages; for ``DeviceBlocks``.

        Args:
            memory: the pool's.
            starts: where in it each block begins, in bytes.
            pages: what of them, and into which pages.

        Returns:
            Events behind all of it.

        Raises:
            Internal: the device failed.
        """
        return self._go_pool(0, memory, starts, pages)

    def store_pool(self, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        """Begins copies from pages into a pool's memory; as ``load_pool``."""
        return self._go_pool(1, memory, starts, pages)

    def _go_pool(self, direction: int, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        if not len(starts):
            return []
        lane = self._lanes[direction]
        names = ("device_pool_loaded_bytes_total", "device_pool_stored_bytes_total")
        self.counters.add(names[direction], len(starts) * pages.layers * self.shape.layer_block_bytes)
        slots = PoolCopyRequest(memory, starts + pages.shift, pages.page_ids, pages.first_layer, pages.layers, pages.after)
        return self._begin(lane, lane.pooled, pages, lambda: lane.pooled.move(slots, to_pages=direction == 0))

    def _begin(
        self, lane: _CopyDirection, way: CopyStrategy | PoolCopy, pages: PageRange, work: Callable[[], None]
    ) -> list[Event]:
        """Enqueues work of one way; events behind it. What had begun where it fails is in ``pages.begun``."""
        with lane.lock:
            if lane.lost:
                raise Internal("the device was lost: nothing is copied any more", device=self.cache.device)
            lane.behind(pages.after)
            try:
                work()
            except BaseException as error:
                pages.begun += way.record()  # what had begun is still waited for
                if not isinstance(error, RuntimeError | Internal):
                    raise  # this thread was interrupted
                self.counters.add("device_errors_total")
                if isinstance(error, Internal):
                    raise
                raise Internal("the device failed", device=self.cache.device, error=error) from error
            return way.record()

    def wait(self, events: Sequence[Event]) -> None:
        """Waits until some copies are done. Bounded: their time begins when what the engine computes before them has ended.

        Raises:
            Internal: the device failed or does not come to an end. It is lost: nothing is copied any more.
        """
        computed = [mark for lane in self._lanes for mark in lane.marks]  # a stream is in order: also those of copies before
        began_s = time.monotonic()
        until_s = began_s + DRAIN_S
        for number, event in enumerate(events):
            try:
                while not event.done() and time.monotonic() < until_s:
                    time.sleep(_NAP_S)  # an event has no wait with a bound
                    computed = [mark for mark in computed if not _done(mark)]
                    if computed:
                        until_s = min(time.monotonic() + DRAIN_S, began_s + COMPUTE_S)
                ended = event.done()
            except Internal:
                self._lose(events[number:])
                raise
            if not ended:
                self._lose(events[number:])
                raise Internal("the device does not come to an end with its copies", device=self.cache.device)

    def wait_on_stream(self, event: Event) -> None:
        """Let the caller's current stream wait for an event."""
        self.device.follow(event)

    def keep(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Host memory that copies may still touch, as they did not end: it is nobody else's for as long as this process lives."""
        if memory is not None:
            with self._lock:
                self._kept.append(memory)

    def _lose(self, events: Sequence[Event]) -> None:
        with self._lock:
            first = not any(lane.lost for lane in self._lanes)
            for lane in self._lanes:
                lane.lost = True
            self._stuck.extend(events)
        if first:
            self.counters.add("device_lost_total")
            _log.error("copies to and from %s do not end or failed: it is left alone from now on", self.cache.device)

    # ---- arenas ----
    def mapped(self, arena: memoryview) -> _ArenaPin:
        """A client has mapped an arena: pins it in the background."""
        address = address_of(arena)
        if self._pin:
            pinning = self.device.pinning
            assert pinning is not None
            near = cpus_near(self.device.bus_id)
            pins = PinnedRange(address, len(arena), pinning, self.counters, chunk_bytes=self._chunk_bytes, cpus=near)
            with self._lock:
                self._ranges[address] = pins
        return _ArenaPin(self, address)

    def unmapped(self, address: int) -> bool:
        """An arena is about to be unmapped. False: it must stay."""
        if any(not _done(event) for event in self._stuck):
            return False
        with self._lock:
            pins = self._ranges.pop(address, None)
        return pins is None or pins.close()

    def pin_reports(self) -> list[PinReport]:
        """How pinning of each arena goes."""
        with self._lock:
            return [pins.report() for pins in self._ranges.values()]

    def wait_pinned(self, timeout_s: float) -> bool:
        """Waits until pinning has ended, well or not. False: not in time."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            ranges = list(self._ranges.values())
        return all(pins.wait(max(0.0, until_s - time.monotonic())) for pins in ranges)

    def stats(self) -> dict[str, int]:
        """Totals by name, and how much is pinned."""
        reports = self.pin_reports()
        return {
            **self.counters.snapshot(),
            "device_pinned_bytes": sum(report.bytes_pinned for report in reports),
            "device_arena_bytes": sum(report.bytes_total for report in reports),
            "device_pin_milliseconds": math.ceil(1000 * max((report.seconds for report in reports), default=0.0)),
        }


def _try_out(rows: PageScatter, cache: PagedCache) -> None:
    """One launch, which reads a block's pages: what cannot be compiled or launched shows."""
    ids = torch.arange(cache.pages_per_block, device=cache.device)
    rows.to_rows(0, ids, torch.empty((1, cache.row_bytes), dtype=torch.uint8, device=cache.device))


class _CopyDirection:
    """What one direction has for itself."""

    def __init__(self, way: CopyStrategy, staged: CopyStrategy, pooled: PoolCopy) -> None:
        self.way = way
        self.staged = way if way.name == staged.name else staged
        self.pooled = pooled
        self.lock = threading.Lock()
        self.lost = False
        self.marks: list[Event] = []
        """What the engine computes, and copies that were begun wait for. Replaced, never changed."""

    def behind(self, mark: Event) -> None:
        """Copies begin that wait for a mark."""
        if not any(mark is known for known in self.marks):
            self.marks = [*(known for known in self.marks if not _done(known)), mark]


class _ArenaPin:
    """Of one mapping; see ``far.ArenaPin``."""

    def __init__(self, copier: DeviceCopier, address: int) -> None:
        self._copier = copier
        self._address = address

    def close(self) -> bool:
        return self._copier.unmapped(self._address)


def _done(event: Event) -> bool:
    try:
        return event.done()
    except Internal:  # the device is gone, and with it whatever it might have written
        return True
