"""A table that writes blocks back only when they are evicted: whole chains at a time, and given up if space is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockShape, NamespaceId, Tier, VolumeId
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from support.chains import key_of

SHAPE = BlockShape(1, 4096)
NAMESPACE = NodeNamespace(NamespaceId(bytes(16)), SHAPE, None)
ROOM = 128
CHAIN = 16


@pytest.fixture(params=[True, False])
def table(request: pytest.FixtureRequest) -> Iterator[BlockTable]:
    counters, clock = Counters(), ManualClock()
    arena = DramArena(volume_id=VolumeId("dram"), capacity_bytes=ROOM * SHAPE.block_bytes)
    log = ReplicaChangeLog([arena.volume_id], counters, clock, keep=False)
    residency = Residency(arena, make_policy("lru"), [], log, counters, clock, cascades_chains=request.param)
    table = BlockTable(residency, writes_back=True)
    for chain in range(ROOM // CHAIN):
        keys = [key_of(chain, depth) for depth in range(CHAIN)]
        assert len(table.claim(NAMESPACE, keys).claimed_absent) == CHAIN
        slots = table.reserve(SHAPE, CHAIN, 0.0)
        assert slots is not None
        held = []
        for depth, slot in enumerate(slots):
            block = Block(NAMESPACE, keys[depth], keys[depth - 1] if depth else None, depth, b"")
            held.append(table.insert_fetched(block, slot, clean=False))
        table.unpin(held)
    yield table
    table.validate()
    table.close()
    arena.close()


def test_dirty_victims_are_written_by_chain_or_by_leaf(table: BlockTable, request: pytest.FixtureRequest) -> None:
    whole = request.node.callspec.params["table"]
    assert table.reserve(SHAPE, 4, 0.0) is None
    pending = table.take_pending(ROOM, ROOM << 20, 0.0)
    keys = {block.key for block in pending}
    # the coldest chains in full, up to the limit of one search for space; or the leaf of each
    expected = {key_of(chain, depth) for chain in range(4) for depth in range(CHAIN)}
    leaves = {key_of(chain, CHAIN - 1) for chain in range(ROOM // CHAIN)}
    assert keys == (expected if whole else leaves)
    for block in pending:
        table.writeback_failed(block)
    slots = table.reserve(SHAPE, 4, 0.0)
    assert slots is not None
    table.unreserve(slots)
    assert table.counts()[0] == ROOM - 4  # the coldest remaining leaves, and no other blocks


def test_give_up_drops_waiting_blocks_and_finishes_writes(table: BlockTable) -> None:
    keys = [key_of(0, depth) for depth in range(CHAIN)]
    table.requeue_writeback(filter(None, table.find(NAMESPACE, keys)))
    taken = table.take_pending(4, 1 << 20, 0.0)
    assert table.give_up_pending() == CHAIN - 4
    assert table.counts() == (ROOM, 4)
    assert table.give_up_pending() == 0
    assert not table.wait_written(0.0)
    # ancestors of a block that is being written stay, and so does the block
    assert evict_tier(table, Tier.DRAM) == CHAIN - 4
    for block in taken:
        table.writeback_failed(block)
    assert table.wait_written(0.0)
    assert evict_tier(table, Tier.DRAM) == 4
    assert table.counts() == (ROOM - CHAIN, 0)
