"""Hints of requests: in vLLM's parameters and hints, in the router's headers and bodies; invalid ones do no harm."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import BlockKey
from kvclient.call.request_hint import HINT_FIELD, RequestHint
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.scheduler import session_hints
from kvclient.engines.vllm.scheduler.session_hints import ACTION, MAX_WAITING, SessionHintQueue
from kvstore.core.errors import InvalidArgument
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.prompts.request_body import COMPLETIONS, parse_body
from kvstore.router.prompts.session_hints import request_hint

KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]
HINT = RequestHint("chat", 60.0, 12.5, 3)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


def ended(request: object) -> tuple[list[RequestHint], dict[str, float]]:
    counters = ConnectorCounters()
    queue = SessionHintQueue(counters)
    queue.ended(request, lambda: KEYS)
    return [job.hint for job in queue.take()], counters.take()


def asks(hint: object) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", kv_transfer_params={HINT_FIELD: hint, "other": 1})


def test_hint_in_transfer_params_is_queued() -> None:
    assert ended(asks(HINT.fields())) == ([HINT], {"hints": 1})
    assert ended(SimpleNamespace(request_id="r", kv_transfer_params=None)) == ([], {})


@pytest.mark.parametrize("params", [None, {"other": 1}, {HINT_FIELD: {"session": ""}}])
def test_hint_absent_or_invalid_computes_no_keys(params: object) -> None:
    queue = SessionHintQueue(ConnectorCounters())
    queue.ended(SimpleNamespace(request_id="r", kv_transfer_params=params), lambda: pytest.fail("keys were computed"))
    assert not len(queue)


def test_hint_of_nothing_stored_is_not_queued() -> None:
    queue = SessionHintQueue(counters := ConnectorCounters())
    queue.ended(asks(HINT.fields()), list)
    assert not len(queue)
    assert counters.totals()["hints_refused"] == 1


def test_end_of_session_needs_no_stored_blocks() -> None:
    """The node evicts the blocks that the session protects."""
    queue = SessionHintQueue(ConnectorCounters())
    queue.ended(asks({"session": "chat", "end": True}), list)
    assert [job.keys for job in queue.take()] == [[]]


def test_hint_invalid_many_times_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_hints, "_limited", LimitedLog(logging.getLogger(session_hints.__name__)))
    queue = SessionHintQueue(counters := ConnectorCounters())
    for _ in range(100):
        queue.ended(asks({"session": ""}), lambda: KEYS)
    assert counters.totals()["hints_refused"] == 100
    assert len(caplog.records) == 1


def test_hint_in_vllm_hints_is_queued() -> None:
    actions = [
        SimpleNamespace(action_type="another", payload={"x": 1}),
        SimpleNamespace(action_type=ACTION, payload={"session": "chat", "end": True}),
    ]
    request = SimpleNamespace(request_id="r", kv_transfer_params=None, kv_hints=SimpleNamespace(actions=actions))
    assert ended(request) == ([RequestHint("chat", end=True)], {"hints": 1})


@given(JSON)
def test_hint_of_any_content_never_raises(content: object) -> None:
    hints, counts = ended(asks(content))
    assert bool(hints) != bool(counts.get("hints_refused"))


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"session": ""}, {"session": "x" * 65}, {"session": "\ud800"}, {"keep_for_s": -1}, {"keep_for_s": 3601},
        {"keep_for_s": float("nan")}, {"next_turn_s": float("inf")}, {"priority": -1}, {"priority": 10}, {"priority": 1.0},
        {"end": 1}, {"kind": "fork"},
    ],
)  # fmt: skip
def test_hint_invalid_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        RequestHint.read({**({"session": "s"} if wrong else {}), **wrong})


def test_hint_queue_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_hints, "_limited", LimitedLog(logging.getLogger(session_hints.__name__)))
    queue = SessionHintQueue(counters := ConnectorCounters())
    for _ in range(MAX_WAITING + 5):
        queue.ended(asks(HINT.fields()), lambda: KEYS)
    assert len(queue) == MAX_WAITING
    assert counters.totals()["hints_refused"] == 5
    assert len(caplog.records) == 1
    queue.clear()
    assert not len(queue)
    assert counters.totals()["hints_refused"] == MAX_WAITING + 5


def test_router_headers_become_transfer_params() -> None:
    headers = {
        "x-kvstore-session": "chat", "x-kvstore-keep-for": "60", "x-kvstore-next-turn": "12.5", "x-kvstore-priority": "3",
    }  # fmt: skip
    assert request_hint(headers, {}) == HINT
    assert request_hint({"x-kvstore-session": "chat", "x-kvstore-session-end": "true"}, {}) == RequestHint("chat", end=True)
    assert request_hint({}, {"kv_transfer_params": {HINT_FIELD: HINT.fields()}}) == HINT
    assert request_hint({}, {"kv_transfer_params": {"decode_node": "n"}}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep-for", "soon"), ("keep-for", "-1"), ("keep-for", "nan"), ("next-turn", "9" * 1000), ("priority", "10"),
        ("priority", "²"), ("session-end", "maybe"), ("session", "x" * 100),
    ],
)  # fmt: skip
def test_router_rejects_invalid_header(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument):
        request_hint({"x-kvstore-session": "s", f"x-kvstore-{name}": value}, {})


def test_router_bodies_carry_the_hint() -> None:
    raw = json.dumps({"model": "m", "prompt": "p", "kv_transfer_params": {"decode_node": "n"}}).encode()
    body = replace(parse_body(COMPLETIONS, raw), hint=HINT)
    assert json.loads(body.for_engine())["kv_transfer_params"] == {"decode_node": "n", HINT_FIELD: HINT.fields()}
    for made in (body.for_decode({"transfer_id": "t"}), body.for_prefill({"transfer_id": "t"})):
        assert json.loads(made)["kv_transfer_params"] == {"transfer_id": "t", HINT_FIELD: HINT.fields()}
