"""One timer ends all waits that take longer than a budget."""

from __future__ import annotations

import asyncio

from kvstore.index.valkey.cluster import BudgetTimer

BUDGET_S = 0.05


async def test_budget_ends_waits_in_time_and_no_others() -> None:
    loop, timer = asyncio.get_running_loop(), BudgetTimer(BUDGET_S)
    began_s = loop.time()
    waits: list[asyncio.Future[None]] = [loop.create_future() for _ in range(100)]
    ended_s: list[float] = []
    for number, wait in enumerate(waits):
        timer.watch(wait)
        if number % 2:
            wait.set_result(None)  # answered in time
        else:
            wait.add_done_callback(lambda _: ended_s.append(loop.time() - began_s))
    await asyncio.wait_for(asyncio.gather(*waits), 60.0)
    assert len(ended_s) == 50
    assert min(ended_s) >= BUDGET_S
    later = loop.create_future()
    timer.watch(later)
    later.cancel()
    last: asyncio.Future[None] = loop.create_future()
    timer.watch(last)
    await asyncio.wait_for(last, 60.0)


async def test_budget_closed_ends_all_waits_at_once() -> None:
    loop, timer = asyncio.get_running_loop(), BudgetTimer(3_600.0)
    waits: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
    for wait in waits:
        timer.watch(wait)
    timer.close()
    assert all(wait.done() for wait in waits)
