"""Trial copies: how fast each copy strategy is with pages like those of a cache.

The trial has its own pages and its own pinned host memory, with the shape of the cache: no page of the engine is read or written.
Both are limited to ``TRIAL_BYTES`` per direction. Blocks and pages are scattered, as they are in a running engine. One copy is
under way at a time, and its bytes are compared once per strategy.

Nothing is freed that a copy may still access: after a copy that does not end, the memory is kept for the life of the process.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvclient.device.calibration.choice import Direction, TrialResults, combined_rate
from kvclient.device.copy_strategies import (
    BatchedCopy,
    CopyRequest,
    CopyStrategy,
    DirectCopy,
    HostMemory,
    StagedCopy,
)
from kvclient.device.driver import HostPinning
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.pins.copier_pins import CopierPins
from kvclient.device.streams import Device, DeviceStream, Event, UnknownEnd, has_ended
from kvstore.core.errors import Internal
from kvstore.native import address_of

TRIAL_BYTES = 32 << 20
"""Most bytes of one trial copy. The host has four times as much (twice pinned, the expected bytes, a copy to compare), the device
three times and one layer."""
PIECES = (64, 1024)
"""Pieces per copy: a short hit, and as many as one call of the driver has in a long load."""
REPEATS = 5
"""Most durations per strategy and size."""
DIRECTION_S = 0.2
"""Most time for the durations of one direction."""
_CLOSE_S = 1.0
"""How long the end of the trial waits for a copy that is late."""
_SPIN_S = 0.002
"""Copies of a few microseconds are polled without pauses; after this time with pauses."""
_NAP_S = 50e-6
_kept: list[object] = []
"""Memory that a copy may still access."""


class TrialLate(Exception):
    """The time of the trial is over; a copy may be under way."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Sizes of the trial copies.

    Attributes:
        layers: layers of each block.
        blocks: number of blocks per copy, in ascending order.
    """

    layers: int
    blocks: tuple[int, ...]


def plan_trial(layers: int, row_bytes: int, row_pieces: int, trial_bytes: int = TRIAL_BYTES) -> TrialPlan | None:
    """Plan copies of ``PIECES`` pieces, or of fewer if the trial memory is too small for them.

    Args:
        layers: layers of the cache.
        row_bytes: bytes of one layer of a block.
        row_pieces: contiguous pieces of one layer of a block.
        trial_bytes: most bytes per copy.

    Returns:
        None: not even one layer of a block fits.
    """
    used = min(layers, trial_bytes // row_bytes, max(1, max(PIECES) // row_pieces))
    if not used:
        return None
    most = trial_bytes // (used * row_bytes)
    return TrialPlan(used, tuple(sorted({min(most, max(1, pieces // (used * row_pieces))) for pieces in PIECES})))


def _pages_like(cache: PagedCache, layers: int, blocks: int) -> PagedCache:
    """Allocate pages with the shape of a cache."""
    pages, page = blocks * cache.pages_per_block, cache.page
    memory = torch.empty(layers * pages * page.nbytes, dtype=torch.uint8, device=cache.device)
    if cache.has_joined_layers:
        tensors = memory.view(pages, layers, page.part_bytes).unbind(1)
    elif cache.kind == "split":
        tensors = memory.view(layers, page.parts, pages, page.part_bytes).unbind(0)
    else:
        tensors = memory.view(layers, pages, page.part_bytes).unbind(0)
    return PagedCache(list(tensors), cache.kind, pages_per_block=cache.pages_per_block)


class _SharedStreams:
    """A device with two streams, which all strategies of a trial share. Streams are never destroyed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams = [device.stream(), device.stream()]

    def stream(self) -> DeviceStream:
        self._streams.reverse()
        return self._streams[0]

    @property
    def memory(self) -> torch.device:
        return self._device.memory

    @property
    def pinning(self) -> HostPinning | None:
        return self._device.pinning

    @property
    def bus_id(self) -> str:
        return self._device.bus_id

    @property
    def has_batch(self) -> bool:
        return self._device.has_batch

    @property
    def reads_host(self) -> bool:
        return self._device.reads_host

    def mark(self) -> Event:
        return self._device.mark()

    def wait_event(self, event: Event) -> None:
        self._device.wait_event(event)

    def run(self, work: Callable[[], None]) -> None:
        self._device.run(work)


