"""Engines that fail, and clients that make engines fail: bounded retries, ejections, and responses that are passed on."""

from __future__ import annotations

import asyncio
import json

import pytest
from router_bed import QUICK, Make

from kvstore.lab.fake_engine import Behaviour
from support.wait import wait_until_async

# ---- responses that are passed on


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 501])
async def test_engine_4xx_passed_on_unchanged(bed: Make, status: int) -> None:
    """4xx and 501 are the client's: no retry, no ejection, from whichever engine."""
    router = await bed("e0", "e1")
    body = {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": status}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=status, body=body)
    for number in range(1, 11):
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (status, body)
        assert router.attempts == number
    assert await router.healthy() == {"e0", "e1"}
    assert await router.counter("router_retries_total") == 0


async def test_engine_429_retried_once_then_passed_on(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", retries=8)
    body = {"error": {"message": "rate limit"}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=429, body=body, headers={"retry-after": "30"})
    for number in range(1, 11):
        answer = await router.complete()
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, body, "30")
        assert router.attempts == 2 * number
    assert await router.healthy() == {"e0", "e1", "e2"}
    for engine in router.engines.values():
        engine.default = Behaviour()
    router["e0"].default = Behaviour(status=429)
    for _ in range(3):
        assert (await router.complete()).status_code == 200


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_invalid_passed_on(bed: Make, status: int, value: str) -> None:
    router = await bed("e0", "e1")
    for engine in router.engines.values():
        engine.default = Behaviour(status=status, headers={"retry-after": value})
    answer = await router.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (status, value)
    assert router.attempts == 2
    for engine in router.engines.values():
        engine.default = Behaviour()
    assert (await router.complete()).status_code == 200
    assert await router.counter("router_internal_errors_total") == 0


async def test_engines_all_503_response_passed_on(bed: Make) -> None:
    router = await bed("e0", "e1", retries=8)
    body = {"error": {"message": "overloaded"}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=503, body=body, headers={"retry-after": "7"})
    answer = await router.complete()
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, body, "7")
    assert router.attempts == 2, "every engine is tried once"


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_engine_error_body_huge_bounded(bed: Make, status: int) -> None:
    """An error response beyond 1 MiB is replaced by an error of the router."""
    router = await bed("e0")
    router["e0"].default = Behaviour(status=status, body={"error": {"message": "x" * (4 << 20)}})
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert router.attempts == 1


# ---- retries


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_unreachable_retried_then_ejected(bed: Make, stream: bool) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    await router["e0"].stop()
    for _ in range(6):
        answer = await router.complete(stream=stream)
        assert answer.status_code == 200
        assert b"e1" in answer.content
    assert await router.healthy() == {"e1"}
    assert await router.counter("router_attempts_failed_total", kind="connect") == 3
    assert await router.counter("router_ejections_total", cause="gateway_failures") == 1


async def test_engine_reset_retried_once(bed: Make) -> None:
    router = await bed("e0", "e1", "e2", policy="round_robin", retries=5)
    router["e0"].default = Behaviour(cut_after=0)
    assert (await router.complete()).status_code == 200
    for engine in router.engines.values():
        engine.default = Behaviour(cut_after=0)
    before = router.attempts
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert router.attempts == before + 2


async def test_response_broken_before_client_retried(bed: Make) -> None:
    """A response that is not streamed is held back until it is complete."""
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(cut_inside=True)
    answer = await router.complete()
    assert (answer.status_code, answer.headers["x-kvstore-engine"]) == (200, "e1")
    assert await router.counter("router_answers_broken_total") == 1
    router["e1"].default = Behaviour(cut_inside=True)
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert router.attempts == 4


@pytest.mark.parametrize(
    ("kind", "content", "stream"),
    [
        ("application/json", b'{"choices": [', False),
        ("application/json", b"", False),
        ("application/json", b"{}", True),
        ("Text/Event-Stream", b"data: {}\n\n", True),
    ],
)
async def test_response_invalid_retried_or_marked(bed: Make, kind: str, content: bytes, stream: bool) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(raw=[content], headers={"content-type": kind})
    answers = [await router.complete(stream=stream) for _ in range(2)]
    if kind == "application/json":
        assert [answer.headers["x-kvstore-engine"] for answer in answers] == ["e1", "e1"]
    else:
        assert sum('"code": "unavailable"' in answer.text for answer in answers) == 1, "the client had a part of it already"
    assert await router.counter("router_answers_broken_total") == len(router["e0"].requests) > 0


async def test_engine_only_one_500_not_retried(bed: Make) -> None:
    router = await bed("e0")
    router["e0"].default = Behaviour(status=500)
    for number in range(1, 11):
        assert (await router.complete()).status_code == 500
        assert router.attempts == number
    assert await router.healthy() == {"e0"}, "the last engine is never ejected for failed requests"
    assert await router.counter("router_ejections_skipped_total") == 6


async def test_engine_silent_times_out_without_retry(bed: Make) -> None:
    router = await bed("e0", "e1", first_byte_timeout_ms=200)
    for engine in router.engines.values():
        engine.default = Behaviour(hold=asyncio.Event())
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert router.attempts == 1


# ---- ejections


@pytest.mark.parametrize(("status", "limit"), [(302, 5), (500, 5), (599, 5), (502, 3), (503, 3), (504, 3)])
async def test_engine_failing_fast_is_ejected(bed: Make, status: int, limit: int) -> None:
    """An engine that fails fast is the least loaded one."""
    router = await bed("e0", "e1")
    router["e0"].default = Behaviour(status=status)
    for _ in range(20):
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvstore-engine"]) == (200, "e1")
    assert await router.healthy() == {"e1"}
    assert len(router["e0"].requests) == limit
    cause = "gateway_failures" if limit == 3 else "server_errors"
    assert await router.counter("router_ejections_total", cause=cause) == 1


