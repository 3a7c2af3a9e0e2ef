"""States of a block: only the transitions of the tables happen, and an invalid one raises an error with the block's story."""

from __future__ import annotations

import itertools

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, VolumeId
from kvstore.node.state.block_states import (
    DRAM_TRANSITIONS,
    STORY_LENGTH,
    VOLUME_SHIFT,
    VOLUME_TRANSITIONS,
    DramState,
    InvalidTransition,
    VolumeReplica,
)
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import LruPolicy

KEY, OTHER = BlockKey(b"k" * 16), BlockKey(b"o" * 16)


def residency() -> Residency:
    counters, clock = Counters(), ManualClock()
    arena = DramArena(volume_id=VolumeId("dram"), capacity_bytes=1 << 20)
    log = ReplicaChangeLog([arena.volume_id], counters, clock, keep=False)
    return Residency(arena, LruPolicy(), [], log, counters, clock)


def block_of(key: BlockKey, dram: DramState = DramState.ABSENT, replica: VolumeReplica = VolumeReplica.ABSENT) -> Block:
    block = Block(NodeNamespace(NamespaceId(bytes(16)), BlockShape(1, 4096), None), key, None, 0, b"")
    block.bits |= dram | replica << VOLUME_SHIFT
    return block


@pytest.mark.parametrize(("old", "new"), list(itertools.product(DramState, DramState)))
def test_dram_transition_is_legal_if_the_table_has_it(old: DramState, new: DramState) -> None:
    block = block_of(KEY, dram=old)
    if new in DRAM_TRANSITIONS[old]:
        residency().set_dram_state(block, new)
        assert (block.dram_state, block.volume_replica) == (new, VolumeReplica.ABSENT)
    else:
        with pytest.raises(InvalidTransition, match=f"{old.name} to {new.name}"):
            residency().set_dram_state(block, new)
        assert block.dram_state is old


@pytest.mark.parametrize(("old", "new"), list(itertools.product(VolumeReplica, VolumeReplica)))
def test_volume_transition_is_legal_if_the_table_has_it(old: VolumeReplica, new: VolumeReplica) -> None:
    block = block_of(KEY, DramState.CLEAN, old)
    if new in VOLUME_TRANSITIONS[old]:
        residency().set_replica(block, new)
        assert (block.dram_state, block.volume_replica) == (DramState.CLEAN, new)
    else:
        with pytest.raises(InvalidTransition, match=f"{old.name} to {new.name}"):
            residency().set_replica(block, new)
        assert block.volume_replica is old


def test_states_have_one_bit_each() -> None:
    for states in (DramState, VolumeReplica):
        assert sorted(states) == [0, 1, 2, 4, 8]


def test_invalid_transition_tells_the_story_of_its_block() -> None:
    held, block = residency(), block_of(KEY)
    held.set_dram_state(block, DramState.WRITING)
    held.set_dram_state(block_of(OTHER), DramState.FILLING)
    held.set_replica(block, VolumeReplica.PRESENT)
    with pytest.raises(InvalidTransition) as raised:
        held.set_dram_state(block, DramState.ABSENT)
    assert "DramState.WRITING, VolumeReplica.PRESENT" in str(raised.value)
    assert "FILLING" not in str(raised.value)


def test_story_is_bounded() -> None:
    held, block = residency(), block_of(OTHER)
    held.set_dram_state(block_of(KEY), DramState.CLEAN)
    for _ in range(STORY_LENGTH // 2):
        held.set_dram_state(block, DramState.CLEAN)
        held.set_dram_state(block, DramState.ABSENT)
    assert held.story.of(KEY) == []
    assert len(held.story.of(OTHER)) == STORY_LENGTH
