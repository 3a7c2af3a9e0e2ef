"""Requests on a prefill engine and a decode engine: what each is told, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_bed import Make, until

from kvstore.testing.fake_engine import Behaviour


async def test_both_engines_are_called_and_the_decode_engine_answers(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    answer = await router.complete("a b c", max_tokens=50, n=2, min_tokens=5, temperature=0)
    assert answer.json()["choices"][0]["text"] == "d0 saw 3"
    assert (answer.headers["x-kvstore-engine"], answer.headers["x-kvstore-prefill"]) == ("d0", "p0")
    await router["p0"].until_requests(1)
    prefill, decode = router["p0"].requests[0], router["d0"].requests[0]
    told = prefill.pop("kv_transfer_params")
    assert prefill == {"model": "m", "prompt": "a b c", "max_tokens": 1, "n": 1, "temperature": 0, "stream": False}
    assert told.keys() == {"do_remote_decode", "transfer_id", "decode_node"}
    assert (told["do_remote_decode"], told["decode_node"]) == (True, "node-d0")
    waits = decode.pop("kv_transfer_params")
    assert decode == {"model": "m", "prompt": "a b c", "max_tokens": 50, "n": 2, "min_tokens": 5, "temperature": 0}
    assert waits == {"do_remote_prefill": True, "transfer_id": told["transfer_id"], "prefill_node": "node-p0"}


async def test_no_two_attempts_share_a_transfer(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin")
    router["d0"].default = router["d1"].default = Behaviour(status=503)
    assert (await router.complete()).status_code == 503
    ids = [body["kv_transfer_params"]["transfer_id"] for body in router["p0"].requests]
    assert len(set(ids)) == len(ids) == 3


async def test_one_after_the_other_passes_on_what_the_prefill_engine_says(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), flow="sequential")
    assert (await router.complete()).status_code == 200
    told: dict[str, Any] = router["d0"].requests[0]["kv_transfer_params"]
    assert told["remote_host"] == "p0"
    assert told["do_remote_prefill"] is True


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_prefill_engine_that_fails_is_replaced_and_the_waiting_decode_engine_let_go(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow, policy="round_robin")
    router["p0"].default = Behaviour(cut_after=0)
    if flow == "concurrent":
        router["d0"].script.append(Behaviour(hold=asyncio.Event()))  # as one that waits for a prompt
    answer = await router.complete()
    assert answer.headers["x-kvstore-prefill"] == "p1"
    if flow == "concurrent":
        await router["d0"].until_gone(1)
    assert await router.counter("router_prefills_failed_total") == 1


async def test_without_a_prefill_engine_the_decode_engine_computes_the_prompt(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    await router["p0"].stop()
    router["d0"].script.append(Behaviour(hold=asyncio.Event()))
    answer = await router.complete()
    assert answer.json()["choices"][0]["text"] == "d0 saw 3"
    assert "kv_transfer_params" not in router["d0"].requests[-1]
    assert await router.counter("router_without_prefill_total") == 1


async def test_a_decode_engine_that_fails_takes_its_prefill_with_it(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin")
    router["p0"].script.append(Behaviour(hold=asyncio.Event()))
    router["d0"].default = Behaviour(cut_after=0)
    answer = await router.complete()
    assert answer.headers["x-kvstore-engine"] == "d1"
    await router["p0"].until_gone(1)


async def test_a_client_that_leaves_ends_both(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = router["d0"].default = Behaviour(hold=asyncio.Event())
    asking = asyncio.create_task(router.complete())
    await router["p0"].until_requests(1)
    await router["d0"].until_requests(1)
    asking.cancel()
    await router["p0"].until_gone(1)
    await router["d0"].until_gone(1)

    async def settled() -> bool:
        return all(engine["sequences"] == 0 for engine in (await router.http.get("/router/engines")).json().values())

    await until(settled, "the books are even")


async def test_a_request_that_is_wrong_is_refused_by_the_decode_engine_in_its_own_words(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(status=400)
    router["d0"].default = Behaviour(status=400, body={"error": {"message": "no"}})
    answer = await router.complete()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}})


async def test_a_prefill_engine_slower_than_the_answer_is_let_finish(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0",))
    release = asyncio.Event()
    router["p0"].default = Behaviour(hold=release)
    assert (await router.complete()).status_code == 200
    release.set()
    assert router["p0"].gone == 0


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_the_only_prefill_engine_that_fails_at_everything_is_gone_without(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), flow=flow)
    router["p0"].default = Behaviour(status=500)
    for _ in range(10):
        router["d0"].script.clear()
        if flow == "concurrent" and await router.up() == {"p0", "d0"}:
            router["d0"].script.append(Behaviour(hold=asyncio.Event()))  # as one that waits for a prompt
        answer = await router.complete()
        assert (answer.status_code, "x-kvstore-prefill" in answer.headers) == (200, False)
    assert await router.up() == {"d0"}
    assert len(router["p0"].requests) == 3


@pytest.mark.parametrize("retries", [1, 2])
@pytest.mark.parametrize("how", [Behaviour(status=500), Behaviour(cut_after=0)], ids=["500", "cut"])
@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_decode_engine_tells_whether_prefill_engines_fail_because_of_the_request(
    bed: Make, flow: str, how: Behaviour, retries: int
) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow, retries=retries)
    for name in ("p0", "p1"):
        router[name].default = how
    router["d0"].default = Behaviour(waits_for_prompts=True)
    for _ in range(12):
        answer = await router.complete()
        assert (answer.status_code, "x-kvstore-prefill" in answer.headers) == (200, False)
    assert await router.up() == {"d0"}
    assert len(router["p0"].requests) == len(router["p1"].requests) == 3


async def test_a_prefill_engine_that_fails_behind_the_answer_is_noticed(bed: Make) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), policy="least_loaded")
    hung = asyncio.Event()
    router["p0"].default = Behaviour(status=500, hold=hung)
    for number in range(6):
        assert (await router.complete(f"{number} " + "a " * 300)).status_code == 200
    engines = (await router.http.get("/router/engines")).json()
    assert engines["p0"]["sequences"] == len(router["p0"].requests) > 0, "it has them still to do"
    assert len(router["p1"].requests) > len(router["p0"].requests), "and so gets less"
    hung.set()

    async def noticed() -> bool:
        return await router.counter("router_attempts_failed_total", kind="erred") == len(router["p0"].requests)

    await until(noticed, "what failed late is counted")
    for number in range(6):
        await router.complete(f"{number} again " + "a " * 300)

    async def out() -> bool:
        return await router.up() == {"p1", "d0"}

    await until(out, "it is out")
    assert (await router.http.get("/router/engines")).json()["p0"]["sequences"] == 0


async def test_prefill_engines_that_have_no_room_are_gone_without_in_the_end(bed: Make) -> None:
    router = await bed(prefill=("p0", "p1", "p2"), decode=("d0",), flow="sequential")
    for name in ("p0", "p1", "p2"):
        router[name].default = Behaviour(status=503)
    assert (await router.complete()).status_code == 200
    assert await router.up() == {"p0", "p1", "p2", "d0"}


async def test_a_prefill_engine_that_hangs_behind_the_answers_is_put_out(bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.router.pair._LATE_S", 0.1)
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for _ in range(3):
        assert (await router.complete()).status_code == 200
    await router["p0"].until_gone(3)

    async def out() -> bool:
        return await router.up() == {"d0"}

    await until(out, "it is out")
    assert (await router.complete()).status_code == 200
    assert (await router.http.get("/router/engines")).json()["p0"]["sequences"] == 0


async def test_late_prefills_are_not_left_without_bound(bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a connection."""
    monkeypatch.setattr("kvstore.router.pair._MOST_LATE", 2)
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for _ in range(5):
        assert (await router.complete()).status_code == 200

    async def bounded() -> bool:
        return len(router["p0"].requests) - router["p0"].gone <= 2

    await until(bounded, "no more than two are under way")
    assert (await router.http.get("/router/engines")).json()["p0"]["sequences"] <= 2