async def test_engine_broken_streams_is_ejected(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].default = Behaviour(pieces=5, cut_after=2)
    for _ in range(20):
        await router.complete(stream=True)
    assert await router.healthy() == {"e1"}
    assert len(router["e0"].requests) == 3


async def test_engine_hanging_is_ejected(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin", first_byte_timeout_ms=1000)
    router["e0"].default = Behaviour(hold=asyncio.Event())
    statuses = [(await router.complete()).status_code for _ in range(20)]
    assert statuses.count(504) == 3
    assert statuses.count(200) == 17
    assert await router.healthy() == {"e1"}


async def test_engine_ejected_by_requests_comes_back(bed: Make) -> None:
    router = await bed("e0", "e1", policy="round_robin", **QUICK)
    router["e0"].script.extend([Behaviour(cut_after=0)] * 3)

    async def ejected() -> bool:
        assert (await router.complete()).status_code == 200
        return await router.counter("router_ejections_total", cause="gateway_failures") == 1

    async def healthy_again() -> bool:
        return await router.healthy() == {"e0", "e1"}

    await wait_until_async(ejected, "e0 is ejected")  # a late health check may keep requests away from it for a moment
    await wait_until_async(healthy_again, "e0 is healthy again")


async def test_client_4xx_does_not_reset_failures(bed: Make) -> None:
    """Invalid requests between its failures must not keep a failing engine healthy."""
    router = await bed("e0", "e1", policy="round_robin")
    router["e0"].script.extend([Behaviour(status=500), Behaviour(status=400)] * 5)
    statuses = [(await router.complete()).status_code for _ in range(30)]
    assert set(statuses) == {200, 400}
    assert await router.healthy() == {"e1"}


async def test_poison_request_ejects_at_most_half(bed: Make) -> None:
    """One client repeats a request at which every engine fails: others are still served."""
    names = ("e0", "e1", "e2", "e3")
    router = await bed(*names)
    body = {"error": {"message": "division by zero"}}
    for _ in range(20):
        for engine in router.engines.values():
            engine.default = Behaviour(status=500, body=body)
        before = router.attempts
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (500, body)
        assert router.attempts == before + 2, "one retry"
        assert len(await router.healthy()) >= len(names) // 2
    for engine in router.engines.values():
        engine.default = Behaviour()
    assert (await router.complete()).status_code == 200
    assert await router.counter("router_panic_requests_total") == 0


async def test_bad_clients_mixed_eject_nothing(bed: Make) -> None:
    """Wrong keys, invalid requests, rate limits, disconnects and huge prompts, without one good request in between."""
    router = await bed("e0", "e1")
    for status in (400, 401, 404, 429) * 3:
        for engine in router.engines.values():
            engine.default = Behaviour(status=status)
        assert (await router.complete("x" * (1 << 20))).status_code == status
    for engine in router.engines.values():
        engine.default = Behaviour(hold=asyncio.Event())
    pending = [asyncio.create_task(router.complete()) for _ in range(10)]

    async def running() -> bool:
        return sum(engine.running for engine in router.engines.values()) == len(pending)

    await wait_until_async(running, "all requests run")
    for task in pending:
        task.cancel()
    for engine in router.engines.values():
        await engine.until_gone(1)
    for engine in router.engines.values():
        engine.default = Behaviour()
    assert await router.healthy() == {"e0", "e1"}
    assert (await router.complete()).status_code == 200


# ---- all engines down


async def test_engines_all_down_panic_then_recovery(bed: Make) -> None:
    router = await bed("e0", "e1", **QUICK)
    for engine in router.engines.values():
        await engine.stop()
    assert (await router.complete()).status_code == 503

    async def unhealthy() -> bool:
        return (await router.http.get("/health")).status_code == 503

    await wait_until_async(unhealthy, "no engine is healthy")
    assert (await router.complete()).status_code == 503
    assert await router.counter("router_panic_requests_total") > 0
    assert (await router.http.get("/v1/models")).status_code == 503
    await router["e0"].start()

    async def served() -> bool:  # an engine whose ejection has just ended is tried alone
        return (await router.complete()).status_code == 200

    await wait_until_async(served, "e0 gets requests in panic mode")

    async def healthy() -> bool:
        return (await router.http.get("/health")).status_code == 200

    await wait_until_async(healthy, "e0 is healthy again")


async def test_engine_failing_checks_gets_no_requests(bed: Make) -> None:
    router = await bed("e0", "e1", **QUICK)
    router["e0"].well = False

    async def ejected() -> bool:
        return await router.healthy() == {"e1"}

    await wait_until_async(ejected, "e0 is ejected")
    for _ in range(4):
        assert "e1" in (await router.complete()).text
    router["e0"].well = True

    async def both() -> bool:
        return await router.healthy() == {"e0", "e1"}

    await wait_until_async(both, "e0 is healthy again")


async def test_model_unlisted_engine_used_last(bed: Make) -> None:
    """An engine that lists no models gets a request only if no engine lists the requested model."""
    router = await bed("e0", "e1", policy="round_robin", **QUICK)
    router["e0"].models = ()

    async def unlisted() -> bool:
        return (await router.states())["e0"]["models"] == []

    await wait_until_async(unlisted, "e0 lists nothing")
    for _ in range(5):
        assert (await router.complete()).headers["x-kvstore-engine"] == "e1"
    body = json.dumps({"model": "other", "prompt": "a"})
    answer = await router.http.post("/v1/completions", content=body)
    assert answer.headers["x-kvstore-engine"] == "e0"
