"""Figures of the last hour: what a process counted in each interval of ten seconds, in a ring of bounded size.

1. A process calls ``record_if_due`` from a loop that it has anyway. Nothing on the path of a load or lookup calls this module.
2. Intervals are aligned to wall-clock time, so that points of several processes can be added up.
3. A point holds differences of totals. An interval without an event needs no space for its counter.
4. A late call makes one longer point. If the clock was set back, points after the new time are dropped.

A point of a busy node needs about 3 KiB, so the ring stays below 1.5 MB; ``tests/observe/test_history.py`` holds it to that.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.observe.counters import HistogramTotals

INTERVAL_S: Final = 10
POINTS: Final = 360


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a process at one time.

    Attributes:
        counts: totals since the start, by name.
        durations: histograms since the start, by name.
        levels: present values, by name.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    durations: Mapping[str, HistogramTotals] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class HistoryPoint:
    """Figures of one interval.

    Attributes:
        at_s: end of the interval, in seconds of Unix time.
        seconds: length of the interval.
        counts: increments by name; a missing name means 0.
        durations: increments per bucket by name; a missing name means none.
        levels: values at the end of the interval.
    """

    at_s: int
    seconds: int
    counts: dict[str, int]
    durations: dict[str, Sequence[int]]
    levels: Mapping[str, float]

    def add(self, later: HistoryPoint) -> None:
        """Merge the point that follows this one into it. ``at_s`` stays."""
        self.seconds += later.seconds
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, counts in later.durations.items():
            mine = self.durations.get(name)
            self.durations[name] = list(counts) if mine is None else [a + b for a, b in zip(mine, counts, strict=True)]
        self.levels = later.levels


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """Points in order of time, and the upper bounds of each histogram's buckets in seconds."""

    points: list[HistoryPoint]
    bounds: Mapping[str, tuple[float, ...]]


class History:
    """Ring of the last ``POINTS`` intervals. Thread-safe.

    Args:
        read: returns the totals of the process.
        unix_s: wall clock.
    """

    def __init__(self, read: Callable[[], Totals], unix_s: Callable[[], float] = time.time) -> None:
        self._read = read
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._points: deque[HistoryPoint] = deque(maxlen=POINTS)
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._interval = int(unix_s()) // INTERVAL_S
        self._last = read()

    def record_if_due(self) -> None:
        """Add a point if an interval has ended since the last one."""
        interval = int(self._unix_s()) // INTERVAL_S
        if interval == self._interval:
            return
        totals = self._read()
        with self._lock:
            if interval > self._interval:
                self._points.append(self._point(interval, totals))
            else:
                while self._points and self._points[-1].at_s > interval * INTERVAL_S:
                    self._points.pop()
            self._interval, self._last = interval, totals

    def _point(self, interval: int, totals: Totals) -> HistoryPoint:
        before = self._last.counts
        counts = {name: total - before.get(name, 0) for name, total in totals.counts.items() if total > before.get(name, 0)}
        durations: dict[str, Sequence[int]] = {}
        for name, found in totals.durations.items():
            self._bounds[name] = found.bounds
            earlier = self._last.durations.get(name)
            old = earlier.counts if earlier is not None else [0] * len(found.counts)
            if found.counts != old:
                durations[name] = array("Q", (max(0, new - past) for new, past in zip(found.counts, old, strict=True)))
        seconds = (interval - self._interval) * INTERVAL_S
        return HistoryPoint(interval * INTERVAL_S, seconds, counts, durations, totals.levels)

    def window(self, since_s: float = 0, step_s: int = INTERVAL_S) -> HistoryWindow:
        """Points that ended after ``since_s``.

        Args:
            since_s: Unix time in seconds.
            step_s: merge the points of each ``step_s`` seconds, a multiple of ``INTERVAL_S``.
        """
        merged: list[HistoryPoint] = []
        with self._lock:
            for point in self._points:
                at_s = -(-point.at_s // step_s) * step_s
                if point.at_s <= since_s:
                    continue
                if not merged or merged[-1].at_s != at_s:
                    merged.append(HistoryPoint(at_s, 0, {}, {}, {}))
                merged[-1].add(point)
            return HistoryWindow(merged, dict(self._bounds))
