"""The stall detector against its definition, computed from the whole history."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.volume_stall import StallDetector, VolumeState

PATIENCE_S = 1.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "begin commit", "end first", "end last", "answer", "tick"]), st.floats(0.0, 1.5)),
    max_size=60,
)


@given(STEPS)
def test_detector_any_history_agrees_with_definition(steps: list[tuple[str, float]]) -> None:
    detector, now_s = StallDetector(), 100.0
    outstanding: dict[int, tuple[float, float]] = {}
    answers = [-math.inf]
    for what, later_s in steps:
        now_s += later_s
        if what.startswith("begin"):
            patience_s = PATIENCE_S * (2.5 if "commit" in what else 1.0)
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


def test_detector_slow_disk_that_answers_is_not_stalled() -> None:
    detector = StallDetector()
    for _ in range(8):
        detector.begin(0.0, PATIENCE_S)
    for second in range(1, 9):  # one of them ends each 0.9 s: the last one has been outstanding for long
        assert not detector.look(second * 0.9)
        detector.end(second, second * 0.9)
    assert detector.state is VolumeState.ANSWERING


def test_detector_one_answer_ends_stall_of_many() -> None:
    detector = StallDetector()
    first, _ = detector.begin(0.0, PATIENCE_S), detector.begin(0.5, PATIENCE_S)
    assert detector.look(1.0)
    assert detector.silent_s(3.0) == 3.0
    detector.end(first, 4.0)
    assert detector.look(4.0)
    assert detector.state is VolumeState.ANSWERING
    assert detector.look(5.0), "the other one has not come back, and nothing else has"
