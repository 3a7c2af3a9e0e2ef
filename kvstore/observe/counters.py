"""Counters: one thread-safe registry per process.

Count whatever makes the store do less than it was asked for: fallbacks, drops, quarantined blocks. Events are declared in
``kvstore.observe.metric_definitions``. ``GetStats``, ``GetNodeStats`` and ``/metrics`` return the totals.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.observe.metric_definitions import EVENTS
from kvstore.observe.metrics import Event, Kind, TimedEvent

log = logging.getLogger(__name__)

strict = False
"""Whether an undeclared event raises. Tests set this. In production it is counted and logged once."""


class _Totals(dict[str, int]):
    """Totals by event. An event is checked against the declarations when it is counted for the first time."""

    def __missing__(self, name: str) -> int:
        if name not in EVENTS:
            _undeclared(name)
        return 0


def _undeclared(name: str) -> None:
    if strict:
        raise AssertionError(f"event {name} is not declared in kvstore/observe/metric_definitions")
    log.error("undeclared event counted: %s", name)


@dataclass(slots=True)
class HistogramTotals:
    """Number of values per bucket (the last one: above all bounds), and the sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0


class Counters:
    """Totals and histograms since the start of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = _Totals()
        self._histograms: dict[str, HistogramTotals] = {}

    def add(self, name: Event, amount: int = 1) -> None:
        """Add to a total."""
        with self._lock:
            self._totals[name] += amount

    def add_all(self, names: Sequence[Event], amounts: Sequence[int]) -> None:
        """Add to several totals in one step."""
        with self._lock:
            for name, amount in zip(names, amounts, strict=True):
                self._totals[name] += amount

    def observe(self, name: TimedEvent, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            found = self._histograms.get(name) or self._histogram(name)
            found.counts[bisect_left(found.bounds, value)] += 1
            found.total += value

    def get(self, name: str) -> int:
        """One total; 0 before its first event."""
        return self._totals.get(name, 0)

    def snapshot(self) -> Mapping[str, int]:
        """A copy of all totals, by event."""
        with self._lock:
            return dict(self._totals)

    def distributions(self) -> Mapping[str, HistogramTotals]:
        """A copy of all histograms, by event."""
        with self._lock:
            return {
                name: HistogramTotals(found.bounds, list(found.counts), found.total) for name, found in self._histograms.items()
            }

    def _histogram(self, name: str) -> HistogramTotals:
        metric = EVENTS.get(name)
        if metric is None or metric.kind is not Kind.HISTOGRAM:
            _undeclared(name)
        bounds = metric.buckets if metric is not None else ()
        return self._histograms.setdefault(name, HistogramTotals(bounds, [0] * (len(bounds) + 1)))