async def test_a_prefill_engine_that_hangs_is_to_blame_and_not_the_decode_engine_that_waits_for_it(bed: Make) -> None:
    """Both calls end at the same time."""
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin", first_byte_timeout_s=0.2)
    router["p0"].default = Behaviour(hold=asyncio.Event())
    router["d0"].default = router["d1"].default = Behaviour(waits_for_prompts=True)
    for _ in range(3):
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        assert "p0" in answer.json()["error"]["message"]
        assert {"d0", "d1"} <= await router.up()
    assert await router.up() == {"d0", "d1"}
    assert not any(engine["busy"] for name, engine in (await router.http.get("/router/engines")).json().items() if name != "p0")


async def test_a_decode_engine_that_hangs_with_the_prompt_at_hand_is_to_blame(bed: Make) -> None:
    router = await bed(prefill=("p0",), decode=("d0", "d1"), policy="round_robin", first_byte_timeout_s=0.2)
    router["d0"].default = Behaviour(hold=asyncio.Event())
    while len(router["d0"].requests) < 3:
        await router.complete()
    assert "d0" not in await router.up()
    assert {"p0", "d1"} <= await router.up()


async def test_requests_that_the_decode_engine_refuses_leave_the_prefill_engines_alone(
    bed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's wrong requests: they are refused at once, while their prompts take long to compute."""
    monkeypatch.setattr("kvstore.router.pair._LATE_S", 0.1)
    router = await bed(prefill=("p0",), decode=("d0",))
    router["p0"].default = Behaviour(hold=asyncio.Event())
    for number in range(1, 5):
        begun = asyncio.Event()
        router["d0"].default = Behaviour(status=400, hold=begun)
        asking = asyncio.create_task(router.complete())
        await router["p0"].until_requests(number)
        begun.set()
        assert (await asking).status_code == 400
    await router["p0"].until_gone(4)
    engines = (await router.http.get("/router/engines")).json()
    assert engines["p0"]["sequences"] == 0
    assert await router.counter("router_prefills_failed_total") == 0
    assert await router.up() == {"p0", "d0"}


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_prefill_engine_that_refuses_what_the_decode_engine_answers_is_put_out(bed: Make, flow: str) -> None:
    """Refusing is quick: it would get most of the requests, and each decode engine would wait for a prompt in vain."""
    router = await bed(prefill=("p0",), decode=("d0",), flow=flow)
    router["p0"].default = Behaviour(status=400)
    for _ in range(3):
        assert (await router.complete()).status_code == 200

    async def out() -> bool:
        return await router.up() == {"d0"}

    await until(out, "it is out")
    assert await router.counter("router_prefills_failed_total") == 3


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_request_that_both_engines_refuse_is_counted_against_neither(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), flow=flow)
    router["p0"].default = router["d0"].default = Behaviour(status=400)
    for _ in range(4):
        assert (await router.complete()).status_code == 400
    assert await router.counter("router_prefills_failed_total") == 0
    assert await router.up() == {"p0", "d0"}


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_prefill_engine_that_takes_no_key_is_replaced_at_once_and_put_out(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0",), flow=flow, policy="round_robin")
    router["p0"].default = Behaviour(status=403)
    for _ in range(8):
        assert (await router.complete()).status_code == 200

    async def out() -> bool:
        return await router.up() == {"p1", "d0"}

    await until(out, "it is out")


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
async def test_a_key_that_no_engine_takes_is_refused_in_the_engines_words_and_counted_against_none(bed: Make, flow: str) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0", "d1"), flow=flow)
    told = {"error": {"message": "no such key"}}
    for engine in router.engines.values():
        engine.default = Behaviour(status=401, body=told)
    for _ in range(5):
        answer = await router.complete()
        assert (answer.status_code, answer.json()) == (401, told)
    assert await router.up() == {"p0", "p1", "d0", "d1"}
