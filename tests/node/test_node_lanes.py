"""A call that waits has a thread of its own for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import pytest

from kvstore.core.errors import CapacityExceeded
from kvstore.node.rpc.wait_threads import Lanes
from kvstore.observe.counters import Counters
from kvstore.rpc.auth import interceptor
from kvstore.rpc.auth.tokens import AccessRole, Principal


def test_there_are_no_more_calls_than_threads() -> None:
    lanes = Lanes(2, "test", Counters())
    leave = lanes.enter()
    lanes.enter()
    with pytest.raises(CapacityExceeded):
        lanes.enter()
    leave()
    lanes.enter()
    assert lanes.taken == 2
    assert lanes.pool.submit(lambda: 3).result(10) == 3
    lanes.close()


def test_a_tenant_has_a_quarter_of_them() -> None:
    counters = Counters()
    lanes = Lanes(8, "test", counters)

    def enter(name: str, role: AccessRole = AccessRole.TENANT) -> Callable[[], None]:
        """As a call of somebody's does."""
        context = copy_context()
        context.run(interceptor._caller.set, Principal(name, role))
        return context.run(lanes.enter)

    mine = [enter("acme"), enter("acme")]
    with pytest.raises(CapacityExceeded, match="tenant limit"):
        enter("acme")
    assert counters.get("tenant_share_refused_total") == 1
    enter("other")
    for _ in range(3):
        enter("pool", AccessRole.ENGINE)
    mine[0]()  # in whichever context
    enter("acme")
    assert lanes.taken == 6
    lanes.enter()
    lanes.enter()
    with pytest.raises(CapacityExceeded, match="too many"):
        lanes.enter()
    lanes.close()
