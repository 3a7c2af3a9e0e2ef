"""What fails now, told by what failed and worked before: against a plain reading of the same history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.observe.failure_tracker import FORGOTTEN_S, SETTLED_S, Failing

STEPS = st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=30)


def test_a_success_amid_failures_ends_nothing_and_a_later_one_does() -> None:
    failing = Failing()
    assert (failing.why(0.0), failing.seconds(0.0)) == ("", 0.0)
    failing.failed(0.0, "full")
    failing.worked(1.0)
    failing.failed(4.0, OSError("still full"))
    assert (failing.why(5.0), failing.seconds(5.0)) == ("still full", 5.0)
    failing.worked(4.0 + SETTLED_S)
    assert (failing.why(15.0), failing.seconds(15.0)) == ("", 0.0)


def test_what_is_not_tried_again_is_forgotten_and_all_done_is_over_at_once() -> None:
    failing = Failing()
    failing.failed(0.0, "full")
    assert failing.why(FORGOTTEN_S - 1)
    assert not failing.why(FORGOTTEN_S)
    failing.failed(100.0, "full again")
    assert failing.seconds(101.0) == 1.0, "another failure, not the first one going on"
    failing.over()
    assert not failing.why(101.0)


@given(STEPS)
def test_it_fails_exactly_from_a_failure_until_it_is_settled_or_forgotten(steps: list[tuple[float, bool]]) -> None:
    failing = Failing()
    now_s, began_s, last_s = 0, None, 0
    for pause_s, works in steps:
        now_s += pause_s
        if began_s is not None and (now_s - last_s >= FORGOTTEN_S or (works and now_s - last_s >= SETTLED_S)):
            began_s = None
        if works:
            failing.worked(now_s)
        else:
            began_s, last_s = now_s if began_s is None else began_s, now_s
            failing.failed(now_s, "why")
        assert bool(failing.why(now_s)) == (began_s is not None)
        assert (failing.seconds(now_s) > 0) == (began_s is not None)
        if began_s is not None and now_s > began_s:
            assert failing.seconds(now_s) == now_s - began_s
