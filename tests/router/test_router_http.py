"""The router over real sockets: what passes through, what is tried again, what ends when the client goes."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket

import httpx
import pytest
from router_bed import QUICK, Make, until

from kvstore.observe.limited_log import LimitedLog
from kvstore.router import exchange
from kvstore.testing.fake_engine import Behaviour


async def test_a_completion_passes_through_with_its_headers(bed: Make) -> None:
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


async def test_bytes_of_headers_pass_as_they_came(bed: Make) -> None:
    router = await bed("e0")
    for name in (b"x-request-id", b"accept-encoding", b"authorization"):
        answer = await router.http.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=[(name, b"\xff\xfe\xc3")])
        assert answer.status_code == 200
        assert (await router.http.get("/v1/models", headers=[(name, b"\xff\xfe\xc3")])).status_code == 200
        assert router["e0"].seen_headers[-1][name.decode()].encode("latin-1") == b"\xff\xfe\xc3"
    assert await router.counter("router_internal_errors_total") == 0


async def test_chat_completions_too(bed: Make) -> None:
    router = await bed("e0")
    answer = await router.http.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "a b"}]})
    assert answer.json()["choices"][0]["message"]["content"] == "e0 saw 2"


async def test_pieces_of_a_stream_pass_as_they_come(bed: Make) -> None:
    router = await bed("e0")
    hold = asyncio.Event()
    router["e0"].script.append(Behaviour(pieces=3, hold=hold, hold_after=1))
    body = {"model": "m", "prompt": "a", "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.aiter_raw()
        first = await anext(pieces)
        assert first == b'data: {"choices": [{"index": 0, "text": "e0 0"}]}\n\n'  # while the engine holds the second back
        hold.set()
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"e0 2" in rest


async def test_an_engines_refusal_passes_through_as_it_is(bed: Make) -> None:
    router = await bed("e0", "e1")
    told = {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=400, body=told)
    answer = await router.complete()
    assert (answer.status_code, answer.json()) == (400, told)
    assert sum(len(engine.requests) for engine in router.engines.values()) == 1
    assert await router.counter("router_retries_total") == 0


async def test_other_paths_and_methods_are_refused_as_all_else_is(bed: Make) -> None:
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


async def test_a_client_that_leaves_ends_the_request_on_the_engine(bed: Make) -> None:
    router = await bed("e0")
    never = asyncio.Event()
    router["e0"].default = Behaviour(hold=never)
    asking = asyncio.create_task(router.complete())
    await router["e0"].until_requests(1)
    asking.cancel()
    await router["e0"].until_gone(1)
    router["e0"].default = Behaviour(pieces=100, hold=never, hold_after=2)
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
        await anext(answer.aiter_raw())
    await router["e0"].until_gone(2)

    async def settled() -> bool:
        engines = (await router.http.get("/router/engines")).json()
        return engines["e0"]["sequences"] == 0 and await router.counter("router_clients_gone_total") == 2

    await until(settled, "the books are even")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_is_cut_off(
    bed: Make, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_log", LimitedLog(logging.getLogger(exchange.__name__)))  # which has held nothing back yet
    router = await bed("e0", client_timeout_s=0.3)
    long = Behaviour(pieces=20_001, hold=asyncio.Event(), hold_after=20_000)  # a megabyte, and then it goes on
    router["e0"].default = long if stream else Behaviour(body={"text": "x" * (8 << 20)})
    content = json.dumps({"model": "m", "prompt": "a", "stream": stream}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect((router.http.base_url.host, router.http.base_url.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))

        async def given_up() -> bool:
            engines = (await router.http.get("/router/engines")).json()
            return engines["e0"]["sequences"] == 0 and await router.counter("router_clients_stuck_total") == 1

        await until(given_up, "the request is given up")
        if stream:
            await router["e0"].until_gone(1)
        assert await router.counter("router_requests_inflight") == 0
        assert await router.counter("router_clients_gone_total") == 0
    assert "took nothing of its answer" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    router["e0"].default = Behaviour()
    assert (await router.complete()).status_code == 200


async def test_a_long_answer_is_given_in_pieces_that_each_have_their_time(bed: Make) -> None:
    router = await bed("e0", client_timeout_s=0.5)
    router["e0"].default = Behaviour(body={"text": "x" * (2 << 20)})
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a"}) as answer:
        assert int(answer.headers["content-length"]) > 2 << 20
        taken = b"".join([piece async for piece in answer.aiter_raw()])
    assert json.loads(taken) == {"text": "x" * (2 << 20)}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_gone_is_replaced_before_the_first_byte(bed: Make, stream: bool) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    await router["e0"].stop()
    for _ in range(4):
        answer = await router.complete(stream=stream)
        assert answer.status_code == 200
        assert b"e1" in answer.content
    assert await router.up() == {"e1"}
    assert await router.counter("router_attempts_failed_total", kind="refused") == 1  # then it is out


async def test_an_engine_without_room_is_left_alone_for_a_while(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].script.append(Behaviour(status=503, headers={"retry-after": "30"}))
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert len(router["e0"].requests) == 1
    assert len(router["e1"].requests) == 4
    assert await router.up() == {"e0", "e1"}


async def test_when_nobody_has_room_the_engines_own_words_are_answered(bed: Make) -> None:
    router = await bed("e0", "e1", retries=3)
    for engine in router.engines.values():
        engine.default = Behaviour(status=503, body={"error": {"message": "overloaded"}}, headers={"retry-after": "7"})
    answer = await router.complete()
    assert (answer.status_code, answer.json()) == (503, {"error": {"message": "overloaded"}})
    assert answer.headers["retry-after"] == "7"
    assert sum(len(engine.requests) for engine in router.engines.values()) == 4


async def test_a_request_that_was_lost_is_tried_once_more_only(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", policy="round_robin", retries=5)
    router["e0"].default = Behaviour(cut_after=0)
    assert (await router.complete()).status_code == 200
    for engine in router.engines.values():
        engine.default = Behaviour(cut_after=0)
    before = sum(len(engine.requests) for engine in router.engines.values())
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert sum(len(engine.requests) for engine in router.engines.values()) == before + 2


async def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_tried_again(bed: Make) -> None:
    router = await bed("e0", "e1")
    for engine in router.engines.values():
        engine.default = Behaviour(pieces=5, cut_after=2)
    answer = await router.complete(stream=True)
    events = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in answer.text
    assert sum(len(engine.requests) for engine in router.engines.values()) == 1
    assert await router.counter("router_answers_broken_total") == 1


async def test_a_stream_without_its_last_event_is_no_whole_answer(bed: Make) -> None:
    router = await bed("e0")
    router["e0"].default = Behaviour(unended=True)
    answer = await router.complete(stream=True)
    assert json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert await router.counter("router_answers_broken_total") == 1
    assert await router.counter("router_attempts_failed_total", kind="lost") == 1


async def test_engines_that_all_lose_a_request_do_not_all_come_behind_others(bed: Make) -> None:
    """The scheduler would give none of them anything for that long."""
    router = await bed("e0", "e1", "e2")
    for engine in router.engines.values():
        engine.default = Behaviour(cut_after=0)
    for _ in range(2):
        assert (await router.complete()).status_code == 503
    engines = (await router.http.get("/router/engines")).json().values()
    assert sum(engine["busy"] for engine in engines) < sum(engine["up"] for engine in engines)


async def test_an_engine_whose_streams_break_off_is_put_out(bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SHUNNED_S", 0.0)
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(pieces=5, cut_after=2)
    for _ in range(20):
        await router.complete(stream=True)
    assert await router.up() == {"e1"}
    assert len(router["e0"].requests) == 3


async def test_an_answer_that_breaks_off_before_the_client_has_any_of_it_is_tried_again(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(cut_inside=True)
    answer = await router.complete()
    assert (answer.status_code, answer.headers["x-kvstore-engine"]) == (200, "e1")
    assert await router.counter("router_answers_broken_total") == 1
    router["e1"].default = Behaviour(cut_inside=True)
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert sum(len(engine.requests) for engine in router.engines.values()) == 4


@pytest.mark.parametrize("status", [302, 500, 502, 504])
async def test_an_engine_that_fails_at_what_another_one_answers_is_put_out(bed: Make, status: int) -> None:
    """It is fast at failing, and so the least loaded."""
    router = await bed("e0", "e1")
    router["e0"].default = Behaviour(status=status)
    for _ in range(20):
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvstore-engine"]) == (200, "e1")
    assert await router.up() == {"e1"}
    assert len(router["e0"].requests) == 3
    assert await router.counter("router_attempts_failed_total", kind="erred") == 3


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_engine_that_refuses_what_another_one_answers_is_put_out(bed: Make, status: int) -> None:
    """It is fast at refusing, and so the least loaded."""
    router = await bed("e0", "e1")
    router["e0"].default = Behaviour(status=status)
    for _ in range(20):
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvstore-engine"]) == (200, "e1")
    assert await router.up() == {"e1"}
    assert len(router["e0"].requests) == 3


@pytest.mark.parametrize("other", [400, 401, 404])
async def test_what_engines_refuse_is_counted_against_none_of_them(bed: Make, other: int) -> None:
    """A wrong key, or a wrong request: whoever is asked last says so."""
    router = await bed("e0", "e1", "e2", policy="round_robin", retries=5)
    told = {"error": {"message": "no", "code": other}}
    router["e0"].default = Behaviour(status=401)
    router["e1"].default = router["e2"].default = Behaviour(status=other, body=told)
    for _ in range(9):
        answer = await router.complete()
        assert answer.status_code in {401, other}
    assert sum(len(engine.requests) for engine in router.engines.values()) <= 18, "each is tried once more at most"
    assert await router.up() == {"e0", "e1", "e2"}
    for engine in router.engines.values():
        engine.default = Behaviour(status=other, body=told)
    answer = await router.complete()
    assert (answer.status_code, answer.json()) == (other, told)


async def test_an_engine_that_does_not_say_what_it_serves_may_lack_a_model(bed: Make) -> None:
    """What it does not have it was sent on suspicion: that another one has it says nothing of this one."""
    router = await bed("e0", "e1", policy="round_robin", health=QUICK)
    router["e0"].models = ()

    async def silent() -> bool:
        return (await router.http.get("/router/engines")).json()["e0"]["models"] == []

    await until(silent, "it does not say what it serves any more")
    router["e0"].default = Behaviour(status=404)
    for _ in range(10):
        assert (await router.complete()).headers["x-kvstore-engine"] == "e1"
    assert len(router["e0"].requests) == 10
    assert await router.up() == {"e0", "e1"}


async def test_a_refusal_does_not_tell_that_an_engine_is_well(bed: Make) -> None:
    """Wrong requests between those at which it fails must not keep it in."""
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].script.extend([Behaviour(status=500), Behaviour(status=400)] * 3)
    statuses = [(await router.complete()).status_code for _ in range(20)]
    assert set(statuses) == {200, 400}
    assert await router.up() == {"e1"}


async def test_a_request_at_which_every_engine_fails_is_the_reason_itself(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", retries=5)
    told = {"error": {"message": "division by zero"}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=500, body=told)
    for _ in range(10):
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (500, told)
    assert sum(len(engine.requests) for engine in router.engines.values()) == 20, "each is tried once more"
    assert await router.up() == {"e0", "e1", "e2"}


async def test_what_no_engine_can_do_leaves_the_others_their_engines(bed: Make) -> None:
    """One client's request at which all fail, again and again: none of them may come behind others for it."""
    router = await bed("e0", "e1")
    for engine in router.engines.values():
        engine.default = Behaviour(status=500)
    for _ in range(3):
        assert (await router.complete()).status_code == 500
        assert await router.up() == {"e0", "e1"}
        engines = (await router.http.get("/router/engines")).json()
        assert not any(engine["busy"] for engine in engines.values())


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
async def test_an_error_behind_half_an_event_is_an_event_of_its_own(bed: Make, written: bytes, rest: bytes) -> None:
    """A client must not take it for the end of a comment, or of half a line."""
    router = await bed("e0")
    router["e0"].default = Behaviour(raw=[written, rest])
    answer = await router.complete(stream=True)
    events = [event for event in answer.text.replace("\r\n", "\n").split("\n\n") if event.strip()]
    if rest:
        assert events == ["data: {}", "data: [DONE]\n"], "an end without its last line is one"
        return
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert events[:-1] == ["data: {}"] * (len(events) - 1)


