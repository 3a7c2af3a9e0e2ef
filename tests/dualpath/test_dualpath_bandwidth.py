"""The estimator against a link of known rate, and the order of the idlest nodes against sorting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.queues import LEAST_SHARE, BandwidthEstimator, ReadQueues, ShortestFirst


class Link:
    """A fluid link that reads one queue and reports bytes in random sizes."""

    def __init__(self, estimator: BandwidthEstimator, rate: float, seed: int) -> None:
        self.estimator, self.rate, self.now, self.random = estimator, rate, 0.0, random.Random(seed)

    def load(self, seconds: float, report_s: float = 0.05) -> None:
        """Keep the link busy for a while, with reports about every ``report_s``."""
        self.estimator.begin(self.now)
        end = self.now + seconds
        while self.now < end:
            step = self.random.uniform(0.1, 1.9) * report_s
            self.now += step
            self.estimator.credit(round(self.rate * step), self.now)
        self.estimator.end(self.now)

    def rest(self, seconds: float) -> None:
        self.now += seconds

    @property
    def error(self) -> float:
        return abs(self.estimator.rate(self.now) / self.rate - 1)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e5, 1e11), st.floats(0.2, 5.0), st.integers(0, 10**6))
def test_estimator_finds_rate_from_any_configured_rate(configured: float, factor: float, seed: int) -> None:
    link = Link(BandwidthEstimator(configured), configured * factor, seed)
    for _ in range(12):
        link.load(0.3)
        link.rest(0.02)
    assert link.error < 0.05


def test_estimator_ignores_idle_gaps() -> None:
    link = Link(BandwidthEstimator(1e9), 1e9, 1)
    for _ in range(20):
        link.load(0.05, 0.01)
        link.rest(3.0)
    assert link.error < 0.02


def test_estimator_follows_a_slower_link_in_few_reports() -> None:
    link = Link(BandwidthEstimator(1e9), 1e9, 2)
    link.load(5.0)
    link.rate = 1e8
    link.load(1.0, 0.2)  # about five reports
    assert link.estimator.rate(link.now) < 3e8


def test_estimator_burst_after_silence_is_bounded() -> None:
    """One report for ten seconds of reading gives the same rate as many reports."""
    link = Link(BandwidthEstimator(1e9), 1e9, 3)
    link.load(5.0)
    link.estimator.begin(link.now)
    link.now += 2.0
    link.estimator.credit(2_000_000_000, link.now)
    link.now += 0.001
    link.estimator.credit(1_000_000, link.now)
    assert link.error < 0.05


def test_stalled_link_is_detected_and_retried() -> None:
    link = Link(BandwidthEstimator(1e9), 1e9, 4)
    link.estimator.begin(0.0)
    link.now = 10.0
    link.estimator.end(link.now)
    assert link.estimator.rate(link.now) == pytest.approx(1e9 * LEAST_SHARE)
    link.rest(30.0)
    assert link.estimator.rate(link.now) > 0.6e9


def test_unreported_bytes_cost_a_bounded_penalty() -> None:
    estimator = BandwidthEstimator(1e9)
    estimator.begin(0.0)  # one byte, of a client that died
    for second in range(60):
        estimator.credit(0, float(second), pending=1)
    assert estimator.rate(60.0) == pytest.approx(1e9, rel=0.01)
    for second in range(60, 120):  # another one, with 0.2 s of the link
        estimator.credit(0, float(second), pending=2e8)
    assert estimator.rate(120.0) > 0.6e9
    for second in range(120, 140):  # honest loads at the same time, each half a second long and reported at its end
        estimator.credit(0, float(second), pending=2e8)
        estimator.credit(500_000_000, second + 0.5, pending=7e8)
    assert estimator.rate(140.0) > 0.8e9


def test_slow_link_is_found_from_a_single_report() -> None:
    estimator = BandwidthEstimator(1e9)
    for second in range(0, 100, 20):
        estimator.begin(float(second))
        estimator.credit(1_000_000_000, second + 10.0, pending=1e9)
        estimator.end(second + 10.0)
    assert estimator.rate(90.0) < 0.2e9


def test_invented_bytes_have_no_lasting_effect() -> None:
    link = Link(BandwidthEstimator(1e9), 1e9, 5)
    link.estimator.begin(0.0)
    link.estimator.credit(1 << 44, 0.1, pending=1 << 44)
    assert link.estimator.rate(0.1) <= 32.1e9
    link.now = 0.1
    link.load(3.0)
    assert link.error < 0.1


def test_queue_survives_another_configured_rate() -> None:
    """A node measures the rate of its volumes while loads read from them."""
    queues = ReadQueues()
    queues.join("n", 1e9, 1e9)
    charge = queues.charge("n", None, 100, 1 << 20, 16, 0.0)
    queues.join("n", 2e9, 1e9)
    seen = [queues.state("n", 0.5)]
    for at_s, blocks in ((1.0, 40), (2.0, 60)):
        queues.credit(charge, blocks, at_s, moved=True)
        seen.append(queues.state("n", at_s))
    assert [state and state.pending_bytes for state in seen] == [100 << 20, 60 << 20, 0]
    assert seen[0] is not None
    assert seen[0].snic == 2e9
    assert queues.has_learnt("n", 2.0), "bytes count in the new estimate"


def test_estimator_tolerates_time_running_backwards() -> None:
    estimator = BandwidthEstimator(1e9)
    estimator.begin(10.0)
    estimator.credit(1_000, 9.0)
    estimator.end(8.0)
    estimator.end(8.0)
    assert estimator.rate(7.0) > 0
    estimator.credit(10**12, 11.0)  # idle: the report is too late to count
    assert estimator.rate(8.0) == pytest.approx(1e9, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rate_not_positive_is_rejected(rate: float) -> None:
    with pytest.raises(InvalidArgument):
        BandwidthEstimator(rate)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 5)), max_size=400),
    st.integers(0, 9),
    st.frozensets(st.sampled_from("abcdefgh")),
)
def test_shortest_first_matches_sorting(changes: list[tuple[str, int | None]], count: int, without: frozenset[str]) -> None:
    order = ShortestFirst()
    model: dict[str, tuple[int, int]] = {}
    for tick, (name, key) in enumerate(changes):
        if key is None:
            order.drop(name)
            model.pop(name, None)
        else:
            order.set(name, key)
            model[name] = (key, tick)
        assert len(order) == len(model)
    expected = sorted((name for name in model if name not in without), key=model.__getitem__)[:count]
    assert order.least(count, without) == expected
    assert order.least(count, without) == expected


def test_estimator_forgets_after_long_idle_time() -> None:
    link = Link(BandwidthEstimator(1e9), 2e9, 0)
    assert not link.estimator.has_learnt(link.now)
    link.estimator.begin(link.now)
    assert not link.estimator.has_learnt(link.now)
    link.load(1.0)
    assert link.estimator.has_learnt(link.now)
    link.rest(29.0)
    assert link.estimator.has_learnt(link.now)
    link.rest(2.0)
    assert not link.estimator.has_learnt(link.now)
