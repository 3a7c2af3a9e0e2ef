"""The stall detector against its definition, computed from the whole history."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.base.volume_guard import VolumeStallDetector, VolumeState

PATIENCE_S, GAP_S = 1.0, 0.5
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "begin change", "end first", "end last", "answer", "tick"]), st.floats(0.0, 0.4)),
    max_size=60,
)


@given(STEPS)
def test_detector_any_history_agrees_with_definition(steps: list[tuple[str, float]]) -> None:
    """The state is checked often enough, so the time of a real clock equals that of the definition."""
    detector, now_s = VolumeStallDetector(GAP_S), 100.0
    outstanding: dict[int, tuple[float, float]] = {}
    answers = [-math.inf]
    for what, later_s in steps:
        now_s += later_s
        if what.startswith("begin"):
            patience_s = PATIENCE_S * (2.5 if "change" in what else 1.0)
            outstanding[detector.begin(now_s, patience_s)] = now_s, patience_s
        elif what.startswith("end") and outstanding:
            number = (min if "first" in what else max)(outstanding)
            detector.end(number, now_s)
            del outstanding[number]
            answers.append(now_s)
        elif what == "answer":
            detector.answer(now_s - later_s / 2)
            answers.append(now_s - later_s / 2)
        before = detector.state
        changed = detector.look(now_s)
        overdue = [began_s for began_s, patience_s in outstanding.values() if now_s >= max(began_s, *answers) + patience_s]
        assert detector.state is (VolumeState.STALLED if overdue else VolumeState.ANSWERING)
        assert changed is (detector.state is not before)
        assert detector.outstanding == len(outstanding)
        assert (now_s >= detector.due_s()) is bool(overdue)
        if not outstanding:
            assert detector.silent_s(now_s) == 0.0


@given(st.lists(st.floats(0.0, 100.0), max_size=20))
def test_detector_gaps_between_looks_count_up_to_bound(gaps_s: list[float]) -> None:
    detector, now_s, counted_s = VolumeStallDetector(GAP_S), 100.0, 0.0
    detector.begin(now_s, PATIENCE_S)
    for gap_s in gaps_s:
        now_s += gap_s
        counted_s += min(gap_s, GAP_S)
        detector.look(now_s)
        if abs(counted_s - PATIENCE_S) > 1e-6:
            assert (detector.state is VolumeState.STALLED) is (counted_s > PATIENCE_S)


def look_until(detector: VolumeStallDetector, from_s: float, to_s: float) -> None:
    """Check the state as often as a waiting caller does."""
    for step in range(int((to_s - from_s) * 8) + 1):
        detector.look(from_s + step / 8)


def test_detector_slow_disk_that_answers_is_not_stalled() -> None:
    detector = VolumeStallDetector(GAP_S)
    for _ in range(8):
        detector.begin(0.0, PATIENCE_S)
    for number in range(1, 9):  # one I/O ends each 0.9 s: the last one has been outstanding for long
        look_until(detector, (number - 1) * 0.9, number * 0.9)
        assert detector.state is VolumeState.ANSWERING
        detector.end(number, number * 0.9)


def test_detector_one_answer_ends_stall_of_many() -> None:
    detector = VolumeStallDetector(GAP_S)
    first, _ = detector.begin(0.0, PATIENCE_S), detector.begin(0.5, PATIENCE_S)
    look_until(detector, 0.0, 1.0)
    assert detector.state is VolumeState.STALLED
    assert detector.silent_s(3.0) == 3.0
    detector.end(first, 4.0)
    assert detector.look(4.0)
    assert detector.state is VolumeState.ANSWERING
    look_until(detector, 4.0, 5.0)
    assert detector.state is VolumeState.STALLED, "the other one is outstanding, and nothing else was answered"


def test_detector_stopped_process_does_not_blame_the_disk() -> None:
    detector = VolumeStallDetector(GAP_S)
    number = detector.begin(0.0, PATIENCE_S)
    detector.look(0.1)
    assert not detector.look(10.0), "the answer may have come meanwhile"
    detector.end(number, 10.1)
    assert not detector.look(10.1)