async def test_events_pass_however_they_are_cut(bed: Make) -> None:
    router = await bed("e0")
    text = b'data: {"a": 1}\r\n\r\n: ping\n\ndata: {"b": "x"}\n\ndata: [DONE]\n\n: ' + b"a comment behind the end " * 9
    router["e0"].default = Behaviour(raw=[text[at : at + 1] for at in range(len(text))])
    answer = await router.complete(stream=True)
    assert answer.content == text
    assert await router.counter("router_answers_broken_total") == 0


@pytest.mark.parametrize(
    ("kind", "content", "stream"),
    [
        ("application/json", b'{"choices": [', False),
        ("application/json", b"", False),
        ("application/json", b"{}", True),
        ("Text/Event-Stream", b"data: {}\n\n", True),
    ],
)
async def test_what_is_no_whole_answer_to_what_was_asked_is_asked_of_another(
    bed: Make, kind: str, content: bytes, stream: bool
) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(raw=[content], headers={"content-type": kind})
    answers = [await router.complete(stream=stream) for _ in range(2)]
    if kind == "application/json":
        assert [answer.headers["x-kvstore-engine"] for answer in answers] == ["e1", "e1"]
    else:
        assert sum('"code": "unavailable"' in answer.text for answer in answers) == 1, "some of it was given already"
    assert await router.counter("router_answers_broken_total") == len(router["e0"].requests) > 0


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("coding", ["gzip", "identity", ""])
async def test_a_compressed_stream_is_unpacked_to_see_whether_it_is_whole(bed: Make, coding: str, share: float) -> None:
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


