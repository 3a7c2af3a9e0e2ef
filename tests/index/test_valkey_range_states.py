"""The states of key ranges: the transition table, repairs and suspicions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.limits import DIGEST_RANGES
from kvstore.index.valkey.range_states import (
    REPAIR_S,
    SUSPECT_S,
    TRANSITIONS,
    TRUSTED,
    RangeEvent,
    RangeState,
    RangeStates,
    complete_marker,
    new_token,
    repair_marker,
)

EPOCH, OTHER = bytes(16), bytes([1]) * 16
ALL = range(DIGEST_RANGES)


def read_all(states: RangeStates, marker: bytes | None, now_s: float = 0.0) -> None:
    states.read(dict.fromkeys(ALL, marker), EPOCH, now_s)


def good_states() -> RangeStates:
    states = RangeStates()
    read_all(states, complete_marker(EPOCH))
    return states


def test_table_of_the_docstring_is_the_table_of_the_code() -> None:
    import kvstore.index.valkey.range_states as module

    columns = [RangeEvent.MOVED, RangeEvent.COMPLETE, RangeEvent.TOKEN, RangeEvent.GONE, RangeEvent.EXPIRED]
    documented = {}
    for line in (module.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and cells[0].upper() in RangeState.__members__:
            state = RangeState[cells[0].upper()]
            for event, cell in zip(columns, cells[1:], strict=True):
                documented[state, event] = RangeState[cell.upper()] if cell else state
    assert documented == {(state, event): TRANSITIONS.get((state, event), state) for state in RangeState for event in columns}


def test_absence_counts_only_after_the_marker_was_read() -> None:
    states = RangeStates()
    assert not any(states.trusted)
    assert states.unread() == list(ALL)
    read_all(states, complete_marker(EPOCH))
    assert all(states.trusted)
    assert states.checks() == []
    states.moved([3, 5])
    assert (states.trusted[3], states.trusted[4]) == (0, 1)
    assert states.unread() == [3, 5]


def test_moved_range_is_suspect_for_a_time() -> None:
    states = good_states()
    states.moved([3, 5])
    states.read({3: complete_marker(EPOCH), 5: complete_marker(EPOCH)}, EPOCH, 10.0)
    (check,) = states.checks()
    assert (check.ranges, check.lost) == ({3, 5}, False)
    assert all(states.trusted), "a complete marker is enough"
    states.tick(10.0 + SUSPECT_S - 1)
    assert states.checks() == [check]
    states.moved([3])
    states.read({3: complete_marker(EPOCH)}, EPOCH, 12.0)
    old, new = states.checks()
    assert (old.ranges, new.ranges) == ({5}, {3}), "another failover is another check"
    assert new.token != check.token
    states.tick(10.0 + SUSPECT_S)
    states.tick(12.0 + SUSPECT_S)
    assert states.checks() == []
    assert states.state(3) is RangeState.GOOD


@pytest.mark.parametrize("marker", [None, complete_marker(OTHER), repair_marker(OTHER, 7), b"", b"x" * 200])
def test_marker_gone_range_is_lost_until_repaired(marker: bytes | None) -> None:
    states = good_states()
    states.read({8: marker, 9: marker}, EPOCH, 1.0)
    assert states.lost() == [8, 9]
    assert not states.trusted[8]
    token = new_token()
    states.read({8: repair_marker(EPOCH, token), 9: repair_marker(EPOCH, token)}, EPOCH, 1.0)
    assert states.lost() == []
    assert not states.trusted[8]
    (check,) = states.checks()
    assert (check.ranges, check.lost) == ({8, 9}, True)
    assert states.finished((), 1.0 + REPAIR_S - 1) == []
    assert states.finished({check.token}, 1.0) == [(token, [8, 9], True)]
    assert states.finished((), 1.0 + REPAIR_S) == [(token, [8, 9], False)]
    states.read({8: complete_marker(EPOCH)}, EPOCH, 2.0)
    assert states.checks()[0].ranges == {9}
    states.read({9: complete_marker(EPOCH)}, EPOCH, 2.0)
    assert states.checks() == []
    assert all(states.trusted)


def test_range_lost_again_in_repair_gets_another_repair() -> None:
    states = good_states()
    first, second = new_token(), new_token()
    states.read({8: repair_marker(EPOCH, first)}, EPOCH, 0.0)
    states.read({8: None}, EPOCH, 1.0)
    assert states.finished({first}, 1.0) == []
    states.read({8: repair_marker(EPOCH, second)}, EPOCH, 1.0)
    (check,) = states.checks()
    assert states.finished({check.token}, 1.0) == [(second, [8], True)]


def test_report_of_a_part_of_a_repair_does_not_end_it() -> None:
    states, other = good_states(), good_states()
    marker = repair_marker(EPOCH, 7)
    states.read({8: marker}, EPOCH, 0.0)
    (part,) = states.checks()
    states.read({8: marker, 9: marker}, EPOCH, 0.0)
    (whole,) = states.checks()
    assert states.finished({part.token}, 1.0) == []
    assert states.finished({whole.token}, 1.0) == [(7, [8, 9], True)]
    other.read({9: marker, 8: marker}, EPOCH, 5.0)
    assert other.checks() == [whole], "all servers ask for the same"
    states.read({8: complete_marker(EPOCH), 9: marker}, EPOCH, 1.0)
    assert states.finished({whole.token}, 1.0) == [(7, [9], True)], "the rest is done, too"


markers = st.sampled_from(
    [None, complete_marker(EPOCH), complete_marker(OTHER), repair_marker(EPOCH, 1), repair_marker(EPOCH, 2)]
)
steps = st.one_of(
    st.tuples(st.just("moved"), st.frozensets(st.integers(0, 3))),
    st.tuples(st.just("read"), st.dictionaries(st.integers(0, 3), markers)),
    st.tuples(st.just("tick"), st.just(30.0)),
)


@given(st.lists(steps, max_size=30))
def test_checks_name_exactly_the_ranges_in_their_states(steps: list[tuple[str, object]]) -> None:
    states, now_s = RangeStates(), 0.0
    for kind, argument in steps:
        if kind == "moved":
            states.moved(argument)  # type: ignore[arg-type]
        elif kind == "read":
            states.read(argument, EPOCH, now_s)  # type: ignore[arg-type]
        else:
            now_s += argument  # type: ignore[operator]
            states.tick(now_s)
        found = {number: states.state(number) for number in range(4)}
        checks = states.checks()
        lost = {number for check in checks if check.lost for number in check.ranges}
        suspect = {number for check in checks if not check.lost for number in check.ranges}
        assert lost == {number for number, state in found.items() if state is RangeState.REPAIRING}
        assert suspect == {number for number, state in found.items() if state is RangeState.SUSPECT}
        assert all(bool(states.trusted[number]) == (state in TRUSTED) for number, state in found.items())
        assert all(check.ranges for check in checks)
