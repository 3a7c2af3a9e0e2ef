"""States of a block: only the transitions of the tables happen, and a wrong one tells the block's story."""

from __future__ import annotations

import itertools

import pytest

from kvstore.core.types import BlockKey
from kvstore.node.state.block_states import (
    DRAM_TRANSITIONS,
    STORY_LENGTH,
    VOLUME_TRANSITIONS,
    DramState,
    InvalidTransition,
    Story,
    VolumeReplica,
)

KEY, OTHER = BlockKey(b"k" * 16), BlockKey(b"o" * 16)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(DramState, DramState)))
def test_dram_transition_is_legal_if_the_table_has_it(old: DramState, new: DramState) -> None:
    if new in DRAM_TRANSITIONS[old]:
        Story().dram(KEY, old, new)
    else:
        with pytest.raises(InvalidTransition, match=f"{old.name} to {new.name}"):
            Story().dram(KEY, old, new)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(VolumeReplica, VolumeReplica)))
def test_volume_transition_is_legal_if_the_table_has_it(old: VolumeReplica, new: VolumeReplica) -> None:
    if new in VOLUME_TRANSITIONS[old]:
        Story().volume(KEY, old, new)
    else:
        with pytest.raises(InvalidTransition, match=f"{old.name} to {new.name}"):
            Story().volume(KEY, old, new)


def test_states_have_one_bit_each() -> None:
    for states in (DramState, VolumeReplica):
        assert sorted(states) == [0, 1, 2, 4, 8]


def test_invalid_transition_tells_the_story_of_its_block() -> None:
    story = Story()
    story.dram(KEY, DramState.ABSENT, DramState.WRITING)
    story.dram(OTHER, DramState.ABSENT, DramState.FILLING)
    story.volume(KEY, VolumeReplica.ABSENT, VolumeReplica.PRESENT)
    with pytest.raises(InvalidTransition) as raised:
        story.dram(KEY, DramState.WRITING, DramState.ABSENT)
    assert "DramState.WRITING, VolumeReplica.PRESENT" in str(raised.value)
    assert "FILLING" not in str(raised.value)


def test_story_is_bounded() -> None:
    story = Story()
    story.dram(KEY, DramState.ABSENT, DramState.CLEAN)
    for _ in range(STORY_LENGTH // 2):
        story.dram(OTHER, DramState.ABSENT, DramState.CLEAN)
        story.dram(OTHER, DramState.CLEAN, DramState.ABSENT)
    assert story.of(KEY) == []
    assert len(story.of(OTHER)) == STORY_LENGTH