@pytest.mark.parametrize("status", [429, 503])
async def test_what_engines_say_to_one_client_alone_leaves_the_others_their_engines(bed: Make, status: int) -> None:
    """A limit of one client's key, before all engines: the scheduler would take all of them for full."""
    router = await bed("e0", "e1")
    for engine in router.engines.values():
        engine.default = Behaviour(status=status, headers={"retry-after": "30"})
    assert (await router.complete()).status_code == status
    engines = (await router.http.get("/router/engines")).json().values()
    assert not any(engine["busy"] for engine in engines)
    router["e1"].default = Behaviour()
    router["e0"].script.extend([Behaviour(status=status, headers={"retry-after": "30"})] * 2)
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert (await router.http.get("/router/engines")).json()["e0"]["busy"], "another one had room for it"


async def test_a_limit_of_one_client_is_none_of_an_engine_that_answers_others(bed: Make) -> None:
    """Each engine counts on its own what a client may ask: what one refuses another one takes."""
    router = await bed("e0", "e1", policy="round_robin")
    limited = Behaviour(status=429, headers={"retry-after": "30"})
    for _ in range(4):
        for engine in router.engines.values():
            engine.script.append(limited)
            while engine.script:
                assert (await router.complete()).status_code == 200
            assert (await router.complete()).status_code == 200
            assert (await router.complete()).status_code == 200
    assert not any(engine["busy"] for engine in (await router.http.get("/router/engines")).json().values())
    router["e0"].default = limited
    for _ in range(8):
        assert (await router.complete()).status_code == 200
    engines = (await router.http.get("/router/engines")).json()
    assert {name for name, engine in engines.items() if engine["busy"]} == {"e0"}, "it answers nobody"


