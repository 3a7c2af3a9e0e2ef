"""Batches are written by several threads at once, and become durable in the order in which blocks were stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.node.durability.writeback import CommitOrder, WriteBack, WriteTarget
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters


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
