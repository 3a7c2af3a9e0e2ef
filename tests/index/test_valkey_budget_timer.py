"""One timer ends all batches that take longer than a budget."""

from __future__ import annotations

import asyncio

from kvstore.index.valkey.cluster import PATIENCE, UNANSWERED, BudgetTimer, ShardBatch, ShardPrimary

BUDGET_S = 0.05


def sent_batch(shards: int = 2) -> tuple[ShardBatch, list[ShardPrimary]]:
    """A batch that was sent to some shards."""
    asked = [ShardPrimary(f"host:{number}") for number in range(shards)]
    batch = ShardBatch([UNANSWERED] * shards)
    batch.pending = set(asked)
    batch.asked = shards
    return batch, asked


async def test_budget_ends_batches_in_time_and_no_others() -> None:
    loop, timer = asyncio.get_running_loop(), BudgetTimer(BUDGET_S)
    began_s = loop.time()
    batches = [sent_batch() for _ in range(100)]
    ended_s: list[float] = []
    for number, (batch, (first, second)) in enumerate(batches):
        timer.watch(batch)
        batch.received(first, [0], [b""])
        if number % 2:
            batch.received(second, [1], [b""])  # in time
            assert batch.finished.done()
        else:
            batch.finished.add_done_callback(lambda _: ended_s.append(loop.time() - began_s))
    await asyncio.wait_for(asyncio.gather(*(batch.finished for batch, _ in batches)), 60.0)
    assert len(ended_s) == 50
    assert min(ended_s) >= BUDGET_S
    cancelled, (first, _) = sent_batch()
    timer.watch(cancelled)
    cancelled.finished.cancel()
    last, (first, _) = sent_batch()
    timer.watch(last)
    last.received(first, [0], [b""])
    await asyncio.wait_for(last.finished, 60.0)


async def test_budget_is_longer_if_no_shard_answers() -> None:
    loop, timer = asyncio.get_running_loop(), BudgetTimer(BUDGET_S)
    began_s = loop.time()
    batch, _ = sent_batch()
    timer.watch(batch)
    await asyncio.wait_for(batch.finished, 60.0)
    assert loop.time() - began_s >= PATIENCE * BUDGET_S


async def test_budget_closed_ends_all_batches_at_once() -> None:
    timer = BudgetTimer(3_600.0)
    batches = [sent_batch()[0] for _ in range(3)]
    for batch in batches:
        timer.watch(batch)
    timer.close()
    assert all(batch.finished.done() for batch in batches)