class CopyTrial:
    """The trial copies of one cache. Use it in one thread, and close it.

    Args:
        device: device of the cache.
        cache: the engine's pages; only their shape is used.
        scatter: moves rows for the strategy ``staged``.
        pins: pins the trial's host memory.
        plan: sizes of the copies.
        staging_bytes: as for the cache's own copies.
        until_s: when the trial must be over, by ``now_s``.
        now_s: a monotonic clock.

    Raises:
        Internal: the host memory cannot be pinned.
        TrialLate: no time is left.
    """

    def __init__(
        self,
        device: Device,
        cache: PagedCache,
        scatter: Callable[[PagedCache], PageScatter],
        pins: CopierPins,
        plan: TrialPlan,
        *,
        staging_bytes: int,
        until_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._device = _SharedStreams(device)
        self._scatter = scatter
        self._plan = plan
        self._until_s = until_s
        self._now_s = now_s
        self._pending: list[Event] = []
        """Events of copies that have not ended."""
        count = plan.blocks[-1]
        self._cache = _pages_like(cache, plan.layers, count)
        self._size = plan.layers * cache.row_bytes
        self._staging_bytes = min(staging_bytes, count * self._size)
        self._strategies: dict[str, CopyStrategy] = {}
        random = np.random.default_rng(count)
        self._slots = random.permutation(count).astype(np.int64) * self._size
        self._ids = torch.from_numpy(random.permutation(self._cache.pages).astype(np.int64))
        self._memory = mmap.mmap(-1, 2 * count * self._size)
        self._arena = memoryview(self._memory)
        self._base = address_of(self._arena)
        self._pin = pins.mapped(self._arena, None)
        try:
            self._host = self._pinned(pins)
            self._content = random.integers(0, 256, (count, self._size), np.uint8)
            self._blocks_at(0)[self._slots // self._size] = self._content
        except BaseException:
            self.close()
            raise

    def _pinned(self, pins: CopierPins) -> HostMemory:
        pinned = pins.of_arena(self._base)
        if pinned is not None and not pinned.wait(max(0.0, self._until_s - self._now_s())):
            raise TrialLate
        if pinned is None or pinned.report().bytes_pinned < len(self._arena):
            raise Internal("the memory for trial copies cannot be pinned")
        return HostMemory(self._base, pinned)

    # ---- measurements ----
    def measure(self, direction: Direction, names: Sequence[str]) -> TrialResults:
        """Measure strategies in turns, so that a disturbance meets all of them.

        Args:
            direction: loads or stores.
            names: strategies.

        Raises:
            TrialLate: a copy did not end in time.
        """
        failed: dict[str, str] = {}
        for name in names:
            self._attempt(name, failed, partial(self._check, name, direction))
        samples: dict[str, dict[int, list[float]]] = {name: {blocks: [] for blocks in self._plan.blocks} for name in names}
        stop_s = min(self._now_s() + DIRECTION_S, self._until_s)
        for name, blocks in [(name, blocks) for _ in range(REPEATS) for name in names for blocks in self._plan.blocks]:
            if self._now_s() >= stop_s:
                break
            if name not in failed:
                seconds = self._attempt(name, failed, partial(self._copy, name, direction, blocks))
                samples[name][blocks] += [seconds] if seconds is not None else []
        rates: dict[str, float] = {}
        for name in names:
            rate = combined_rate({blocks * self._size: durations for blocks, durations in samples[name].items()})
            if rate is not None and name not in failed:
                rates[name] = rate
        return TrialResults(rates, failed, "" if len(rates) + len(failed) == len(names) else "too little time")

    def _attempt(self, name: str, failed: dict[str, str], work: Callable[[], float]) -> float | None:
        """Do something with a strategy. Any error except ``TrialLate`` is a failure of that strategy."""
        if self._now_s() >= self._until_s:
            raise TrialLate
        try:
            return work()
        except TrialLate:
            raise
        except Exception as error:  # noqa: BLE001  # torch, Triton, drivers: errors of many types
            failed[name] = str(error) or type(error).__name__
        self._wait()  # until copies that were enqueued before the error have ended
        return None

    def _copy(self, name: str, direction: Direction, blocks: int) -> float:
        """Copy some blocks, wait, and return the duration."""
        strategy = self._strategy(name)
        starts = self._base + self._slots[:blocks]
        if direction == "store":
            starts = starts + len(self._arena) // 2
        ids = self._ids[: blocks * self._cache.pages_per_block]
        request = CopyRequest(self._host, starts, self._size, ids, 0, self._plan.layers, 0, self._device.mark(), pinned=True)
        began_s = self._now_s()
        try:
            if direction == "load":
                strategy.load(request, lambda _layer, _event: None)
            else:
                strategy.store(request)
        finally:
            self._pending += _recorded(strategy)
        self._wait()
        return self._now_s() - began_s

    def _wait(self) -> None:
        """Wait until no copy is under way.

        Raises:
            TrialLate: the time is over.
            Internal: the device failed.
        """
        began_s = time.monotonic()
        while not all(event.done() for event in self._pending):
            if self._now_s() > self._until_s:
                raise TrialLate
            if time.monotonic() > began_s + _SPIN_S:
                time.sleep(_NAP_S)
        self._pending = []

    def _strategy(self, name: str) -> CopyStrategy:
        if name not in self._strategies:
            self._strategies[name] = self._make(name)
        return self._strategies[name]

    def _make(self, name: str) -> CopyStrategy:
        if name == "direct":
            return DirectCopy(self._device, self._cache)
        if name == "staged":
            return StagedCopy(self._device, self._cache, self._scatter(self._cache), None, self._staging_bytes)
        return BatchedCopy(self._device, self._cache, ahead=name == "batched_ahead")

    # ---- bytes ----
    def _check(self, name: str, direction: Direction) -> float:
        """Make the first, largest copy of a strategy, and compare its bytes."""
        if direction == "load":
            self._device.run(self._clear_pages)
        else:
            self._device.run(self._fill_pages)
            self._blocks_at(1)[:] = 0
        seconds = self._copy(name, direction, self._plan.blocks[-1])
        if not (self._pages_hold_content() if direction == "load" else self._host_holds_content()):
            raise Internal("trial copies return wrong bytes", strategy=name, direction=direction)
        return seconds

    def _blocks_at(self, half: int) -> npt.NDArray[np.uint8]:
        """Slots of the host memory: sources of loads, or targets of stores."""
        nbytes = len(self._arena) // 2
        return np.frombuffer(self._arena, np.uint8, nbytes, half * nbytes).reshape(-1, self._size)

    def _row(self, layer: int) -> npt.NDArray[np.uint8]:
        row = self._cache.row_bytes
        return self._content[:, layer * row : (layer + 1) * row]

    def _clear_pages(self) -> None:
        for layer in self._cache.layers:
            layer.words(layer.word).zero_()

    def _fill_pages(self) -> None:
        for number, layer in enumerate(self._cache.layers):
            pages = layer.words(1)
            rows = torch.from_numpy(np.ascontiguousarray(self._row(number))).view(-1, *pages.shape[1:])
            pages[self._ids.to(pages.device)] = rows.to(pages.device)

    def _pages_hold_content(self) -> bool:
        ids = self._ids.to(self._cache.device)
        return all(
            np.array_equal(layer.words(1)[ids].cpu().numpy().reshape(len(self._slots), -1), self._row(number))
            for number, layer in enumerate(self._cache.layers)
        )

    def _host_holds_content(self) -> bool:
        return np.array_equal(self._blocks_at(1)[self._slots // self._size], self._content)

    # ---- end ----
    def close(self) -> list[Event]:
        """Free the memory.

        Returns:
            Events of copies that have not ended: the memory is kept for them.
        """
        late_s = time.monotonic() + _CLOSE_S
        while not all(map(has_ended, self._pending)) and time.monotonic() < late_s:
            time.sleep(_NAP_S)
        if not all(map(has_ended, self._pending)) or not self._pin.close():
            _kept.append(self)
            return self._pending
        with suppress(BufferError):  # an interrupt of this thread holds a view of the memory, and frees it
            self._arena.release()
            self._memory.close()
        return []


def _recorded(strategy: CopyStrategy) -> list[Event]:
    """Events after all work of a strategy. If the device refuses, its end is never known."""
    try:
        return strategy.record()
    except Exception as error:  # noqa: BLE001  # torch and drivers raise errors of many types
        return [UnknownEnd(error)]
