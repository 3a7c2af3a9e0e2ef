"""Requests on a prefill engine and a decode engine: the two calls, and failures of either engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_bed import Make

from kvstore.lab.fake_engine import Behaviour
from support.wait import wait_until_async

FLOWS = pytest.mark.parametrize("flow", ["concurrent", "sequential"])
GRACE = "kvstore.router.proxy.pd_request.PREFILL_GRACE_S"


# ---- the two calls


async def test_pair_both_engines_called_decode_answers(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    answer = await router.complete("a b c", max_tokens=50, n=2, min_tokens=5, temperature=0)
    assert answer.json()["choices"][0]["text"] == "d0 saw 3"
    assert (answer.headers["x-kvstore-engine"], answer.headers["x-kvstore-prefill"]) == ("d0", "p0")
    await router["p0"].until_requests(1)
    prefill, decode = router["p0"].requests[0], router["d0"].requests[0]
    sent = prefill.pop("kv_transfer_params")
    assert prefill == {"model": "m", "prompt": "a b c", "max_tokens": 1, "n": 1, "temperature": 0, "stream": False}
    assert sent.keys() == {"do_remote_decode", "transfer_id", "decode_node"}
    assert (sent["do_remote_decode"], sent["decode_node"]) == (True, "node-d0")
    received = decode.pop("kv_transfer_params")
    assert decode == {"model": "m", "prompt": "a b c", "max_tokens": 50, "n": 2, "min_tokens": 5, "temperature": 0}
    assert received == {"do_remote_prefill": True, "transfer_id": sent["transfer_id"], "prefill_node": "node-p0"}


async def test_pair_attempts_have_distinct_transfer_ids(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin")
    router["d0"].default = router["d1"].default = Behaviour(status=503, hold=(release := asyncio.Event()))
    pending = asyncio.create_task(router.complete())
    await router["p0"].until_requests(1)
    release.set()
    assert (await pending).status_code == 503
    ids = [body["kv_transfer_params"]["transfer_id"] for name in ("d0", "d1") for body in router[name].requests]
    assert len(set(ids)) == len(ids) == 2


async def test_pair_sequential_forwards_transfer_params(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), flow="sequential")
    assert (await router.complete()).status_code == 200
    params: dict[str, Any] = router["d0"].requests[0]["kv_transfer_params"]
    assert params["remote_host"] == "p0"
    assert params["do_remote_prefill"] is True


async def test_pair_client_disconnect_cancels_both(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = router["d0"].default = Behaviour(hold=asyncio.Event())
    pending = asyncio.create_task(router.complete())
    await router["p0"].until_requests(1)
    await router["d0"].until_requests(1)
    pending.cancel()
    await router["p0"].until_gone(1)
    await router["d0"].until_gone(1)

    async def settled() -> bool:
        return all(engine["sequences"] == 0 for engine in (await router.states()).values())

    await wait_until_async(settled, "no request in flight")
    assert await router.healthy() == {"p0", "d0"}


async def test_prefill_slower_than_response_may_finish(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    release = asyncio.Event()
    router["p0"].default = Behaviour(hold=release)
    assert (await router.complete()).status_code == 200
    release.set()
    assert router["p0"].gone == 0


# ---- prefill engines that fail


@FLOWS
async def test_prefill_reset_retried_and_decode_cancelled(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow, policy="round_robin")
    router["p0"].default = Behaviour(cut_after=0)
    if flow == "concurrent":
        router["d0"].script.append(Behaviour(hold=asyncio.Event()))  # like an engine that waits for a prompt
    answer = await router.complete()
    assert answer.headers["x-kvstore-prefill"] == "p1"
    if flow == "concurrent":
        await router["d0"].until_gone(1)
    assert await router.counter("router_prefills_failed_total") == 1


async def test_prefill_unreachable_decode_computes_prompt(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    await router["p0"].stop()
    router["d0"].script.append(Behaviour(hold=asyncio.Event()))
    answer = await router.complete()
    assert answer.json()["choices"][0]["text"] == "d0 saw 3"
    assert "kv_transfer_params" not in router["d0"].requests[-1]
    assert await router.counter("router_without_prefill_total") == 1


async def test_prefill_unreachable_client_names_no_source(bed: Make) -> None:
    """A client must not choose from where the decode engine gets KV."""
    router = await bed(prefill=("p0",), decode=("d0",))
    await router["p0"].stop()
    router["d0"].script.append(Behaviour(hold=asyncio.Event()))
    answer = await router.complete(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"})
    assert answer.status_code == 200
    assert router["d0"].requests[-1]["kv_transfer_params"] == {}


@FLOWS
async def test_prefill_only_one_failing_is_ejected(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), flow=flow)
    router["p0"].default = Behaviour(status=500)
    router["d0"].default = Behaviour(waits_for_prompts=True)
    for _ in range(10):
        answer = await router.complete()
        assert (answer.status_code, "x-kvstore-prefill" in answer.headers) == (200, False)
    assert await router.healthy() == {"d0"}
    assert len(router["p0"].requests) == 5


@pytest.mark.parametrize("retries", [1, 2])
@pytest.mark.parametrize(("how", "limit"), [(Behaviour(status=500), 5), (Behaviour(cut_after=0), 3)], ids=["500", "reset"])
@FLOWS
async def test_prefill_all_failing_costs_no_request(bed: Make, flow: str, how: Behaviour, limit: int, retries: int) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow, retries=retries)
    for name in ("p0", "p1"):
        router[name].default = how
    router["d0"].default = Behaviour(waits_for_prompts=True)
    for _ in range(12):
        answer = await router.complete()
        assert (answer.status_code, "x-kvstore-prefill" in answer.headers) == (200, False)
    assert await router.healthy() == {"d0"}
    assert len(router["p0"].requests) == len(router["p1"].requests) == limit


async def test_prefill_503_twice_decode_computes_prompt(bed: Make) -> None:
    router = await bed(prefill=("p0", "p1", "p2"), decode=("d0",), flow="sequential", retries=8)
    for name in ("p0", "p1", "p2"):
        router[name].default = Behaviour(status=503)
    assert (await router.complete()).status_code == 200
    assert router.attempts == 3
    assert await router.healthy() == {"p0", "p1", "p2", "d0"}


async def test_prefill_failure_after_response_is_counted(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    release = asyncio.Event()
    router["p0"].default = Behaviour(status=500, hold=release)
    for _ in range(5):
        assert (await router.complete()).status_code == 200
    assert await router.healthy() == {"p0", "d0"}
    release.set()

    async def ejected() -> bool:
        return await router.healthy() == {"d0"}

    await wait_until_async(ejected, "p0 is ejected")
    assert await router.counter("router_attempts_failed_total", kind="server_error") == 5


async def test_prefill_hanging_after_responses_is_ejected(bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRACE, 0.1)
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for _ in range(3):
        assert (await router.complete()).status_code == 200
    await router["p0"].until_gone(3)

    async def ejected() -> bool:
        return await router.healthy() == {"d0"}

    await wait_until_async(ejected, "p0 is ejected")
    assert (await router.complete()).status_code == 200
    assert (await router.states())["p0"]["sequences"] == 0


async def test_prefill_calls_after_response_are_bounded(bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.router.proxy.pd_request.MAX_UNFINISHED_PREFILLS", 2)
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for _ in range(5):
        assert (await router.complete()).status_code == 200

    async def bounded() -> bool:
        return len(router["p0"].requests) - router["p0"].gone <= 2

    await wait_until_async(bounded, "at most two calls continue")
    assert await router.healthy() == {"p0", "d0"}


async def test_prefill_hung_is_ejected_not_waiting_decode(bed: Make) -> None:
    """Both calls time out at the same time, but the decode engine only waits for the prompt."""
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin", first_byte_timeout_ms=500)
    router["p0"].default = Behaviour(hold=asyncio.Event())
    router["d0"].default = router["d1"].default = Behaviour(waits_for_prompts=True)
    for _ in range(3):
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        assert "p0" in answer.json()["error"]["message"]
        assert {"d0", "d1"} <= await router.healthy()
    assert await router.healthy() == {"d0", "d1"}
    assert (await router.complete()).status_code == 200


@FLOWS
@pytest.mark.parametrize("status", [400, 401])
async def test_prefill_4xx_passed_on_and_not_counted(bed: Make, flow: str, status: int) -> None:
    """The decode engine waits for a prompt that never comes: its call is cancelled."""
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow)
    body = {"error": {"message": "not acceptable"}}
    router["p0"].default = router["p1"].default = Behaviour(status=status, body=body)
    router["d0"].default = Behaviour(waits_for_prompts=True)
    for number in range(1, 11):
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (status, body)
        assert len(router["p0"].requests) + len(router["p1"].requests) == number
    if flow == "concurrent":
        await router["d0"].until_gone(len(router["d0"].requests))
    assert await router.healthy() == {"p0", "p1", "d0"}
    assert all(engine["sequences"] == 0 for engine in (await router.states()).values())


# ---- decode engines that fail


async def test_decode_reset_cancels_prefill_and_is_retried(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin")
    router["p0"].script.append(Behaviour(hold=asyncio.Event()))
    router["d0"].default = Behaviour(cut_after=0)
    answer = await router.complete()
    assert answer.headers["x-kvstore-engine"] == "d1"
    await router["p0"].until_gone(1)


async def test_decode_hanging_after_prefill_is_ejected(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin", first_byte_timeout_ms=500)
    router["d0"].default = Behaviour(hold=asyncio.Event())
    while "d0" in await router.healthy():
        await router.complete()
        assert len(router["d0"].requests) <= 4
    assert {"p0", "d1"} <= await router.healthy()


async def test_decode_4xx_cancels_prefill_and_is_not_counted(bed: Make) -> None:
    """One client's invalid requests are rejected at once, while their prompts would take long."""
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for number in range(1, 7):
        begun = asyncio.Event()
        router["d0"].default = Behaviour(status=400, hold=begun)
        pending = asyncio.create_task(router.complete())
        await router["p0"].until_requests(number)
        begun.set()
        assert (await pending).status_code == 400
    await router["p0"].until_gone(6)
    assert (await router.states())["p0"]["sequences"] == 0
    assert await router.counter("router_prefills_failed_total") == 0
    assert await router.healthy() == {"p0", "d0"}


@FLOWS
@pytest.mark.parametrize("status", [400, 401, 429])
async def test_pair_4xx_from_both_is_passed_on(bed: Make, flow: str, status: int) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0", "d1"), flow=flow)
    body = {"error": {"message": "rejected"}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=status, body=body)
    for _ in range(10):
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (status, body)
    assert await router.healthy() == {"p0", "p1", "d0", "d1"}
