"""Cancel scopes: cancelling a scope cancels all nested scopes and calls each registered callback once."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.cancel_scope import CancelScope, current, run_in_pool
from kvstore.core.clock import ManualClock
from kvstore.core.errors import DeadlineExceeded


def test_scope_ends_at_its_deadline() -> None:
    clock = ManualClock()
    scope = CancelScope.after(5.0, clock)
    clock.advance(2.0)
    assert (scope.left_s(), scope.elapsed_s(), scope.ended) == (3.0, 2.0, False)
    clock.advance(3.0)
    assert (scope.left_s(), scope.ended, scope.cancelled) == (0.0, True, False)
    assert "5.0" in str(scope.error())


def test_scope_without_deadline_ends_only_by_cancel() -> None:
    scope = CancelScope()
    assert scope.left_s() == math.inf
    assert not scope.ended
    scope.cancel()
    assert scope.ended
    assert scope.left_s() == 0.0
    assert "cancelled" in str(scope.error())
    assert isinstance(scope.error(), DeadlineExceeded)


def test_nested_scope_has_no_later_deadline() -> None:
    clock = ManualClock()
    with CancelScope.after(5.0, clock):
        assert CancelScope.after(9.0, clock).left_s() == 5.0
        assert CancelScope.after(1.0, clock).left_s() == 1.0
        assert CancelScope(clock=clock).left_s() == 5.0
    assert CancelScope.after(9.0, clock).left_s() == 9.0


def test_nested_scope_ends_with_its_enclosing_scope() -> None:
    clock = ManualClock()
    outer = CancelScope.after(5.0, clock)
    inner, early = outer.nested(), outer.nested(clock.now_s() + 1.0)
    assert current() is not outer
    assert (inner.left_s(), early.left_s()) == (5.0, 1.0)
    early.cancel()
    assert not outer.cancelled
    outer.cancel()
    assert inner.cancelled


@given(parents=st.lists(st.integers(0, 30), max_size=12), cancelled=st.sets(st.integers(0, 12)), late=st.booleans())
def test_cancel_reaches_exactly_the_nested_scopes(parents: list[int], cancelled: set[int], late: bool) -> None:
    calls: dict[int, int] = {}
    scopes: list[CancelScope] = []
    ancestors: list[set[int]] = []
    for number, drawn in enumerate([-1, *parents]):
        parent = drawn % number if number else None
        context = scopes[parent].context() if parent is not None else None
        scopes.append(context.run(CancelScope) if context is not None else CancelScope())
        ancestors.append({number} | (ancestors[parent] if parent is not None else set()))

    def count(number: int) -> None:
        calls[number] = calls.get(number, 0) + 1

    if not late:
        for number, scope in enumerate(scopes):
            scope.on_cancel(lambda number=number: count(number))  # type: ignore[misc]
    for number in sorted(cancelled & set(range(len(scopes)))):
        scopes[number].cancel()
        scopes[number].cancel()
    if late:
        for number, scope in enumerate(scopes):
            scope.on_cancel(lambda number=number: count(number))  # type: ignore[misc]
    expected = {number for number in range(len(scopes)) if ancestors[number] & cancelled}
    assert {number for number, scope in enumerate(scopes) if scope.cancelled} == expected
    assert calls == dict.fromkeys(expected, 1)


def test_scope_created_in_a_cancelled_one_is_cancelled() -> None:
    outer = CancelScope()
    outer.cancel()
    with outer:
        assert CancelScope().cancelled


def test_unregistered_callback_is_not_called() -> None:
    scope, calls = CancelScope(), []
    registered = scope.on_cancel(lambda: calls.append(1))
    registered.unregister()
    registered.unregister()
    with scope.on_cancel(lambda: calls.append(2)):
        pass
    with scope.on_cancel(lambda: calls.append(3)), scope.on_cancel(lambda: calls.append(4)):
        scope.cancel()
    assert calls == [3, 4]


def test_failing_callback_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    scope, calls = CancelScope(), []
    scope.on_cancel(lambda: 1 // 0)
    scope.on_cancel(lambda: calls.append(1))
    scope.cancel()
    assert calls == [1]
    assert "cancel callback failed" in caplog.text


def test_current_scope_follows_with_and_context() -> None:
    root = current()
    assert not root.ended
    with CancelScope() as outer:
        assert current() is outer
        with CancelScope() as inner:
            assert current() is inner
        assert current() is outer
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current).result() is root
            assert pool.submit(outer.context().run, current).result() is outer
    assert current() is root


def test_root_scope_cannot_be_cancelled() -> None:
    with pytest.raises(RuntimeError):
        current().cancel()
    with current().on_cancel(lambda: 1 // 0):
        assert not current().ended
    assert not CancelScope().cancelled


def test_ended_nested_scopes_are_not_kept() -> None:
    with CancelScope():
        kept, dropped = CancelScope(), weakref.ref(CancelScope())
    gc.collect()
    assert dropped() is None
    assert not kept.ended


def test_wait_ends_on_notify_timeout_and_cancel() -> None:
    scope, condition = CancelScope.after(60.0), threading.Condition()
    with condition:
        assert not scope.wait(condition, 0.001)

    def notify() -> None:
        with condition:
            condition.notify_all()

    with condition:
        threading.Timer(0.01, notify).start()
        assert scope.wait(condition, 30.0)
    with condition:
        threading.Timer(0.01, scope.cancel).start()
        assert not scope.wait(condition)
        assert not scope.wait(condition)


def test_wait_is_bounded_by_the_deadline() -> None:
    condition = threading.Condition()
    with condition:
        assert not CancelScope.after(0.001).wait(condition)


def test_result_cancels_work_that_has_not_begun() -> None:
    scope = CancelScope()
    never: Future[int] = Future()
    threading.Timer(0.01, scope.cancel).start()
    with pytest.raises(CancelledError):
        scope.result(never)
    done: Future[int] = Future()
    done.set_result(3)
    assert scope.result(done) == 3


def test_join_cancels_late_work_and_waits_for_running_work() -> None:
    never: Future[int] = Future()
    running: Future[int] = Future()
    running.set_running_or_notify_cancel()
    threading.Timer(0.02, running.set_result, (3,)).start()
    CancelScope.after(0.01).join(running, never)
    assert running.result(0) == 3
    assert never.cancelled()


def test_pool_work_is_cancelled_with_its_coroutine() -> None:
    started, seen = threading.Event(), Future[bool]()

    def work() -> None:
        condition = threading.Condition()
        with condition:
            started.set()
            current().wait(condition, 30.0)
        seen.set_result(current().cancelled)

    async def main(pool: ThreadPoolExecutor) -> None:
        assert await run_in_pool(pool, lambda: 5) == 5
        running = asyncio.create_task(run_in_pool(pool, work))
        await asyncio.to_thread(started.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main(pool))
        assert seen.result(10.0)
