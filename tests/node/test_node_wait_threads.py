"""A call that waits has its own thread for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import pytest

from kvstore.core.errors import CapacityExceeded
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
