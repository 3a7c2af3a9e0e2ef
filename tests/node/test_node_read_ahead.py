"""Reads ahead: blocks are held for a request that waits, after the loads of engines, and released when the call ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.core.types import BlockKey, Outcome, Tier
from kvstore.node.ahead.read_ahead import AheadReader
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.eviction.operator_requests import evict_tier
from support.callers import CancellableCall
from support.slow_slab import SlowNode
from support.wait import wait_until

BLOCKS = 32
"""Four windows: each is 1/8 of the read-ahead, which is 1/4 of the arena."""
WINDOW = 8
LONG_S = 60.0


class Node(SlowNode):
    """A node with two chains on its volume, which reads ahead."""

    def __init__(self, folder: Path, budget_blocks: int = BLOCKS) -> None:
        super().__init__(folder, BLOCKS, ("chain", "other"))
        (self.other,) = self.others
        self.block_bytes = self.namespace.shape.block_bytes
        self.budget = BufferBudget("read_ahead", budget_blocks * self.block_bytes, self.clock, self.counters)
        self.ahead = AheadReader(self.table, self.loader, self.budget, self.counters, self.clock)

    def begin(self, keys: list[BlockKey]) -> CancellableCall:
        """Begin to read ahead."""
        return CancellableCall(lambda: self.ahead.hold(self.request(keys, LONG_S)))

    def held(self, keys: list[BlockKey]) -> int:
        """Count the blocks that are pinned in DRAM."""
        wanted = set(keys)
        return sum(block.key in wanted and block.pins > 0 and block.dram is not None for block in self.table.snapshot())

    def read_bytes(self, unused: bool = False) -> int:
        name = "node_read_ahead_unused_bytes_total" if unused else "node_read_ahead_bytes_total"
        return self.counters.snapshot().get(name, 0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_read_ahead_holds_blocks_until_the_call_ends(node: Node) -> None:
    call = node.begin(node.chain)
    wait_until(lambda: node.held(node.chain) == BLOCKS and node.read_bytes() == BLOCKS * node.block_bytes)
    assert node.budget.used_bytes == BLOCKS * node.block_bytes
    assert evict_tier(node.table, Tier.DRAM) == 0
    resident = node.loader.load_resident(node.request(node.chain, LONG_S))
    assert resident is not None
    node.table.unpin(resident.pinned())
    assert call.cancel() == BLOCKS * node.block_bytes
    assert node.held(node.chain) == node.budget.used_bytes == 0
    assert node.read_bytes(unused=True) == 0


def test_read_ahead_in_vain_is_counted(node: Node) -> None:
    call = node.begin(node.chain)
    wait_until(lambda: node.held(node.chain) == BLOCKS)
    for run in node.loader.load(node.request(node.chain[:4], LONG_S)):
        node.table.unpin(run.pinned())
    call.cancel()
    assert node.read_bytes(unused=True) == (BLOCKS - 4) * node.block_bytes


def test_read_ahead_waits_for_loads_of_engines(node: Node) -> None:
    """A window that is being read is finished; no other one begins before the engine's load has ended."""
    node.slab.slow = frozenset((node.other[-1],))
    waited = node.loader.load(node.request(node.other, LONG_S))
    node.table.unpin(next(waited).pinned())
    call = node.begin(node.chain)
    assert call.waiting() is call
    assert node.held(node.chain) == 0
    node.slab.gate.set()
    for run in waited:
        node.table.unpin(run.pinned())
    wait_until(lambda: node.held(node.chain) == BLOCKS)
    call.cancel()


def test_read_ahead_and_load_read_no_block_twice(node: Node) -> None:
    """The load comes while a window is being read: it waits for that one, and reads the others itself."""
    node.slab.slow = frozenset((node.chain[0],))
    call = node.begin(node.chain)
    wait_until(lambda: node.slab.waiting)
    load = CancellableCall(lambda: node.outcomes(node.loader.load(node.request(node.chain, LONG_S)), BLOCKS))
    load.waiting()
    node.slab.gate.set()
    assert load.answer.result(LONG_S) == [Outcome.HIT] * BLOCKS
    call.cancel()
    assert node.slab.blocks_read == BLOCKS
    assert node.read_bytes(unused=True) == 0


def test_read_ahead_cancelled_in_a_window_releases_it(node: Node) -> None:
    node.slab.slow = frozenset((node.chain[0],))
    call = node.begin(node.chain)
    wait_until(lambda: node.slab.waiting)
    call.scope.cancel()
    node.slab.gate.set()
    call.answer.result(LONG_S)
    wait_until(lambda: node.held(node.chain) == 0)
    assert node.budget.used_bytes == 0


def test_read_ahead_longer_than_budget_reads_its_head(tmp_path: Path) -> None:
    node = Node(tmp_path, budget_blocks=WINDOW)
    call = node.begin(node.chain)
    wait_until(lambda: node.held(node.chain[:WINDOW]) == WINDOW)
    second = node.begin(node.other).waiting()
    assert node.held(node.chain[WINDOW:]) == node.held(node.other) == 0
    call.cancel()
    wait_until(lambda: node.held(node.other[:WINDOW]) == WINDOW)
    assert second.cancel() == WINDOW * node.block_bytes
    node.close()


def test_read_ahead_without_budget_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, budget_blocks=0)
    assert node.ahead.hold(node.request(node.chain, LONG_S)) == 0
    assert node.ahead.bring(node.request(node.chain, LONG_S), "acme") == 0
    assert node.counters.snapshot()["node_read_ahead_refused_total"] == 2
    node.close()


@pytest.mark.parametrize("seed", range(20))
def test_read_ahead_random_calls_leave_nothing_behind(node: Node, seed: int) -> None:
    """Loads, reads ahead and evictions at once: all loads hit with the right bytes, and in the end nothing is held."""
    draw = random.Random(seed)
    calls, threads, wrong = [], [], []

    def load(keys: list[BlockKey]) -> None:
        if node.outcomes(node.loader.load(node.request(keys, LONG_S)), len(keys)) != [Outcome.HIT] * len(keys):
            wrong.append(keys)

    for _ in range(12):
        keys = draw.choice([node.chain, node.other])[: draw.randint(1, BLOCKS)]
        match draw.randrange(4):
            case 0 | 1:
                calls.append(node.begin(keys))
            case 2:
                threads.append(threading.Thread(target=load, args=(keys,)))
                threads[-1].start()
            case 3:
                evict_tier(node.table, Tier.DRAM)
                if calls:
                    draw.choice(calls).scope.cancel()
    for call in calls:
        call.scope.cancel()
    for thread in threads:
        thread.join(LONG_S)
    read = sum(cast("int", call.answer.result(LONG_S)) for call in calls)
    assert not wrong
    wait_until(lambda: node.held([*node.chain, *node.other]) == 0)
    assert node.budget.used_bytes == 0
    assert node.read_bytes(unused=True) <= node.read_bytes() == read
    assert not node.loader.unasked
