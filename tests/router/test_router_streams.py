"""Streamed responses: framing, completeness, and errors after the first byte."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from router_bed import Make

from kvstore.lab.fake_engine import Behaviour


async def test_stream_pieces_forwarded_at_once(bed: Make) -> None:
    router = await bed("e0")
    hold = asyncio.Event()
    router["e0"].script.append(Behaviour(pieces=3, hold=hold, hold_after=1))
    body = {"model": "m", "prompt": "a", "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.aiter_raw()
        first = await anext(pieces)
        assert first == b'data: {"choices": [{"index": 0, "text": "e0 0"}]}\n\n'  # while the engine holds the second piece back
        hold.set()
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"e0 2" in rest


async def test_stream_broken_off_ends_with_error_event(bed: Make) -> None:
    router = await bed("e0", "e1")
    for engine in router.engines.values():
        engine.default = Behaviour(pieces=5, cut_after=2)
    answer = await router.complete(stream=True)
    events = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in answer.text
    assert router.attempts == 1
    assert await router.counter("router_answers_broken_total") == 1


async def test_stream_without_done_event_is_broken(bed: Make) -> None:
    router = await bed("e0")
    router["e0"].default = Behaviour(unended=True)
    answer = await router.complete(stream=True)
    assert json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert await router.counter("router_answers_broken_total") == 1
    assert await router.counter("router_attempts_failed_total", kind="reset") == 1


@pytest.mark.parametrize(
    ("written", "rest"),
    [
        (b"data: {}\n\n: ping", b""),
        (b"data: {}\n\nid: 1\n", b""),
        (b'data: {"choices": [', b""),
        (b"data: {}\r\n\r\ndata: [DO", b""),
        (b"data: {}\n\n", b"data: [DONE]\n"),
    ],
)
async def test_stream_error_after_partial_event_is_separate(bed: Make, written: bytes, rest: bytes) -> None:
    """Otherwise a client would read the error as the rest of a comment or line."""
    router = await bed("e0")
    router["e0"].default = Behaviour(raw=[written, rest])
    answer = await router.complete(stream=True)
    events = [event for event in answer.text.replace("\r\n", "\n").split("\n\n") if event.strip()]
    if rest:
        assert events == ["data: {}", "data: [DONE]\n"], "[DONE] without an empty line after it is complete"
        return
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert events[:-1] == ["data: {}"] * (len(events) - 1)


async def test_stream_split_at_any_byte_forwarded_unchanged(bed: Make) -> None:
    router = await bed("e0")
    text = b'data: {"a": 1}\r\n\r\n: ping\n\ndata: {"b": "x"}\n\ndata: [DONE]\n\n: ' + b"a comment after the end " * 9
    router["e0"].default = Behaviour(raw=[text[at : at + 1] for at in range(len(text))])
    answer = await router.complete(stream=True)
    assert answer.content == text
    assert await router.counter("router_answers_broken_total") == 0


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("coding", ["gzip", "identity", ""])
async def test_stream_compressed_is_decompressed_and_verified(bed: Make, coding: str, share: float) -> None:
    router = await bed("e0")
    text = b"data: {}\n\n" * 200 + b"data: [DONE]\n\n"
    cut = text[: int(len(text) * share)]
    packed = gzip.compress(cut) if coding == "gzip" else cut
    headers = {"content-type": "text/event-stream", "content-encoding": coding}
    router["e0"].default = Behaviour(raw=[packed], headers=headers)
    answer = await router.complete(stream=True)
    assert router["e0"].seen_headers[0]["accept-encoding"] == "identity"
    assert "content-encoding" not in answer.headers
    if share == 1.0:
        assert answer.content == text
    else:
        assert answer.text.endswith("\n\n")
        assert json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert await router.counter("router_answers_broken_total") == (share < 1.0)


async def test_stream_cut_after_done_is_complete(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    for engine in router.engines.values():
        engine.default = Behaviour(raw=[b"data: {}\n\ndata: [DONE]\n\n", None])
    for _ in range(8):
        assert (await router.complete(stream=True)).text == "data: {}\n\ndata: [DONE]\n\n"
    assert await router.healthy() == {"e0", "e1"}
    assert await router.counter("router_answers_broken_total") == 0


async def test_stream_comments_forwarded_at_once(bed: Make) -> None:
    router = await bed("e0")
    hold = asyncio.Event()
    router["e0"].default = Behaviour(raw=[b": ping\n"], hold_behind=hold)
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
        assert await anext(answer.aiter_raw()) == b": ping\n"
        hold.set()


async def test_stream_stalled_ends_with_timeout_event(bed: Make) -> None:
    router = await bed("e0", idle_timeout_ms=200)
    router["e0"].default = Behaviour(hold=asyncio.Event(), hold_after=1)
    answer = await router.complete(stream=True)
    assert '"code": "deadline_exceeded"' in answer.text
    await router["e0"].until_gone(1)
