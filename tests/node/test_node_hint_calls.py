"""Calls with hints: their number is bounded, a refusal is answered and counted, and no work is done on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from unittest.mock import MagicMock, create_autospec

import pytest

from kvproto.v1 import admin_pb2, node_pb2
from kvstore.core.errors import CapacityExceeded
from kvstore.core.types import BlockKey
from kvstore.node.hints.session_hints import HintResult, SessionHints
from kvstore.node.rpc.admin_service import NodeAdminServicer
from kvstore.node.rpc.service import NodeServicer
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.observe.counters import Counters

KEEP = node_pb2.HintRequest(session_id=bytes(16), session="chat", kind=node_pb2.HINT_KIND_KEEP, keep_ms=1000)


@pytest.fixture
def parts() -> Iterator[MagicMock]:
    """Parts of a node that accepts two calls with hints at once."""
    counters = Counters()
    made = MagicMock(counters=counters, hint_calls=WaitThreads(2, "hints", counters, threads=1))
    made.config.load_threads = 1
    made.hints = create_autospec(SessionHints, instance=True)
    made.hints.keep.return_value = HintResult(protected=3)
    yield made
    made.hint_calls.close()


def test_hint_beyond_the_limit_is_refused_and_counted(parts: MagicMock) -> None:
    servicer, admin = NodeServicer(parts), NodeAdminServicer(parts)
    releases = [parts.hint_calls.acquire() for _ in range(2)]
    with pytest.raises(CapacityExceeded, match="too many calls"):
        asyncio.run(servicer.Hint(KEEP, MagicMock()))
    with pytest.raises(CapacityExceeded, match="too many calls"):
        asyncio.run(admin.HintSession(admin_pb2.HintSessionRequest(namespace_id=bytes(16), hint=KEEP), MagicMock()))
    assert parts.counters.get("node_hints_rejected_total") == 2
    parts.hints.keep.assert_not_called()
    releases[0]()
    assert asyncio.run(servicer.Hint(KEEP, MagicMock())).protected_blocks == 3
    servicer.close()
    admin.close()


def test_hint_by_name_finds_keys_off_the_event_loop(parts: MagicMock) -> None:
    admin, threads = NodeAdminServicer(parts), []

    def protected_keys(*_: object) -> list[BlockKey]:
        threads.append(threading.current_thread())
        return [BlockKey(bytes(16))] if len(threads) == 1 else []

    parts.hints.protected_keys.side_effect = protected_keys
    request = admin_pb2.HintSessionRequest(namespace_id=bytes(16), hint=KEEP)
    assert [asyncio.run(admin.HintSession(request, MagicMock())).known for _ in range(2)] == [True, False]
    assert threading.current_thread() not in threads
    admin.close()
