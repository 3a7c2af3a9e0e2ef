"""Batches are written by several threads at once, and become durable in the order in which blocks were stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.core.types import BlockRun
from kvstore.node.durability.writeback import CommitOrder, WriteBack, WriteTarget
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import block_key
from kvstore.transport.contract import WriteRequest
from support.layered_node import SPEC, LayeredNode
from support.node_harness import MIB, NodeHarness


def test_later_batch_commits_and_reports_after_earlier_ones() -> None:
    order, done = CommitOrder(Counters()), []
    first_may_end, written = threading.Event(), threading.Barrier(4)

    def write(number: int) -> None:
        written.wait(10)  # data of all batches is being written at once
        if number == 0:
            assert first_may_end.wait(10)
        order.wait(number)
        done.append(number)
        order.done(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in (2, 0, 1)]
    for thread in threads:
        thread.start()
    written.wait(10)
    for thread in threads[::2]:
        thread.join(0.05)
    assert done == [], "the first has not ended"
    first_may_end.set()
    for thread in threads:
        thread.join(10)
    assert done == [0, 1, 2]


def test_writeback_unexpected_error_frees_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(NodeHarness(tmp_path, volumes=[MIB])) as node:
        node.store("a", 0, 4)
        with monkeypatch.context() as patch:
            patch.setattr(node.slabs[0], "write", lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                node.write_back()
        assert node.slabs[0].usage().blocks == 0
        for key in node.keys("a", 4):
            node.table.writeback_failed(node.block(key))
        assert node.table.requeue_writeback(node.table.snapshot()) == 4
        assert node.write_back() == 4
        assert node.slabs[0].usage().blocks == 4


def test_remote_store_unexpected_error_frees_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LayeredNode()) as node:
        run = BlockRun(SPEC.namespace, None, 0, (block_key(0), block_key(1)))
        request = WriteRequest(run, SPEC.shape, durable=True, deadline_s=node.clock.now_s() + 60.0)
        monkeypatch.setattr(node.table, "are_durable", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            node.provider.write(request)
        assert node.arena.usage().blocks == 0
        assert node.gate.stores_under_way() == 0


class Table:
    """Hands out queued batches, and records their results."""

    def __init__(self) -> None:
        self.batches: list[list[Block]] = []
        self.changed = threading.Condition()
        self.given_up: list[Block] = []

    def put(self, blocks: list[Block]) -> None:
        with self.changed:
            self.batches.append(blocks)
            self.changed.notify_all()

    def take_pending(self, _blocks: int, _nbytes: int, wait_s: float) -> list[Block]:
        with self.changed:
            self.changed.wait_for(lambda: self.batches, wait_s)
            return self.batches.pop(0) if self.batches else []

    def wake_write_back(self) -> None:
        """No wait of these tests is long."""

    def writeback_failed(self, block: Block) -> None:
        self.given_up.append(block)


@pytest.mark.parametrize("where", ["while checking", "while writing"])
def test_writeback_unexpected_error_fails_only_its_batch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, counters = Table(), Counters()
    bad, good = (cast("Block", SimpleNamespace(name=name, writing=True)) for name in ("bad", "good"))
    written: list[Block] = []
    done = threading.Event()

    def check(_: WriteBack, blocks: Sequence[Block]) -> list[Block]:
        if where == "while checking" and bad in blocks:
            raise RuntimeError("a bug")
        return list(blocks)

    class Disk:
        def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
            turn()
            if bad in blocks:
                raise RuntimeError("a bug")
            written.extend(blocks)
            done.set()

    monkeypatch.setattr(WriteBack, "_verified", check)
    target: WriteTarget = Disk()
    behind = WriteBack(cast("BlockTable", table), target, counters)
    behind.start()
    table.put([bad])
    table.put([good])
    try:
        assert done.wait(10)
    finally:
        behind.stop(10)
    assert (table.given_up, written) == ([bad], [good])
    assert counters.get("write_back_bugs_total") == 1
