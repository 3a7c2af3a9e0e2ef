"""A call that waits has its own thread for as long as it lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from unittest.mock import MagicMock

import pytest

from kvproto.v1 import node_pb2
from kvstore.core.clock import ManualClock
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unavailable
from kvstore.node.rpc.service import NodeServicer
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


def test_wait_threads_refused_thread_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, done = WaitThreads(1, "test", Counters()), list[int]()

    async def calls() -> None:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await threads.run(lambda: done.append(1))
        await threads.run(lambda: done.append(2))

    asyncio.run(calls())
    threads.close()
    assert done == [2]


@pytest.mark.parametrize("method", ["Flush", "ReadAhead"])
def test_node_call_cancelled_keeps_its_place(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cancels call after call must not fill the queue of the threads."""
    monkeypatch.setattr("kvstore.node.rpc.service.MAX_WAITS", 1)
    monkeypatch.setattr("kvstore.node.rpc.service.MAX_READS_AHEAD", 1)
    gate, begun = threading.Event(), threading.Event()

    def wait(_: object) -> bool:
        begun.set()
        return gate.wait(10.0)

    parts = MagicMock(counters=Counters(), clock=ManualClock())
    parts.config.load_threads, parts.gate.closed = 1, False
    parts.table.wait_written, parts.table.not_durable.return_value, parts.ahead.hold = wait, 0, wait
    servicer, context = NodeServicer(parts), MagicMock()
    context.time_remaining.return_value = None
    requests = {"Flush": node_pb2.FlushRequest(), "ReadAhead": node_pb2.LoadRequest(session_id=bytes(16), keys=bytes(16))}

    async def calls() -> None:
        first = asyncio.create_task(getattr(servicer, method)(requests[method], context))
        assert await asyncio.to_thread(begun.wait, 10.0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(CapacityExceeded, match="too many"):
            await getattr(servicer, method)(requests[method], context)
        gate.set()

    asyncio.run(calls())
    servicer.close()
