"""The copy strategies of one cache by direction: which are possible, which one is used, and why."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace

from kvclient import InvalidArgument
from kvclient.device.calibration.calibrator import Results, measure, report, shape_key, without_trial
from kvclient.device.calibration.choice import (
    DIRECTIONS,
    ON_COPY_ENGINES,
    Direction,
    DirectionChoice,
    by_rule,
    candidates,
    choose,
)
from kvclient.device.copy_strategies import (
    BatchedCopy,
    Codec,
    CopyStrategy,
    DirectCopy,
    StagedCopy,
    batch_piece_bytes,
)
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter, TorchScatter
from kvclient.device.pins.copier_pins import CopierPins
from kvclient.device.pool_copy import PoolCopy
from kvclient.device.streams import Device, Event, done_or_failed, has_ended
from kvstore.core.errors import Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)


class CopyDirection:
    """Strategies and state of one direction: loads or stores."""

    def __init__(self, way: CopyStrategy, staged: CopyStrategy, pooled: PoolCopy) -> None:
        self.way = way
        self._earlier: tuple[CopyStrategy, ...] = ()
        """Strategies that are no longer used. Their streams may still have copies."""
        self.staged = way if way.name == staged.name else staged
        self.pooled = pooled
        self.lock = threading.Lock()
        self.lost = False
        self.marks: list[Event] = []
        """Events of the engine's kernels that begun copies wait for. Replaced as a whole, never modified."""

    @property
    def ways(self) -> list[CopyStrategy | PoolCopy]:
        """Everything whose streams may have copies of this direction."""
        return [*{id(way): way for way in (self.way, self.staged, *self._earlier)}.values(), self.pooled]

    def use(self, way: CopyStrategy) -> None:
        """Use another strategy for copies that begin from now on."""
        self._earlier = (*self._earlier, self.way)
        self.way = way

    def add_mark(self, mark: Event) -> None:
        """Record the event that new copies wait for."""
        if not any(mark is known for known in self.marks):
            self.marks = [*(known for known in self.marks if not done_or_failed(known)), mark]


