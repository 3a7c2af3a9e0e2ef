"""FailureTracker against a simple model of the same history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.observe.failure_tracker import FORGET_S, SETTLE_S, FailureTracker

STEPS = st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=30)


def test_success_ends_only_a_settled_failure() -> None:
    tracker = FailureTracker()
    assert (tracker.reason(0.0), tracker.seconds(0.0)) == ("", 0.0)
    tracker.failed(0.0, "full")
    tracker.succeeded(1.0)
    tracker.failed(4.0, OSError("still full"))
    assert (tracker.reason(5.0), tracker.seconds(5.0)) == ("still full", 5.0)
    tracker.succeeded(4.0 + SETTLE_S)
    assert (tracker.reason(15.0), tracker.seconds(15.0)) == ("", 0.0)


def test_failure_is_forgotten_or_cleared() -> None:
    tracker = FailureTracker()
    tracker.failed(0.0, "full")
    assert tracker.reason(FORGET_S - 1)
    assert not tracker.reason(FORGET_S)
    tracker.failed(100.0, "full again")
    assert tracker.seconds(101.0) == 1.0, "a new failure, not the first one"
    tracker.clear()
    assert not tracker.reason(101.0)


@given(STEPS)
def test_tracker_matches_model(steps: list[tuple[float, bool]]) -> None:
    tracker = FailureTracker()
    now_s, began_s, last_s = 0, None, 0
    for pause_s, works in steps:
        now_s += pause_s
        if began_s is not None and (now_s - last_s >= FORGET_S or (works and now_s - last_s >= SETTLE_S)):
            began_s = None
        if works:
            tracker.succeeded(now_s)
        else:
            began_s, last_s = now_s if began_s is None else began_s, now_s
            tracker.failed(now_s, "why")
        assert bool(tracker.reason(now_s)) == (began_s is not None)
        assert (tracker.seconds(now_s) > 0) == (began_s is not None)
        if began_s is not None and now_s > began_s:
            assert tracker.seconds(now_s) == now_s - began_s