async def test_a_stream_that_is_cut_behind_its_end_is_whole(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    for engine in router.engines.values():
        engine.default = Behaviour(raw=[b"data: {}\n\ndata: [DONE]\n\n", None])
    for _ in range(8):
        assert (await router.complete(stream=True)).text == "data: {}\n\ndata: [DONE]\n\n"
    assert await router.up() == {"e0", "e1"}
    assert await router.counter("router_answers_broken_total") == 0


async def test_comments_that_keep_a_connection_alive_are_not_held_back(bed: Make) -> None:
    router = await bed("e0")
    hold = asyncio.Event()
    router["e0"].default = Behaviour(raw=[b": ping\n"], hold_behind=hold)
    async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
        assert await anext(answer.aiter_raw()) == b": ping\n"
        hold.set()


async def test_a_client_that_leaves_at_the_last_event_was_answered(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(status=500)
    for _ in range(6):
        async with router.http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as answer:
            async for piece in answer.aiter_raw():
                if b"[DONE]" in piece:
                    break
    assert await router.up() == {"e1"}
    assert await router.counter("router_clients_gone_total") == 0


async def test_a_request_at_which_the_only_engine_fails_is_not_tried_again(bed: Make) -> None:
    router = await bed("e0")
    router["e0"].default = Behaviour(status=500)
    assert (await router.complete()).status_code == 500
    assert len(router["e0"].requests) == 1
    assert await router.up() == {"e0"}


async def test_an_engine_that_says_nothing_is_late_and_the_request_is_not_repeated(bed: Make) -> None:
    router = await bed("e0", "e1", first_byte_timeout_s=0.2)
    for engine in router.engines.values():
        engine.default = Behaviour(hold=asyncio.Event())
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert sum(len(engine.requests) for engine in router.engines.values()) == 1


async def test_a_stream_that_stops_ends(bed: Make) -> None:
    router = await bed("e0", idle_timeout_s=0.2)
    router["e0"].default = Behaviour(hold=asyncio.Event(), hold_after=1)
    answer = await router.complete(stream=True)
    assert '"code": "deadline_exceeded"' in answer.text
    await router["e0"].until_gone(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "JSON object"),
        (b'{"model": "m"}', "takes a prompt"),
        (b'{"model": 3, "prompt": "a"}', "takes a name"),
        (b'{"model": "m", "prompt": "a", "stream": "yes"}', "true or false"),
    ],
)
async def test_nonsense_is_refused_with_an_error_of_openais_shape(bed: Make, content: bytes, message: str) -> None:
    router = await bed("e0")
    answer = await router.http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert router["e0"].requests == []


