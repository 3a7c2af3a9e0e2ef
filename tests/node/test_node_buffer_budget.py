"""Admission to a staging budget: in order of arrival, all or nothing, within the capacity and the deadline."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.cancel_scope import CancelScope
from kvstore.core.clock import MonotonicClock
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.observe.counters import Counters
from support.wait import wait_until

SHORT_S = 0.02
LONG_S = 20.0


def make(capacity: int) -> tuple[BufferBudget, Counters, MonotonicClock]:
    counters, clock = Counters(), MonotonicClock()
    return BufferBudget("prefill_buffer", capacity, clock, counters), counters, clock


def test_admit_larger_than_capacity_is_refused_at_once() -> None:
    budget, counters, clock = make(10)
    assert not budget.admit(11, clock.now_s() + LONG_S)
    assert counters.snapshot() == {"prefill_buffer_refused_total": 1}
    assert budget.admit(10, clock.now_s())
    budget.release(10)


def test_admit_timeout_leaves_the_queue_to_the_next() -> None:
    budget, counters, clock = make(10)
    assert budget.admit(6, clock.now_s())
    small = threading.Thread(target=lambda: admitted.append(budget.admit(4, clock.now_s() + LONG_S)))
    admitted: list[bool] = []

    def large() -> None:
        small.start()
        admitted.append(budget.admit(8, clock.now_s() + SHORT_S))

    first = threading.Thread(target=large)
    first.start()
    first.join(LONG_S)
    small.join(LONG_S)
    assert sorted(admitted) == [False, True]
    assert (budget.used_bytes, budget.waiting) == (10, 0)
    assert counters.get("prefill_buffer_timeouts_total") == 1


def test_admit_small_does_not_overtake_large() -> None:
    budget, _, clock = make(10)
    assert budget.admit(6, clock.now_s())
    order: list[int] = []

    def admit(size: int) -> None:
        assert budget.admit(size, clock.now_s() + LONG_S)
        order.append(size)
        budget.release(size)

    threads = []
    for number, size in enumerate((8, 1, 9, 2)):
        threads.append(threading.Thread(target=admit, args=(size,)))
        threads[-1].start()
        wait_until(lambda number=number: budget.waiting == number + 1, poll_s=0.001)  # type: ignore[misc]
    assert order == [], "1 would fit, but 8 arrived earlier"
    budget.release(6)
    for thread in threads:
        thread.join(LONG_S)
    assert order[0] == 8
    assert sorted(order) == [1, 2, 8, 9]
    assert budget.used_bytes == 0


def test_admit_tenant_at_its_limit_delays_no_other() -> None:
    budget, counters, clock = make(16)
    assert not budget.admit(5, clock.now_s() + LONG_S, "acme"), "larger than the tenant's limit"
    assert counters.get("prefill_buffer_refused_total") == 1
    assert budget.admit(4, clock.now_s(), "acme")
    assert not budget.admit(1, clock.now_s(), "acme")
    done = threading.Event()

    def admit() -> None:
        if budget.admit(3, clock.now_s() + LONG_S, "acme"):
            done.set()

    thread = threading.Thread(target=admit)
    thread.start()
    assert budget.admit(12, clock.now_s() + LONG_S), "a tenant at its limit is not in the queue"
    budget.release(12)
    assert budget.admit(4, clock.now_s(), "other")
    assert not done.is_set()
    budget.release(4, "acme")
    thread.join(LONG_S)
    assert done.is_set()
    budget.release(3, "acme")
    budget.release(4, "other")
    assert budget.used_bytes == 0
    assert budget.admit(4, clock.now_s(), "acme"), "nothing is left on the tenant's account"


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30), capacity=st.integers(1, 12))
def test_admit_concurrent_stays_within_capacity(sizes: list[int], capacity: int) -> None:
    budget, _, clock = make(capacity)
    lock = threading.Lock()
    inside, results = [0], []

    def work(size: int) -> None:
        with budget.admission(size, clock.now_s() + LONG_S) as admitted:
            if admitted:
                with lock:
                    inside[0] += size
                    assert inside[0] <= capacity
                with lock:
                    inside[0] -= size
            results.append(admitted == (size <= capacity))

    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert results == [True] * len(sizes)
    assert (budget.used_bytes, budget.waiting) == (0, 0)


@settings(max_examples=60)
@given(
    capacity=st.integers(1, 8),
    actions=st.lists(st.tuples(st.sampled_from(["admit", "cancel", "release"]), st.integers(0, 8)), min_size=4, max_size=40),
)
def test_admit_cancelled_leaves_the_queue_at_once(capacity: int, actions: list[tuple[str, int]]) -> None:
    """Compare with a model: a queue whose leading entries are admitted as long as they fit."""
    budget, counters, clock = make(capacity)
    queue: list[tuple[int, CancelScope, threading.Thread]] = []
    inside: list[int] = []
    cancelled = 0

    def settle() -> None:
        while queue and sum(inside) + queue[0][0] <= capacity:
            size, _, thread = queue.pop(0)
            thread.join(LONG_S)
            inside.append(size)
        wait_until(lambda: (budget.used_bytes, budget.waiting) == (sum(inside), len(queue)), poll_s=0.0)

    for action, number in [*actions, *[("cancel", 0), ("release", 0)] * len(actions)]:
        if action == "admit" and number <= capacity:
            scope = CancelScope()
            args = (budget.admit, number, clock.now_s() + 60)
            queue.append((number, scope, threading.Thread(target=scope.context().run, args=args)))
            queue[-1][2].start()
        elif action == "cancel" and queue:
            _, scope, thread = queue.pop(number % len(queue))
            scope.cancel()
            thread.join(LONG_S)
            cancelled += 1
        elif action == "release" and inside:
            budget.release(inside.pop(number % len(inside)))
        settle()
    assert (budget.used_bytes, budget.waiting) == (0, 0)
    assert counters.snapshot() == ({"node_waits_cancelled_total": cancelled} if cancelled else {})
