"""Rounds of a drain that moves blocks: when it is over, and how it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import cast

from kvproto.v1.common_pb2 import NODE_STATE_DRAINED, DrainOrder
from kvstore.core.clock import MonotonicClock
from kvstore.node.control.drain import Drainer
from kvstore.node.control.migrator import BlockMigrator
from support.node_harness import NodeHarness
from support.wait import WAIT_S, wait_until

ORDER = DrainOrder(operation_id=b"o" * 16, move=True)


@contextmanager
def draining(move: Callable[[Drainer], None], busy: Callable[[], bool] = lambda: False) -> Iterator[Drainer]:
    """A drain whose rounds call a function in place of moving blocks."""
    with closing(NodeHarness(clock=MonotonicClock())) as node:
        drainer = Drainer("n", node.gate, node.table, busy, node.counters, node.clock, writes_back=True, patience_s=WAIT_S)

        def one_round(_blocks: object) -> SimpleNamespace:
            move(drainer)
            return SimpleNamespace(remaining=0, why="")

        drainer.migrator = cast(
            "BlockMigrator",
            SimpleNamespace(round=one_round, remaining=0, moved_blocks=0, moved_bytes=0, reset=bool, close=bool),
        )
        drainer.apply(ORDER)
        drainer.start()
        try:
            yield drainer
        finally:
            drainer.stop(WAIT_S)


def test_drain_is_over_after_a_round_that_began_without_stores() -> None:
    """A store that began before the order completes during a round, which may not have its blocks."""
    under_way, rounds = [True], 0

    def move(_drainer: Drainer) -> None:
        nonlocal rounds
        rounds += 1
        under_way.clear()

    with draining(move, lambda: bool(under_way)) as drainer:
        wait_until(lambda: (progress := drainer.progress()) is not None and progress.state == NODE_STATE_DRAINED)
    assert rounds == 2


def test_undrain_stops_a_migration_after_its_batch() -> None:
    paused: list[bool] = []

    def move(drainer: Drainer) -> None:
        drainer.apply(None)  # while a batch is sent
        paused.append(drainer.pause(0.0))

    with draining(move):
        wait_until(lambda: paused)
    assert paused == [True]