async def test_a_request_that_is_too_long_is_refused_before_it_is_read(bed: Make) -> None:
    router = await bed("e0", max_body_bytes=2_000)
    assert (await router.complete("a " * 2_000)).status_code == 413

    async def pieces() -> object:
        for _ in range(100):
            yield b"x" * 100

    assert (await router.http.post("/v1/completions", content=pieces())).status_code == 413  # type: ignore[arg-type]
    assert (await router.complete()).status_code == 200


async def test_all_of_a_long_prompt_is_to_be_done(bed: Make) -> None:
    """Though only its head is hashed."""
    router = await bed("e0")
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    asking = asyncio.create_task(router.complete("x" * (8 << 20)))
    await router["e0"].until_requests(1)
    assert (await router.http.get("/router/engines")).json()["e0"]["tokens"] >= 2 << 20
    release.set()
    assert (await asking).status_code == 200


async def test_an_unknown_model_is_not_found(bed: Make) -> None:
    router = await bed("e0", models=("m", "m-lora"))
    answer = await router.http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert answer.status_code == 404
    assert "m, m-lora" in answer.json()["error"]["message"]
    assert (await router.http.post("/v1/completions", json={"model": "m-lora", "prompt": "a"})).status_code == 200
    assert [model["id"] for model in (await router.http.get("/v1/models")).json()["data"]] == ["m", "m-lora"]


