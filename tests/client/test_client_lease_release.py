"""Times at which released leases are sent: no load waits for their space, and many loads cost few calls."""

from __future__ import annotations

import math
import random

import pytest

from kvclient.nodes.lease_release import LONGEST_S, QUIET_S, ReleaseBatcher

MOST = 1000


@pytest.fixture
def times() -> ReleaseBatcher:
    return ReleaseBatcher(MOST)


def test_release_batcher_empty_is_never_due(times: ReleaseBatcher) -> None:
    assert times.left_s(5.0) == math.inf


def test_release_batcher_sends_after_a_quiet_moment(times: ReleaseBatcher) -> None:
    times.added(1.0, 1, urgent=False)
    assert times.left_s(1.0) == pytest.approx(QUIET_S)
    times.added(1.0 + QUIET_S / 2, 1, urgent=False)
    assert times.left_s(1.0 + QUIET_S) == pytest.approx(QUIET_S / 2)
    assert times.left_s(1.0 + 2 * QUIET_S) <= 0


def test_release_batcher_sends_large_leases_at_once(times: ReleaseBatcher) -> None:
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) > 0
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) <= 0
    times.sent()
    assert times.left_s(1.0) == math.inf
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) > 0


def test_release_batcher_urgent_lease_sends_all(times: ReleaseBatcher) -> None:
    times.added(1.0, 1, urgent=False)
    times.added(1.0, 0, urgent=True)
    assert times.left_s(1.0) <= 0


@pytest.mark.parametrize("seed", range(20))
def test_release_batcher_bounds_delay_and_calls(seed: int) -> None:
    draw = random.Random(seed)
    times = ReleaseBatcher(MOST)
    now_s, kept, calls, total = 0.0, list[tuple[float, int]](), 0, 0

    def until(end_s: float) -> None:
        """The thread that sends, as it sleeps and wakes."""
        nonlocal now_s, calls
        while now_s + max(0.0, left_s := times.left_s(now_s)) <= end_s:
            now_s += max(0.0, left_s)
            assert kept
            assert now_s - kept[0][0] <= LONGEST_S * 1.001
            kept.clear()
            times.sent()
            calls += 1
        now_s = end_s

    for _ in range(2000):
        until(now_s + draw.choice((0.0, 0.0001, 0.001, 0.004, 0.03)))
        nbytes = draw.randrange(1, 120)
        times.added(now_s, nbytes, urgent=False)
        kept.append((now_s, nbytes))
        total += nbytes
        until(now_s)
        assert sum(size for _, size in kept) < MOST
    ended_s = now_s
    until(now_s + QUIET_S * 1.001)
    assert not kept, "the load has nothing more to copy, and waits"
    assert calls <= total / MOST + ended_s / QUIET_S + 1
