"""Copies between the node's arena and an engine's paged KV cache: choice of the copy strategy, pinning, loss of the device."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockShape, CacheSpec, InvalidArgument
from kvclient.device.blocks import DeviceBlocks, PageRange
from kvclient.device.calibration.calibrator import CALIBRATE_S, Results
from kvclient.device.calibration.choice import Direction, DirectionChoice
from kvclient.device.calibration.copy_directions import CopyDirection, CopyDirections
from kvclient.device.copy_plan import Numbers
from kvclient.device.copy_strategies import Codec, CopyRequest, CopyStrategy, HostMemory, OnLayer, uploaded
from kvclient.device.int8 import Int8Codec, ScaleGroups
from kvclient.device.layouts import LAYOUT_VERSION, PagedCache, check_spec
from kvclient.device.page_scatter import PageScatter, TorchScatter, try_out
from kvclient.device.pins.copier_pins import CopierArenaPin, CopierPins
from kvclient.device.pins.pinned_range import CHUNK_BYTES, PinReport
from kvclient.device.pool_copy import PoolCopy, PoolCopyRequest
from kvclient.device.streams import CpuDevice, CudaDevice, Device, Event, UnknownEnd, done_or_failed
from kvstore.core.errors import Internal, KVStoreError, Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import device as device_metrics

if TYPE_CHECKING:
    from kvclient.device.triton_checksum import PageHasher, PendingChecksums

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

StrategyName = Literal["auto", "staged", "batched", "direct"]
STRATEGIES = ("auto", "staged", "batched", "direct")
DRAIN_S = 10.0
"""Copies that have not ended this long after they could begin are assumed to hang: the device is lost."""
COMPUTE_S = 300.0
"""Longer than any engine step. Kernels that copies wait for are assumed to hang after this time."""
_NAP_S = 50e-6


class DeviceCopier:
    """The copies of one KV cache. Thread-safe; create it after forking. ``KVClient.connect(…, device=copier)``.

    Args:
        cache: the engine's pages.
        strategy: one of ``kvclient.device.copy_strategies``. ``auto`` is chosen per direction: by ``calibrate``, and by a rule
            until then (see ``kvclient.device.calibration.choice``). With ``int8`` it is ``staged``.
        int8: store a 16-bit cache as 8-bit integers with a scale per group of elements; see ``kvclient.device.int8``. None: as it
            is. All engines that share blocks must use the same value.
        staging_bytes: size of each of four staging buffers, allocated at first use.
        pin: pin arenas for the device as they are mapped.
        pin_chunk_bytes: bytes pinned by one driver call.
        checksums: compute checksums on the device, if Triton works there, ``int8`` is off and layer blocks are longer than 240
            bytes. False: on the host.
        device: the device; None: derived from the cache.

    Raises:
        InvalidArgument: an impossible choice, or one that this device, driver or installation does not support.
        Unavailable: the cache is on a CUDA device and no driver is installed.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        strategy: StrategyName = "auto",
        int8: ScaleGroups | None = None,
        staging_bytes: int = 64 << 20,
        pin: bool = True,
        pin_chunk_bytes: int = CHUNK_BYTES,
        checksums: bool = True,
        device: Device | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise InvalidArgument("unknown strategy", strategy=strategy, known=", ".join(STRATEGIES))
        for name, size in (("staging_bytes", staging_bytes), ("pin_chunk_bytes", pin_chunk_bytes)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidArgument("a size must be a positive integer of bytes", name=name, got=size)
        self.cache = cache
        self.device = device or (CudaDevice(cache.device) if cache.device.type == "cuda" else CpuDevice())
        self.codec: Codec | None = Int8Codec(cache, int8) if int8 is not None else None
        row = cache.row_bytes
        self.shape = BlockShape(len(cache.layers), row if self.codec is None else self.codec.coded_bytes(row))
        self.counters = Counters()
        self._layout = f"paged/{cache.name}" + (f"/{self.codec.name}" if self.codec is not None else "")
        self._dtype_name = self.codec.dtype_name if self.codec is not None else cache.dtype_name
        self._layout_version = LAYOUT_VERSION
        self._checked: CacheSpec | None = None
        """The namespace that passed ``check`` last."""
        self._pins = CopierPins(self.device, self.counters, enabled=pin, chunk_bytes=pin_chunk_bytes, may_unmap=self._may_unmap)
        self._lock = threading.Lock()
        self._suspended = False
        self._stuck: list[Event] = []
        self._kept: list[npt.NDArray[np.uint8]] = []
        mover = self._make_mover()
        self._directions = CopyDirections(
            self.device,
            cache,
            self.codec,
            mover,
            self._pins,
            self.counters,
            strategy=strategy,
            staging_bytes=staging_bytes,
        )
        self._hasher = self._make_hasher() if checksums and not isinstance(mover, TorchScatter) else None
        self._hash_lock = threading.Lock()
        """Held while work of the hasher is enqueued."""
        _log.info(
            "device copies opened: %s (strategy=%s, layout=%s, checksums=%s)",
            cache.device,
            self.strategy,
            self.layout,
            "host" if self._hasher is None else "device",
        )

    def _make_mover(self) -> PageScatter:
        if self.device.memory.type != "cuda":
            return TorchScatter(self.cache)
        try:
            from kvclient.device.triton_scatter import TritonScatter

            rows = TritonScatter(self.cache)
            self.device.run(partial(try_out, TritonScatter, self.cache))
        except Exception as error:  # noqa: BLE001  # no Triton, no compiler or an unknown device: errors of many types
            self.counters.add(device_metrics.DEVICE_WITHOUT_TRITON)
            _log.warning("Triton failed: using torch indexing, which needs more launches (error=%s)", error)
            return TorchScatter(self.cache)
        return rows

    def _make_hasher(self) -> PageHasher | None:
        if self.codec is not None:
            return None
        try:
            from kvclient.device.triton_checksum import LEAST_BYTES, PageHasher

            return PageHasher(self.device, self.cache) if self.cache.row_bytes >= LEAST_BYTES else None
        except Exception as error:  # noqa: BLE001  # a compiler or an unknown device: errors of many types
            self.counters.add(device_metrics.DEVICE_CHECKSUMS_BY_HOST)
            _log.warning("device checksums not used: %s (error=%s); the host computes them", self.cache.device, error)
            return None

    def begin_checksums(self, pages: PageRange, after: Sequence[Event]) -> PendingChecksums | None:
        """Start to hash pages on the device; for ``DeviceBlocks``.

        Args:
            pages: pages and layers.
            after: events after which the pages have their content.

        Returns:
            None: the host must hash the bytes, because the device does not or cannot.
        """
        return self._hash(
            lambda hasher: hasher.begin(
                pages.page_ids, pages.first_layer, pages.layers, [pages.after, *after], lambda event: self.wait([event])
            )
        )

    @property
    def memory_device(self) -> torch.device:
        """Device of the pages."""
        return self.cache.device

    @property
    def hashes(self) -> bool:
        """Whether the device computes checksums. Not while copies are suspended, and not after the device was lost."""
        return self._hasher is not None and not self._suspended and not self._directions.lost

    def begin_memory_checksums(self, memory: torch.Tensor, offsets: npt.NDArray[np.int64]) -> PendingChecksums | None:
        """Start to hash whole blocks in other memory of the device; see ``begin_checksums``.

        Args:
            memory: uint8 ``[bytes]``, which holds the bytes already.
            offsets: offset of each block, in bytes.
        """
        layers = self.shape.layers
        return self._hash(lambda hasher: hasher.begin_memory(memory, offsets, layers, lambda event: self.wait([event])))

    def _hash(self, begin: Callable[[PageHasher], PendingChecksums]) -> PendingChecksums | None:
        with self._hash_lock:
            if self._hasher is None or not self.hashes:
                return None
            try:
                return begin(self._hasher)
            except Internal as error:
                self.counters.add(device_metrics.DEVICE_CHECKSUMS_BY_HOST)
                _limited.warning("device checksums failed: %s (error=%s); the host or node does it", self.cache.device, error)
                return None

    # ---- choice of the strategies ----
    @property
    def strategy(self) -> str:
        """Strategy of loads and stores, as ``load/store`` if they differ."""
        return self._directions.strategy

    @property
    def choices(self) -> Mapping[Direction, DirectionChoice]:
        """The strategy of loads and of stores, why it was chosen, and the measured rates."""
        return self._directions.choices

    def describe(self) -> str:
        """See ``ArenaPinner``."""
        ways = ", ".join(f"{direction} {choice.strategy} ({choice.source})" for direction, choice in self.choices.items())
        return f"{self.cache.device}: {ways}"

    def calibrate(
        self,
        timeout_s: float = CALIBRATE_S,
        *,
        known: MutableMapping[object, Results] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> Mapping[Direction, DirectionChoice]:
        """Measure the strategies with trial copies in memory of their own, and use the fastest; see ``calibration.choice``.

        Only for ``strategy="auto"``, a device that needs pins, and a choice of several strategies; no effect otherwise. Call it
        at the start of an engine, before graphs are captured: other copies disturb the measurement, but nothing else. Errors are
        counted and logged, and a rule decides.

        Args:
            timeout_s: when a rule decides instead.
            known: results by shape of the cache and device, which copiers of one engine share; results are added.
            now_s: a monotonic clock.

        Returns:
            ``choices``.

        Example:
            ``copier.calibrate()["load"].strategy``
        """
        self._directions.calibrate(timeout_s, known=known, suspended=lambda: self._suspended, now_s=now_s)
        return self.choices

    # ---- the namespace ----
    @property
    def layout(self) -> str:
        """Layout that the namespace must have: page layout and quantisation, so that different caches never share blocks."""
        return self._layout

    def rename(self, spec: CacheSpec) -> None:
        """Replace the namespace by one that an engine's hook has named, so that all engines which share its blocks agree.

        Args:
            spec: its layout must distinguish everything that ``PagedCache.name`` does, and contain the codec's name. ``check``
                then requires its dtype, layout and version.

        Raises:
            InvalidArgument: its layers or sizes differ from this cache, or it does not name the codec.
        """
        if (spec.layers, spec.layer_block_bytes) != (self.shape.layers, self.shape.layer_block_bytes):
            raise InvalidArgument(
                "the namespace does not match this KV cache", layers=spec.layers, layer_block_bytes=spec.layer_block_bytes
            )
        if self.codec is not None and (self.codec.name not in spec.layout or spec.dtype != self.codec.dtype_name):
            raise InvalidArgument("the namespace does not name the codec of the blocks", codec=self.codec.name, dtype=spec.dtype)
        self._layout, self._dtype_name, self._layout_version = spec.layout, spec.dtype, spec.layout_version
        self._checked = None

    def spec(self, model: str, block_tokens: int, **fields: object) -> CacheSpec:
        """Build the namespace of this cache.

        Args:
            model: name of the model.
            block_tokens: tokens per block, that is, of ``pages_per_block`` pages.
            **fields: further fields of ``CacheSpec``.

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
        """Check a namespace against the cache. ``KVClient.connect`` and every load and store call it.

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
        """Return an event after all work that the caller has enqueued on its current stream; see ``blocks``."""
        return self.device.mark()

    def blocks(self, page_ids: Sequence[int], *, layer: int | None = None, after: Event | None = None) -> DeviceBlocks:
        """Return pages as the buffer of a load or store.

        Args:
            page_ids: ``pages_per_block`` per block, in order.
            layer: only this layer, for stores layer by layer; None: all.
            after: the pages may be accessed after this event; None: after all work on the caller's current stream. Streams
                belong to threads: if another thread computes, pass an event of its stream.

        Raises:
            InvalidArgument: a page or layer does not exist, or a page is named twice.
        """
        ids = self.cache.check_pages(page_ids)
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.shape.layers):
            raise InvalidArgument("layer out of range", layer=layer, layers=self.shape.layers)
        layers = range(self.shape.layers) if layer is None else range(layer, layer + 1)
        return DeviceBlocks(self, ids, layers, self.mark() if after is None else after)

    def clear(self, page_ids: Sequence[int]) -> None:
        """Fill pages with zeros, after all work on the caller's current stream. Does not wait. Suspended copies: no effect.

        Copies that were abandoned because they hung are ordered before the zeros, and the zeros before all later work of the
        caller: bytes that such a copy writes late are never read.

        Raises:
            InvalidArgument: as ``blocks``.
            Internal: the device failed, or rejected an event after such a copy. A late copy cannot be excluded then.
        """
        ids = self.cache.check_pages(page_ids)
        with self._lock:
            stuck = list(self._stuck)
            if self._suspended:
                return  # the pages are lost anyway
        if any(isinstance(event, UnknownEnd) for event in stuck):
            raise Internal("the end of copies into these pages is unknown: restart the engine", device=self.cache.device)
        for event in stuck:
            if not done_or_failed(event):
                self.device.wait_event(event)

        def zero() -> None:
            there = uploaded(ids, self.cache.device)
            for layer in self.cache.layers:
                layer.words(layer.word).index_fill_(0, there, 0)

        self.device.run(zero)

    def load(self, base: int, starts: Numbers, pitch: int, pages: PageRange, on_layer: OnLayer) -> list[Event]:
        """Begin copies from host memory into pages; for ``DeviceBlocks``.

        Args:
            base: address of an arena, or of other host memory.
            starts: address of each block.
            pitch: bytes of a block in that memory.
            pages: layers and pages to fill.
            on_layer: called for each layer.

        Returns:
            Events after all of these copies.

        Raises:
            Internal: the device failed.
        """
        return self._copy(0, base, starts, pitch, pages, on_layer)

    def store(self, base: int, starts: Numbers, pitch: int, pages: PageRange) -> list[Event]:
        """Begin copies from pages into host memory; see ``load``."""
        return self._copy(1, base, starts, pitch, pages, None)

    def _copy(
        self, direction: int, base: int, starts: Numbers, pitch: int, pages: PageRange, on_layer: OnLayer | None
    ) -> list[Event]:
        lane = self._directions.both[direction]
        if not len(starts):
            return []
        host = HostMemory(base, self._pins.of_arena(base))
        width = pages.layers * self.shape.layer_block_bytes
        _, pinned = host.chunk_of(starts + pages.shift, width)
        whole = bool(pinned.all()) or self.device.pinning is None
        moved = len(starts) * width
        names = (device_metrics.DEVICE_LOADED_BYTES, device_metrics.DEVICE_STORED_BYTES)
        self.counters.add(names[direction], moved)
        if not whole:
            self.counters.add(device_metrics.DEVICE_UNPINNED_BYTES, int(np.count_nonzero(~pinned)) * width)
        blocks = CopyRequest(
            host, starts, pitch, pages.page_ids, pages.first_layer, pages.layers, pages.shift, pages.after, whole
        )

        def begin(way: CopyStrategy) -> list[Event]:
            return self._begin(
                lane, way, pages, lambda: way.load(blocks, on_layer) if on_layer is not None else way.store(blocks)
            )

        # only staged copies can read unpinned memory
        way = lane.way if whole else lane.staged
        try:
            return begin(way)
        except Unsupported as error:
            self._directions.fall_back_to_staged(error)
            return begin(lane.staged)  # copies already begun write the same bytes, and are waited for

    def pool_gap(self, device: str) -> str:
        """Explain why copies cannot use a pool directly; see ``DeviceBuffer.pool_gap``.

        Args:
            device: device of the pool.
        """
        if device != str(self.cache.device):
            return f"the pool is on {device}, the KV cache on {self.cache.device}"
        return "" if self.codec is None else "blocks of 8-bit integers are decoded only from host memory"

    def load_pool(self, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        """Begin copies from a pool's memory into pages; for ``DeviceBlocks``.

        Args:
            memory: memory of the pool.
            starts: offset of each block in it, in bytes.
            pages: layers and pages to fill.

        Returns:
            Events after all of these copies.

        Raises:
            Internal: the device failed.
        """
        return self._copy_pool(0, memory, starts, pages)

    def store_pool(self, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        """Begin copies from pages into a pool's memory; see ``load_pool``."""
        return self._copy_pool(1, memory, starts, pages)

    def _copy_pool(self, direction: int, memory: torch.Tensor, starts: Numbers, pages: PageRange) -> list[Event]:
        if not len(starts):
            return []
        lane = self._directions.both[direction]
        names = (device_metrics.DEVICE_POOL_LOADED_BYTES, device_metrics.DEVICE_POOL_STORED_BYTES)
        self.counters.add(names[direction], len(starts) * pages.layers * self.shape.layer_block_bytes)
        slots = PoolCopyRequest(memory, starts + pages.shift, pages.page_ids, pages.first_layer, pages.layers, pages.after)
        return self._begin(lane, lane.pooled, pages, lambda: lane.pooled.move(slots, to_pages=direction == 0))

    def _begin(
        self, lane: CopyDirection, way: CopyStrategy | PoolCopy, pages: PageRange, work: Callable[[], None]
    ) -> list[Event]:
        """Enqueue copies and return the events after them. If that fails, the events of begun copies are in ``pages.begun``."""
        with lane.lock:
            if lane.lost:
                raise Internal("the device was lost: it accepts no more copies", device=self.cache.device)
            if self._suspended:
                raise Internal("the KV cache is asleep: it accepts no copies", device=self.cache.device)
            lane.add_mark(pages.after)
            try:
                work()
            except BaseException as error:
                pages.begun += self._record(way)  # begun copies are still waited for
                if not isinstance(error, Exception):
                    raise  # an interrupt of this thread
                if isinstance(error, KVStoreError) and not isinstance(error, Internal):
                    raise
                self.counters.add(device_metrics.DEVICE_ERRORS)
                if isinstance(error, Internal):
                    raise
                raise Internal("the device failed", device=self.cache.device, error=error) from error
            return self._record(way)

    def _record(self, way: CopyStrategy | PoolCopy | PageHasher) -> list[Event]:
        """Return the events after all work of a strategy. If the device refuses, its end is never known."""
        try:
            return way.record()
        except Exception as error:  # noqa: BLE001  # torch and drivers raise errors of many types
            self.counters.add(device_metrics.DEVICE_ERRORS)
            return [UnknownEnd(error)]

    def wait(self, events: Sequence[Event]) -> None:
        """Wait until copies are done. Bounded: the time limit begins when the engine's kernels before the copies have ended.

        Raises:
            Internal: the device failed or hung. It is lost: all later copies fail.
        """
        # streams are in order: also the marks of earlier copies
        computed = [mark for lane in self._directions.both for mark in lane.marks]
        began_s = time.monotonic()
        lost = self._directions.lost  # its copies were waited for before
        until_s = began_s if lost else began_s + DRAIN_S
        for number, event in enumerate(events):
            try:
                while not event.done() and time.monotonic() < until_s:
                    time.sleep(_NAP_S)  # torch lacks a bounded wait for an event
                    computed = [mark for mark in computed if not done_or_failed(mark)]
                    if computed and not lost:
                        until_s = min(time.monotonic() + DRAIN_S, began_s + COMPUTE_S)
                ended = event.done()
            except Internal:
                self._lose(events[number:])
                raise
            if not ended:
                self._lose(events[number:])
                raise Internal("copies did not end in time", device=self.cache.device)

    # ---- sleep ----
    def suspend(self, timeout_s: float) -> None:
        """Let no copy or checksum begin, and wait until none is under way. Idempotent.

        The memory of the KV cache may then be unmapped.

        Args:
            timeout_s: bound of the wait.

        Raises:
            Internal: copies did not end in time, or their end is unknown. Nothing has changed, and the memory must stay mapped.
        """
        until_s = time.monotonic() + timeout_s
        with self._lock:
            before, self._suspended = self._suspended, True
            events = list(self._stuck)
        try:
            events += self._record_all(self._directions.trial_lock, [], until_s) + self._directions.late_trials
            for lane in self._directions.both:
                events += self._record_all(lane.lock, lane.ways, until_s)
            events += self._record_all(self._hash_lock, [self._hasher] if self._hasher is not None else [], until_s)
            self._wait_all(events, until_s)
        except BaseException:
            with self._lock:
                self._suspended = before
            raise

    def _record_all(
        self, lock: threading.Lock, ways: Sequence[CopyStrategy | PoolCopy | PageHasher], until_s: float
    ) -> list[Event]:
        """Return the events after all work that was begun under a lock, once nothing is being enqueued."""
        if not lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise self._still_mapped()
        try:
            return [event for way in ways for event in self._record(way)]
        finally:
            lock.release()

    def _wait_all(self, events: Sequence[Event], until_s: float) -> None:
        while not all(event.done() for event in events):
            if time.monotonic() > until_s:
                raise self._still_mapped()
            time.sleep(_NAP_S)

    def _still_mapped(self) -> Internal:
        return Internal("copies did not end in time: the KV cache must stay mapped", device=self.cache.device)

    def resume(self) -> None:
        """Let copies begin again: the memory of the KV cache is mapped at the same addresses. Idempotent."""
        with self._lock:
            self._suspended = False

    def wait_on_stream(self, event: Event) -> None:
        """Let the caller's current stream wait for an event."""
        self.device.wait_event(event)

    def keep(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Keep host memory for the life of the process, because copies that did not end may still access it."""
        if memory is not None:
            with self._lock:
                self._kept.append(memory)

    def _lose(self, events: Sequence[Event]) -> None:
        with self._lock:
            first = not self._directions.lost
            for lane in self._directions.both:
                lane.lost = True
            self._stuck.extend(events)
        if first:
            self.counters.add(device_metrics.DEVICE_LOST)
            _log.error("device lost: %s (copies failed or hung); it is not used again", self.cache.device)

    # ---- arenas ----
    def mapped(self, arena: memoryview, descriptor: int | None = None) -> CopierArenaPin:
        """Pin a mapped arena in the background, once per process; see ``ArenaPinner``."""
        return self._pins.mapped(arena, descriptor)

    def _may_unmap(self) -> bool:
        with self._lock:
            stuck = list(self._stuck)
        return not any(isinstance(event, UnknownEnd) or not done_or_failed(event) for event in stuck)

    def pin_reports(self) -> list[PinReport]:
        """Progress of pinning, one report per arena."""
        return self._pins.reports()

    def wait_pinned(self, timeout_s: float) -> bool:
        """Wait until nothing more can be pinned at the moment. False: not in time."""
        return self._pins.wait(timeout_s)

    def serve(self) -> None:
        """From now on, pause after each pinned chunk: the engine serves requests, and pins delay every CUDA call of the host."""
        self._pins.serve()

    def stats(self) -> dict[str, int]:
        """Totals by name, pinned bytes, the strategy in use for each direction (1) and the measured rates."""
        reports = self.pin_reports()
        return {
            **self.counters.snapshot(),
            "device_pinned_bytes": sum(report.bytes_pinned for report in reports),
            "device_arena_bytes": sum(report.bytes_total for report in reports),
            "device_pin_cost_bytes": sum(report.device_bytes or 0 for report in reports),
            **self._directions.stats(),
            "device_pin_milliseconds": math.ceil(1000 * max((report.seconds for report in reports), default=0.0)),
        }
