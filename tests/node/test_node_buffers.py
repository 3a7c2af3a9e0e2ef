"""Room in the buffers: in order of arrival, all or none, never more than there is, and nobody waits beyond the deadline."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.clock import MonotonicClock
from kvstore.node.base.cancellation import Wanted
from kvstore.node.loads.staging_budget import StagingBuffer
from kvstore.observe.counters import Counters

SOON_S = 0.02
LONG_S = 20.0


def make(capacity: int) -> tuple[StagingBuffer, Counters, MonotonicClock]:
    counters, clock = Counters(), MonotonicClock()
    return StagingBuffer("prefill_buffer", capacity, clock, counters), counters, clock


def test_what_can_never_fit_is_refused_at_once() -> None:
    buffer, counters, clock = make(10)
    assert not buffer.admit(11, clock.now_s() + LONG_S)
    assert counters.snapshot() == {"prefill_buffer_refused_total": 1}
    assert buffer.admit(10, clock.now_s())
    buffer.release(10)


def test_who_waits_too_long_leaves_the_queue_and_those_behind_go_on() -> None:
    buffer, counters, clock = make(10)
    assert buffer.admit(6, clock.now_s())
    small = threading.Thread(target=lambda: admitted.append(buffer.admit(4, clock.now_s() + LONG_S)))
    admitted: list[bool] = []

    def large() -> None:
        small.start()
        admitted.append(buffer.admit(8, clock.now_s() + SOON_S))

    first = threading.Thread(target=large)
    first.start()
    first.join(LONG_S)
    small.join(LONG_S)
    assert sorted(admitted) == [False, True]
    assert (buffer.used_bytes, buffer.waiting) == (10, 0)
    assert counters.get("prefill_buffer_timeouts_total") == 1


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    buffer, _, clock = make(10)
    assert buffer.admit(6, clock.now_s())
    order: list[int] = []

    def wait(size: int) -> None:
        assert buffer.admit(size, clock.now_s() + LONG_S)
        order.append(size)
        buffer.release(size)

    threads = []
    for number, size in enumerate((8, 1, 9, 2)):
        threads.append(threading.Thread(target=wait, args=(size,)))
        threads[-1].start()
        while buffer.waiting != number + 1:
            pass
    assert order == [], "1 would fit, but 8 came first"
    buffer.release(6)
    for thread in threads:
        thread.join(LONG_S)
    assert order[0] == 8
    assert sorted(order) == [1, 2, 8, 9]
    assert buffer.used_bytes == 0


def test_a_tenant_waits_for_its_own_share_and_is_in_nobodys_way() -> None:
    buffer, counters, clock = make(16)
    assert not buffer.admit(5, clock.now_s() + LONG_S, "acme"), "more than its share, ever"
    assert counters.get("prefill_buffer_refused_total") == 1
    assert buffer.admit(4, clock.now_s(), "acme")
    assert not buffer.admit(1, clock.now_s(), "acme")
    done = threading.Event()

    def wait() -> None:
        if buffer.admit(3, clock.now_s() + LONG_S, "acme"):
            done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert buffer.admit(12, clock.now_s() + LONG_S), "who waits for its own share is not in the line"
    buffer.release(12)
    assert buffer.admit(4, clock.now_s(), "other")
    assert not done.is_set()
    buffer.release(4, "acme")
    thread.join(LONG_S)
    assert done.is_set()
    buffer.release(3, "acme")
    buffer.release(4, "other")
    assert (buffer.used_bytes, dict(buffer._of_tenants)) == (0, {})


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30), capacity=st.integers(1, 12))
def test_never_over_capacity_and_everybody_is_served(sizes: list[int], capacity: int) -> None:
    buffer, _, clock = make(capacity)
    lock = threading.Lock()
    inside, results = [0], []

    def work(size: int) -> None:
        with buffer.room(size, clock.now_s() + LONG_S) as admitted:
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
    assert (buffer.used_bytes, buffer.waiting) == (0, 0)


@settings(max_examples=60)
@given(
    capacity=st.integers(1, 8),
    actions=st.lists(st.tuples(st.sampled_from(["ask", "leave", "release"]), st.integers(0, 8)), min_size=4, max_size=40),
)
def test_who_leaves_the_line_gives_way_at_once(capacity: int, actions: list[tuple[str, int]]) -> None:
    """Held against a model: a line, of whose head as many are inside as fit."""
    buffer, counters, clock = make(capacity)
    line: list[tuple[int, Wanted, threading.Thread]] = []
    inside: list[int] = []
    left = 0

    def settles() -> None:
        while line and sum(inside) + line[0][0] <= capacity:
            size, _, thread = line.pop(0)
            thread.join(LONG_S)
            inside.append(size)
        end_s = clock.now_s() + LONG_S
        while (buffer.used_bytes, buffer.waiting) != (sum(inside), len(line)):
            assert clock.now_s() < end_s, "somebody who left, or who fits, is still in line"

    for what, number in [*actions, *[("leave", 0), ("release", 0)] * len(actions)]:
        if what == "ask" and number <= capacity:
            wanted = Wanted()
            args = (buffer.admit, number, clock.now_s() + 60)
            line.append((number, wanted, threading.Thread(target=wanted.context().run, args=args)))
            line[-1][2].start()
        elif what == "leave" and line:
            _, wanted, thread = line.pop(number % len(line))
            wanted.end()
            thread.join(LONG_S)
            left += 1
        elif what == "release" and inside:
            buffer.release(inside.pop(number % len(inside)))
        settles()
    assert (buffer.used_bytes, buffer.waiting) == (0, 0)
    assert counters.snapshot() == ({"node_waits_left_total": left} if left else {})
