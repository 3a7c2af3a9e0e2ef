"""Model-based tests of the order of publish batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.types import BootId
from kvstore.metadata.indexing.publish_sequence import BatchVerdict, SequenceMode, SequenceState

BOOT, OTHER = BootId(b"b" * 16), BootId(b"o" * 16)
EVENTS = st.lists(st.one_of(st.just("register"), st.integers(1, 8)), max_size=40)


@given(EVENTS)
def test_sequence_batch_after_gap_is_refused(events: list[str | int]) -> None:
    state, highest, inventory_follows = SequenceState(BOOT), 0, False
    for event in events:
        state = SequenceState.decode(state.encode(), BOOT)
        if isinstance(event, str):
            state = state.registered(BOOT)
            continue
        verdict, following = state.judge(event)
        if verdict is BatchVerdict.APPLY:
            # nothing was skipped since this count began, except after a gap, when the node sends everything anyway
            assert event <= highest + 1 or (inventory_follows and state.mode is SequenceMode.ANEW)
            highest = event
            assert following.last == event
        elif verdict is BatchVerdict.DUPLICATE:
            assert event <= highest
            assert following == state
        else:
            assert event > highest + 1 or state.mode is SequenceMode.LOST
            assert following.mode is SequenceMode.LOST
            inventory_follows = True
        state = following


def test_sequence_new_boot_starts_at_one() -> None:
    state = SequenceState(BOOT, 7, SequenceMode.RUNNING)
    assert SequenceState.decode(state.encode(), OTHER) == SequenceState(OTHER)
    assert state.registered(OTHER) == SequenceState(OTHER)
    assert SequenceState.decode(None, BOOT) == SequenceState.decode(b"garbage", BOOT) == SequenceState(BOOT)
    assert SequenceState(OTHER).judge(2)[0] is BatchVerdict.REFUSE
    assert SequenceState(OTHER).judge(1)[0] is BatchVerdict.APPLY


def test_sequence_after_registration_restarts_or_continues() -> None:
    reopened = SequenceState(BOOT, 7, SequenceMode.RUNNING).registered(BOOT)
    assert reopened.judge(1) == (BatchVerdict.APPLY, SequenceState(BOOT, 1, SequenceMode.RUNNING))
    assert reopened.judge(8) == (BatchVerdict.APPLY, SequenceState(BOOT, 8, SequenceMode.RUNNING))
    assert reopened.judge(9)[0] is BatchVerdict.REFUSE
