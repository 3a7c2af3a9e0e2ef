"""Batches are written by several threads at once, and still become durable in the order in which blocks were stored."""

from __future__ import annotations

import threading

from kvstore.node.writebehind import Turns
from kvstore.observe.counters import Counters


def test_a_later_batch_neither_commits_nor_reports_before_the_earlier_ones() -> None:
    turns, done = Turns(Counters()), []
    first_may_end, written = threading.Event(), threading.Barrier(4)

    def write(number: int) -> None:
        written.wait(10)  # data of all batches is on its way at once
        if number == 0:
            assert first_may_end.wait(10)
        turns.wait(number)
        done.append(number)
        turns.done(number)

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
