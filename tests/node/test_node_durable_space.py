"""Several durable volumes of one node: chains are evicted from their ends on all of them, and a failing one delays no other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.types import BlockShape
from kvstore.node.eviction.operator_requests import evict_down_to
from support.chains import key_of
from support.session_harness import BATCH, SessionHarness


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SessionHarness]:
    made = SessionHarness(tmp_path)
    yield made
    made.close()


def test_eviction_takes_chain_ends_over_all_volumes(node: SessionHarness) -> None:
    play(node, 120)
    assert min(node.blocks_on()) > 50, "all are in use"
    assert sum(node.lengths.values()) > 2 * sum(node.blocks_on()), "much has left"
    assert node.unreachable() < 0.12  # with a separate order per volume: 0.4 to 0.7


def play(node: SessionHarness, turns: int) -> None:
    """Sessions take turns."""
    draw = random.Random(7)
    for _ in range(turns):
        node.turn(draw.randrange(24), draw.randrange(1, 2 * BATCH))
        node.clock.advance(1.0)


@pytest.mark.parametrize("how", ["fails", pytest.param("read-only", marks=pytest.mark.thorough)])
def test_volume_without_changes_delays_no_other(node: SessionHarness, how: str) -> None:
    play(node, 80)
    bad = node.slabs[1]
    if how == "fails":
        bad.fails = True
    else:
        bad.make_read_only("told to")
    held = node.blocks_on()[1]
    before = node.durable().keys()
    play(node, 80)
    assert node.blocks_on()[1] == held, "nothing came, nothing left"
    assert len(node.durable().keys() - before) > 50, "the others go on"
    node_volume = node.table.node_volumes[1]
    assert node_volume.aside, "what was met of it is out of the order"
    bad.fails = False
    bad.make_read_only(None)
    node.clock.advance(60.0)
    was_there = {block.key for block in node.table.snapshot() if block.nvme_volume is node_volume}
    play(node, 80)
    assert not node_volume.aside
    now = {block.key for block in node.table.snapshot() if block.nvme_volume is node_volume}
    assert was_there - now, "it takes part again"
    assert now - was_there


def test_evict_one_volume_keeps_blocks_of_others(node: SessionHarness) -> None:
    play(node, 80)
    before = node.blocks_on()
    capacity = node.slabs[0].usage().capacity_bytes
    done = evict_down_to(node.table, node.table.node_volumes[0], capacity // 4)
    assert node.slabs[0].usage().used_bytes <= capacity // 4
    assert node.blocks_on() == [before[0] - done.blocks, *before[1:]]
    node.table.validate()


def test_blocks_are_written_to_volumes_that_can_hold_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = SessionHarness(tmp_path, sizes=(64 << 10, 1 << 20), shape=BlockShape(2, 64 << 10))
    for chain in range(20):  # more than the large volume holds: when it has less space than the small one, it makes space
        node.turn(chain, 1)
        node.clock.advance(1.0)
        assert key_of(chain, 0) in node.durable()
    small, large = node.blocks_on()
    assert small == 0
    assert 0 < large < 20
    assert node.counters.get("write_back_unfit_blocks_total") == node.counters.get("write_back_errors_total") == 0
    node.close()
    assert not caplog.records


def test_blocks_too_large_for_all_volumes_are_given_up_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = SessionHarness(tmp_path, sizes=(64 << 10, 32 << 10), shape=BlockShape(2, 64 << 10))
    for chain in range(3):
        node.turn(chain, 1)
    assert not node.durable()
    assert node.table.counts() == (3, 0)
    assert node.counters.get("write_back_unfit_blocks_total") == node.counters.get("write_back_dropped_blocks_total") == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not any(node_volume.resting_until_s for node_volume in node.table.node_volumes)
    node.close()
