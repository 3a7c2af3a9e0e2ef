"""The router over real sockets: forwarding, clients that disconnect or stall, validation, and placement by prefix."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import httpx
import pytest
from router_bed import Make

from kvstore.lab.fake_engine import Behaviour
from kvstore.observe.limited_log import LimitedLog
from support.wait import wait_until_async


async def test_completion_body_and_headers_forwarded(bed: Make) -> None:
    router = await bed("e0")
    headers = {"authorization": "Bearer key", "x-request-id": "r1", "cookie": "secret"}
    answer = await router.http.post("/v1/completions", json={"model": "m", "prompt": "a b c", "top_k": 3}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "e0 saw 3"
    assert answer.headers["x-kvstore-engine"] == "e0"
    assert router["e0"].requests == [{"model": "m", "prompt": "a b c", "top_k": 3}]
    seen = router["e0"].seen_headers[0]
    assert (seen["authorization"], seen["x-request-id"]) == ("Bearer key", "r1")
    assert "cookie" not in seen


async def test_engine_cookies_reach_no_later_request(bed: Make) -> None:
    router = await bed("e0")
    router["e0"].script.append(Behaviour(headers={"set-cookie": "session=of-alice; Path=/"}))
    for key in ("alice", "bob"):
        answer = await router.http.post(
            "/v1/completions", json={"model": "m", "prompt": "a"}, headers={"authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200
    assert (await router.http.get("/v1/models")).status_code == 200
    assert [seen.get("cookie") for seen in router["e0"].seen_headers] == [None, None]


async def test_headers_non_ascii_forwarded_unchanged(bed: Make) -> None:
    router = await bed("e0")
    for name in (b"x-request-id", b"accept-encoding", b"authorization"):
        answer = await router.http.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=[(name, b"\xff\xfe\xc3")])
        assert answer.status_code == 200
        assert (await router.http.get("/v1/models", headers=[(name, b"\xff\xfe\xc3")])).status_code == 200
        assert router["e0"].seen_headers[-1][name.decode()].encode("latin-1") == b"\xff\xfe\xc3"
    assert await router.counter("router_internal_errors_total") == 0


async def test_chat_completion_forwarded(bed: Make) -> None:
    router = await bed("e0")
    answer = await router.http.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "a b"}]})
    assert answer.json()["choices"][0]["message"]["content"] == "e0 saw 2"


async def test_unknown_path_or_method_rejected(bed: Make) -> None:
    router = await bed("e0")
    no_path = await router.http.post("/v1/embeddings" + "x" * 1000, json={"model": "m", "input": "a"})
    no_method = await router.http.get("/v1/completions")
    assert (no_path.status_code, no_method.status_code) == (404, 405)
    assert no_method.headers["allow"] == "POST"
    for answer, code in ((no_path, "not_found"), (no_method, "unsupported")):
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
        assert "/v1/" in error["message"]
        assert len(error["message"]) < 500
    assert not router["e0"].requests


async def test_client_disconnect_cancels_engine_request(bed: Make) -> None:
    router = await bed("e0")
    never = asyncio.Event()
    router["e0"].default = Behaviour(hold=never)
    pending = asyncio.create_task(router.complete())
    await router["e0"].until_requests(1)
    pending.cancel()
    await router["e0"].until_gone(1)
    router["e0"].default = Behaviour(pieces=100, hold=never, hold_after=2)
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
        await anext(answer.aiter_raw())
    await router["e0"].until_gone(2)

    async def settled() -> bool:
        engines = await router.states()
        return engines["e0"]["sequences"] == 0 and await router.counter("router_clients_gone_total") == 2

    await wait_until_async(settled, "no request in flight")


@pytest.mark.parametrize("stream", [False, True])
async def test_client_stalled_is_disconnected(
    bed: Make, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.router.proxy.proxy._log", LimitedLog(logging.getLogger("kvstore.router.proxy.proxy")))
    router = await bed("e0", client_timeout_ms=300)
    long = Behaviour(pieces=20_001, hold=asyncio.Event(), hold_after=20_000)  # a megabyte, then a pause
    router["e0"].default = long if stream else Behaviour(body={"text": "x" * (8 << 20)})
    content = json.dumps({"model": "m", "prompt": "a", "stream": stream}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect((router.http.base_url.host, router.http.base_url.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))

        async def cancelled() -> bool:
            engines = await router.states()
            return engines["e0"]["sequences"] == 0 and await router.counter("router_clients_stuck_total") == 1

        await wait_until_async(cancelled, "the request is cancelled")
        if stream:
            await router["e0"].until_gone(1)
        assert await router.counter("router_requests_inflight") == 0
        assert await router.counter("router_clients_gone_total") == 0
    assert "client disconnected: it stopped reading" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    router["e0"].default = Behaviour()
    assert (await router.complete()).status_code == 200


async def test_client_slow_reader_gets_whole_response(bed: Make) -> None:
    router = await bed("e0", client_timeout_ms=500)
    router["e0"].default = Behaviour(body={"text": "x" * (2 << 20)})
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a"}) as answer:
        assert int(answer.headers["content-length"]) > 2 << 20
        taken = b"".join([piece async for piece in answer.aiter_raw()])
    assert json.loads(taken) == {"text": "x" * (2 << 20)}


async def test_client_leaving_after_done_is_not_counted(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(status=500)
    for _ in range(12):
        async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
            async for piece in answer.aiter_raw():
                if b"[DONE]" in piece:
                    break
    assert await router.healthy() == {"e1"}
    assert await router.counter("router_clients_gone_total") == 0


async def test_client_leaving_within_request_is_counted(bed: Make, caplog: pytest.LogCaptureFixture) -> None:
    router = await bed("e0")
    url = router.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()

    async def started() -> bool:
        return await router.counter("router_requests_total") == 1

    await wait_until_async(started, "the request has started")
    writer.close()
    await writer.wait_closed()

    async def counted() -> bool:
        return await router.counter("router_clients_gone_total") == 1

    await wait_until_async(counted, "the client is counted")
    assert await router.counter("router_requests_inflight") == 0
    assert (await router.complete()).status_code == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert len(router["e0"].requests) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "JSON object"),
        (b'{"model": "m"}', "requires a prompt"),
        (b'{"model": 3, "prompt": "a"}', "must be a string"),
        (b'{"model": "m", "prompt": "a", "stream": "yes"}', "true or false"),
    ],
)
async def test_body_invalid_rejected_in_openai_format(bed: Make, content: bytes, message: str) -> None:
    router = await bed("e0")
    answer = await router.http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert router["e0"].requests == []


async def test_body_too_long_rejected_unread(bed: Make) -> None:
    router = await bed("e0", max_body_bytes=2_000)
    assert (await router.complete("a " * 2_000)).status_code == 413

    async def pieces() -> object:
        for _ in range(100):
            yield b"x" * 100

    assert (await router.http.post("/v1/completions", content=pieces())).status_code == 413  # type: ignore[arg-type]
    assert (await router.complete()).status_code == 200


async def test_prompt_longer_than_hashed_counts_in_full(bed: Make) -> None:
    router = await bed("e0")
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    pending = asyncio.create_task(router.complete("x" * (8 << 20)))
    await router["e0"].until_requests(1)
    assert (await router.states())["e0"]["tokens"] >= 2 << 20
    release.set()
    assert (await pending).status_code == 200


async def test_model_unknown_answers_404(bed: Make) -> None:
    router = await bed("e0", models=("m", "m-lora"))
    answer = await router.http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert answer.status_code == 404
    assert "m, m-lora" in answer.json()["error"]["message"]
    assert (await router.http.post("/v1/completions", json={"model": "m-lora", "prompt": "a"})).status_code == 200
    assert [model["id"] for model in (await router.http.get("/v1/models")).json()["data"]] == ["m", "m-lora"]


async def test_requests_over_max_inflight_rejected(bed: Make) -> None:
    router = await bed("e0", max_inflight=2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    pending = [asyncio.create_task(router.complete()) for _ in range(2)]
    await router["e0"].until_requests(2)
    refused = await router.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    release.set()
    assert {(await one).status_code for one in pending} == {200}
    assert (await router.complete()).status_code == 200


async def test_sessions_return_to_their_engine(bed: Make) -> None:
    router = await bed("e0", "e1", "e2")
    sessions = [f"session {number} " + "word " * 400 for number in range(3)]
    homes = [(await router.complete(text)).headers["x-kvstore-engine"] for text in sessions]
    assert sorted(homes) == ["e0", "e1", "e2"]
    for turn in range(5):
        sessions = [text + f"turn {turn} " + "more " * 60 for text in sessions]
        assert [(await router.complete(text)).headers["x-kvstore-engine"] for text in sessions] == homes


async def test_hint_headers_reach_the_engine(bed: Make) -> None:
    router = await bed("e0")
    body = {"model": "m", "prompt": "a", "kv_transfer_params": {"other": 1}}
    headers = {"x-kvstore-session": "chat", "x-kvstore-next-turn": "12.5", "x-kvstore-priority": "3"}
    answer = await router.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    hint = {"session": "chat", "keep_for_s": 300.0, "next_turn_s": 12.5, "priority": 3, "end": False}
    assert router["e0"].requests == [{**body, "kv_transfer_params": {"other": 1, "kvstore_hint": hint}}]
    assert await router.counter("router_hints_total") == 1
    await router.complete()
    assert await router.counter("router_hints_total") == 1


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x-kvstore-session-end": "true"}, "a hint requires the header x-kvstore-session"),
        ({"x-kvstore-session": "chat", "x-kvstore-priority": "10"}, "x-kvstore-priority must be an integer from 0 to 9"),
        ({"x-kvstore-session": "x" * 65}, "session must be printable text"),
    ],
)
async def test_hint_headers_invalid_rejected(bed: Make, headers: dict[str, str], words: str) -> None:
    router = await bed("e0")
    answer = await router.http.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=headers)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not router["e0"].requests
    assert await router.counter("router_hints_total") == 0


async def test_requests_concurrent_are_spread_over_engines(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", "e3")
    answers = await asyncio.gather(*(router.complete(f"p{number}", stream=number % 2 == 0) for number in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    counts = [len(engine.requests) for engine in router.engines.values()]
    assert sum(counts) == 200
    assert min(counts) > 20


async def test_connection_closed_while_idle_is_replaced(bed: Make) -> None:
    router = await bed("e0")
    assert (await router.complete()).status_code == 200
    router["e0"].cut_all()
    assert (await router.complete()).status_code == 200


async def test_response_content_length_matches(bed: Make) -> None:
    router = await bed("e0")
    answer: httpx.Response = await router.complete()
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_response_date_and_server_sent_once(bed: Make) -> None:
    router = await bed("e0", retries=0)
    for behaviour in (Behaviour(), Behaviour(status=503)):
        router["e0"].default = behaviour
        answer = await router.complete()
        assert answer.status_code == behaviour.status
        assert [len(answer.headers.get_list(name)) for name in ("date", "server")] == [1, 1]
