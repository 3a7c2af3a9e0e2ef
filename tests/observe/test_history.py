"""The ring of figures of the last hour."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvstore.observe.counters import HistogramTotals
from kvstore.observe.history import INTERVAL_S, POINTS, History, Totals
from kvstore.observe.metrics import LATENCY_BUCKETS_S

START_S = 1_700_000_000


class Process:
    """A process whose counters and wall clock the test sets."""

    def __init__(self) -> None:
        self.now_s = float(START_S)
        self.count = 0
        self.buckets = [0, 0, 0]
        self.level = 0.0
        self.history = History(self.read, lambda: self.now_s)

    def read(self) -> Totals:
        return Totals({"events": self.count}, {"load": HistogramTotals((0.1, 1.0), list(self.buckets))}, {"fill": self.level})

    def after(self, seconds: float, events: int = 0, slow: int = 0) -> None:
        self.now_s += seconds
        self.count += events
        self.buckets[2] += slow
        self.level = self.now_s
        self.history.record_if_due()


def test_history_keeps_differences_per_interval() -> None:
    process = Process()
    process.count = 5
    process.after(4, events=1)
    assert process.history.window().points == []
    process.after(6, events=2, slow=1)
    process.after(10)
    first, second = process.history.window().points
    assert (first.at_s, first.seconds, first.counts) == (START_S + 10, 10, {"events": 8})
    assert list(first.durations["load"]) == [0, 0, 1]
    assert (second.counts, second.durations, second.levels) == ({}, {}, {"fill": START_S + 20})


def test_history_late_record_makes_one_longer_point() -> None:
    process = Process()
    process.after(35, events=7)
    (point,) = process.history.window().points
    assert (point.at_s, point.seconds, point.counts) == (START_S + 30, 30, {"events": 7})


def test_history_clock_set_back_drops_later_points() -> None:
    process = Process()
    for _ in range(5):
        process.after(10, events=1)
    process.after(-30, events=1)
    process.after(10, events=1)
    ends = [point.at_s for point in process.history.window().points]
    assert ends == [START_S + 10, START_S + 20, START_S + 30]


def test_history_counter_that_fell_adds_nothing() -> None:
    process = Process()
    process.after(10, events=9)
    process.after(10, events=-5)
    assert [point.counts for point in process.history.window().points] == [{"events": 9}, {}]


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 3)), max_size=60),
    step_s=st.sampled_from([10, 20, 60, 3600]),
)
def test_history_window_of_any_step_has_all_events(steps: list[tuple[int, int, int]], step_s: int) -> None:
    process = Process()
    for seconds, events, slow in steps:
        process.after(seconds, events, slow)
    process.after(INTERVAL_S)
    window = process.history.window(step_s=step_s)
    assert sum(point.counts.get("events", 0) for point in window.points) == process.count
    slow_loads = sum(point.durations["load"][2] for point in window.points if "load" in point.durations)
    assert slow_loads == process.buckets[2]
    ends = [point.at_s for point in window.points]
    assert ends == sorted(set(ends))
    assert all(end % step_s == 0 for end in ends)
    assert sum(point.seconds for point in window.points) == int(process.now_s) // 10 * 10 - START_S // 10 * 10


@given(calls=st.lists(st.integers(-60, 200), min_size=1, max_size=50), since=st.integers(-100, 100))
def test_history_is_bounded_and_ordered(calls: list[int], since: int) -> None:
    process = Process()
    for seconds in calls:
        process.after(seconds, events=1)
    points = process.history.window(process.now_s + since).points
    ends = [point.at_s for point in points]
    assert ends == sorted(set(ends))
    assert len(points) <= POINTS
    assert all(end > process.now_s + since for end in ends)


def test_history_of_busy_node_stays_below_stated_memory() -> None:
    counts = {f"counter_{number}": 0 for number in range(30)}
    buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)
    now = [float(START_S)]

    def read() -> Totals:
        return Totals(dict(counts), {"load": HistogramTotals(LATENCY_BUCKETS_S, list(buckets))}, {"dram": now[0], "nvme": now[0]})

    tracemalloc.start()
    try:
        history = History(read, lambda: now[0])
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(POINTS * 2):
            now[0] += INTERVAL_S
            for name in counts:
                counts[name] += 1 << 33
            buckets[:] = [count + 1000 for count in buckets]
            history.record_if_due()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(history.window().points) == POINTS
    assert used < 1_500_000, used
