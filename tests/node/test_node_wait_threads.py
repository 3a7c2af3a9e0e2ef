"""A call that waits has its own thread for as long as it lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context

import pytest

from kvstore.core.errors import CapacityExceeded, InvalidArgument
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import set_caller
from kvstore.rpc.auth.tokens import AccessRole, Principal


def test_wait_threads_in_use_refuse_further_calls() -> None:
    threads = WaitThreads(2, "test", Counters())
    release = threads.acquire()
    threads.acquire()
    with pytest.raises(CapacityExceeded):
        threads.acquire()
    release()
    threads.acquire()
    with pytest.raises(CapacityExceeded):
        threads.acquire()
    assert threads.pool.submit(lambda: 3).result(10) == 3
    threads.close()


def test_wait_threads_tenant_limit_is_a_quarter() -> None:
    counters = Counters()
    threads = WaitThreads(8, "test", counters)

    def acquire(name: str, role: AccessRole = AccessRole.TENANT) -> Callable[[], None]:
        """Acquire as a caller with a token."""
        context = copy_context()
        context.run(set_caller, Principal(name, role))
        return context.run(threads.acquire)

    acme = [acquire("acme"), acquire("acme")]
    with pytest.raises(CapacityExceeded, match="tenant limit"):
        acquire("acme")
    assert counters.get("tenant_share_refused_total") == 1
    acquire("other")
    for _ in range(3):
        acquire("pool", AccessRole.ENGINE)
    acme[0]()  # a release works in any context
    acquire("acme")
    threads.acquire()
    threads.acquire()
    with pytest.raises(CapacityExceeded, match="too many"):
        threads.acquire()
    threads.close()


def test_wait_threads_cancelled_call_keeps_its_place() -> None:
    """With one thread for two calls: the second one waits in the pool's queue, also after it was cancelled."""
    threads, gate = WaitThreads(2, "test", Counters(), threads=1), threading.Event()

    async def calls() -> None:
        first = asyncio.create_task(threads.run(gate.wait))
        second = asyncio.create_task(threads.run(lambda: 2))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(CapacityExceeded, match="too many"):
            await threads.run(lambda: 3)
        gate.set()
        assert await first
        while True:  # the cancelled call's work ends soon
            try:
                assert [await threads.run(lambda: 4), await threads.run(lambda: 5)] == [4, 5]
                break
            except CapacityExceeded:
                await asyncio.sleep(0)

    asyncio.run(calls())
    threads.close()


def test_wait_threads_failed_call_frees_its_place() -> None:
    threads = WaitThreads(1, "test", Counters())

    def fail() -> None:
        raise InvalidArgument("no")

    async def calls() -> None:
        for _ in range(3):
            with pytest.raises(InvalidArgument):
                await threads.run(fail)

    asyncio.run(calls())
    threads.close()