async def test_more_than_it_takes_is_refused_at_once(bed: Make) -> None:
    router = await bed("e0", max_inflight=2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    asking = [asyncio.create_task(router.complete()) for _ in range(2)]
    await router["e0"].until_requests(2)
    refused = await router.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    release.set()
    assert {(await one).status_code for one in asking} == {200}
    assert (await router.complete()).status_code == 200


async def test_without_engines_it_says_so_and_goes_on_when_they_come(bed: Make) -> None:
    router = await bed("e0", health=QUICK)
    await router["e0"].stop()
    assert (await router.complete()).status_code == 503
    assert (await router.http.get("/health")).status_code == 503
    assert (await router.http.get("/v1/models")).status_code == 503
    await router["e0"].start()

    async def back() -> bool:
        return (await router.http.get("/health")).status_code == 200

    await until(back, "the engine is in again")
    assert (await router.complete()).status_code == 200


async def test_an_engine_that_is_not_well_gets_nothing(bed: Make) -> None:
    router = await bed("e0", "e1", health=QUICK)
    router["e0"].well = False

    async def out() -> bool:
        return await router.up() == {"e1"}

    await until(out, "e0 is out")
    for _ in range(4):
        assert "e1" in (await router.complete()).text
    router["e0"].well = True

    async def both() -> bool:
        return await router.up() == {"e0", "e1"}

    await until(both, "e0 is in again")


async def test_requests_that_begin_alike_go_to_the_same_engine(bed: Make) -> None:
    router = await bed("e0", "e1", "e2")
    sessions = [f"session {number} " + "word " * 400 for number in range(3)]
    homes = [(await router.complete(text)).headers["x-kvstore-engine"] for text in sessions]
    assert sorted(homes) == ["e0", "e1", "e2"]
    for turn in range(5):
        sessions = [text + f"turn {turn} " + "more " * 60 for text in sessions]
        assert [(await router.complete(text)).headers["x-kvstore-engine"] for text in sessions] == homes


async def test_many_clients_at_once(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", "e3")
    answers = await asyncio.gather(*(router.complete(f"p{number}", stream=number % 2 == 0) for number in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    counts = [len(engine.requests) for engine in router.engines.values()]
    assert sum(counts) == 200
    assert min(counts) > 20


async def test_a_connection_that_the_engine_closed_meanwhile_is_no_failure(bed: Make) -> None:
    router = await bed("e0")
    assert (await router.complete()).status_code == 200
    router["e0"].cut_all()
    assert (await router.complete()).status_code == 200


async def test_answers_know_no_connection_of_the_engine(bed: Make) -> None:
    router = await bed("e0")
    answer: httpx.Response = await router.complete()
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_answers_tell_the_date_and_the_server_once(bed: Make) -> None:
    router = await bed("e0", retries=0)
    for behaviour in (Behaviour(), Behaviour(status=503)):
        router["e0"].default = behaviour
        answer = await router.complete()
        assert answer.status_code == behaviour.status
        assert [len(answer.headers.get_list(name)) for name in ("date", "server")] == [1, 1]


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_counted(bed: Make, caplog: pytest.LogCaptureFixture) -> None:
    router = await bed("e0")
    url = router.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()

    async def came() -> bool:
        return await router.counter("router_requests_total") == 1

    await until(came, "the request has begun")
    writer.close()
    await writer.wait_closed()

    async def counted() -> bool:
        return await router.counter("router_clients_gone_total") == 1

    await until(counted, "the client is gone")
    assert await router.counter("router_requests_inflight") == 0
    assert (await router.complete()).status_code == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert len(router["e0"].requests) == 1