class CopyDirections:
    """Both directions of one copier. Thread-safe.

    Args:
        device: device of the cache.
        cache: its pages.
        codec: conversion of rows; None: bytes are stored unchanged.
        mover: moves rows of ``staged`` and of pools.
        pins: pins host memory, also that of trial copies.
        counters: counts refusals and trials.
        strategy: a name, or ``auto``.
        staging_bytes: size of each staging buffer.

    Raises:
        InvalidArgument: the device, driver or installation does not support the strategy.
    """

    def __init__(
        self,
        device: Device,
        cache: PagedCache,
        codec: Codec | None,
        mover: PageScatter,
        pins: CopierPins,
        counters: Counters,
        *,
        strategy: str,
        staging_bytes: int,
    ) -> None:
        self._device = device
        self._cache = cache
        self._codec = codec
        self._mover = mover
        self._pins = pins
        self._counters = counters
        self._staging_bytes = staging_bytes
        self._lock = threading.Lock()
        self._batches_refused = False
        self._auto = strategy == "auto"
        self._available = self._find_available()
        self._choices = {direction: self._first_choice(strategy, direction) for direction in DIRECTIONS}
        self.trial_lock = threading.Lock()
        """Held during trial copies."""
        self.late_trials: list[Event] = []
        """Trial copies that did not end in time. They access only their own memory."""
        self.both = [
            CopyDirection(self._make(choice.strategy), self._make("staged"), PoolCopy(device, cache, mover))
            for choice in self._choices.values()
        ]
        """Loads, then stores."""

    def _find_available(self) -> frozenset[str]:
        """Strategies among which ``auto`` may choose: kernels only if they have been tried out on this device."""
        if self._codec is not None:
            return frozenset({"staged"})
        batched = ON_COPY_ENGINES if self._device.has_batch else ()
        direct = ("direct",) if self._device.reads_host and not isinstance(self._mover, TorchScatter) else ()
        return frozenset({"staged", *batched, *direct})

    def _first_choice(self, strategy: str, direction: Direction) -> DirectionChoice:
        if strategy == "auto":
            return DirectionChoice(by_rule(direction, self._available, batch_piece_bytes(self._cache)), "rule")
        if strategy != "staged" and self._codec is not None:
            raise InvalidArgument("int8 requires strategy=staged", strategy=strategy)
        if strategy == "batched" and not self._device.has_batch:
            raise InvalidArgument("strategy=batched requires a driver of CUDA 12.8 or later")
        if strategy == "direct" and not self._device.reads_host:
            raise InvalidArgument("strategy=direct: kernels on this device cannot read pinned host memory at its host address")
        return DirectionChoice(strategy, "fixed")

    def _make(self, name: str) -> CopyStrategy:
        if name in ON_COPY_ENGINES:
            return BatchedCopy(self._device, self._cache, ahead=name == "batched_ahead")
        if name == "direct":
            if self._device.memory.type == "cuda" and isinstance(self._mover, TorchScatter):
                raise InvalidArgument("strategy=direct requires Triton, which failed; see the log")
            try:
                return DirectCopy(self._device, self._cache)
            except ImportError as error:
                raise InvalidArgument("strategy=direct requires Triton, which is not installed", error=error) from error
        return StagedCopy(self._device, self._cache, self._mover, self._codec, self._staging_bytes, self._count_refused)

    # ---- the strategies in use ----
    @property
    def strategy(self) -> str:
        """Strategy of loads and stores, as ``load/store`` if they differ."""
        load, store = (choice.strategy for choice in self.choices.values())
        return load if load == store else f"{load}/{store}"

    @property
    def choices(self) -> Mapping[Direction, DirectionChoice]:
        """The strategy of loads and of stores, why it was chosen, and the measured rates."""
        with self._lock:
            return dict(self._choices)

    @property
    def lost(self) -> bool:
        """Whether the device failed or hung, so that nothing is copied any more."""
        return any(direction.lost for direction in self.both)

    def stats(self) -> dict[str, int]:
        """The strategy in use for each direction (1), and the measured rates."""
        choices = self.choices.items()
        rates = {(direction, name): rate for direction, choice in choices for name, rate in choice.rates.items()}
        return {
            **{f"device_{direction}_by_{choice.strategy}": 1 for direction, choice in choices},
            **{f"device_{direction}_{name}_bytes_per_second": int(rate) for (direction, name), rate in rates.items()},
        }

    def fall_back_to_staged(self, error: Unsupported) -> None:
        """Use no batched copies any more: the device does not support them."""
        with self._lock:
            for name, direction in zip(DIRECTIONS, self.both, strict=True):
                if direction.way.name in ON_COPY_ENGINES:
                    direction.use(direction.staged)
                    gap = "the device refused batched copies"
                    self._choices[name] = replace(self._choices[name], strategy="staged", source="rule", gap=gap)
        self._count_refused(error)

    def _count_refused(self, error: Unsupported) -> None:
        with self._lock:
            first, self._batches_refused = not self._batches_refused, True
        if first:
            self._counters.add(device_metrics.DEVICE_BATCH_REFUSED)
            _log.warning("batched copies rejected: %s (error=%s); rows are copied one by one", self._cache.device, error)

    # ---- calibration ----
    def calibrate(
        self,
        timeout_s: float,
        *,
        known: MutableMapping[object, Results] | None,
        suspended: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        """See ``DeviceCopier.calibrate``.

        Args:
            timeout_s: when a rule decides instead.
            known: results by shape of the cache and device; results are added. None: none are shared.
            suspended: whether the memory of the device may be unmapped.
            now_s: a monotonic clock.
        """
        wanted = {direction: candidates(direction, self._available) for direction in DIRECTIONS}
        if not self._auto or not self._pins.enabled or max(map(len, wanted.values())) < 2:
            return
        known, key = known if known is not None else {}, shape_key(self._cache)
        with self.trial_lock:  # sleep waits for it after it has suspended copies, so a trial ends before memory is unmapped
            results = known.get(key)
            if results is None:
                gap = "the KV cache is asleep" if suspended() else "" if timeout_s > 0 else "too little time"
                results = known[key] = self._measure(wanted, gap, now_s() + timeout_s, now_s)
            self._adopt(results)

    def _measure(
        self, wanted: Mapping[Direction, Sequence[str]], gap: str, until_s: float, now_s: Callable[[], float]
    ) -> Results:
        self.late_trials = [event for event in self.late_trials if not has_ended(event)]
        if self.late_trials or self.lost:
            gap = "the device failed or hangs"
        if gap:
            return without_trial(wanted, gap)
        results, late = measure(
            self._device,
            self._cache,
            type(self._mover),
            self._pins,
            self._counters,
            wanted,
            staging_bytes=self._staging_bytes,
            until_s=until_s,
            now_s=now_s,
        )
        self.late_trials += late
        return results

    def _adopt(self, results: Results) -> None:
        """Use the best strategies for copies that begin from now on."""
        piece_bytes = batch_piece_bytes(self._cache)
        found = {direction: choose(direction, self._available, piece_bytes, results[direction]) for direction in DIRECTIONS}
        for direction, (name, choice) in zip(self.both, found.items(), strict=True):
            with direction.lock, self._lock:
                if choice.strategy != direction.way.name:
                    direction.use(direction.staged if choice.strategy == "staged" else self._make(choice.strategy))
                self._choices[name] = choice
        report(self._cache, piece_bytes, self._counters, found)
