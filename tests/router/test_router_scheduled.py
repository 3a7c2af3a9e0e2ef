"""The router and the metadata server's scheduler, a real process: who decides, what is told, what happens while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router_bed import NEVER, QUICK, Bed, Make, until

from kvclient import AsyncSchedulerClient, EngineRequest
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.router.config import EngineConfig, Role, RouterConfig
from kvstore.router.main import make_parts
from kvstore.router.reporter import Reporter
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.testing.cluster import LocalCluster
from kvstore.testing.fake_engine import Behaviour


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([], tmp_path, metadata_settings=(("beta_tokens", "1000"), ("engine_ttl", "2s"))) as cluster:
        yield cluster


class Scheduler:
    """What the metadata server counts."""

    def __init__(self, address: str) -> None:
        self._channel = connect_aio(address)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)

    async def counter(self, name: str) -> int:
        answer: pb.GetStatsResponse = await call_aio(self._stub.GetStats, pb.GetStatsRequest(), 5.0)
        return int(answer.counters.get(name, 0))

    async def close(self) -> None:
        await self._channel.close(None)


@pytest.fixture
async def scheduler(store: LocalCluster) -> AsyncIterator[Scheduler]:
    made = Scheduler(store.metadata_address)
    yield made
    await made.close()


def scheduled(store: LocalCluster, **config: Any) -> dict[str, Any]:
    return {"policy": "scheduler", "metadata": store.metadata_address, "health": QUICK, **config}


async def known(router: Bed, scheduler: Scheduler, engines: int) -> None:
    async def joined() -> bool:
        return await scheduler.counter("metadata_scheduler_engines") == engines

    await until(joined, f"{engines} engines have joined")


async def idle(scheduler: Scheduler) -> None:
    async def nothing() -> bool:
        return await scheduler.counter("metadata_scheduler_requests") == 0

    await until(nothing, "the scheduler has no request left")


async def test_plain_engines_are_assigned_by_the_scheduler(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(router, scheduler, 3)  # and the one that stands for them where requests decode
    answers = await asyncio.gather(*(router.complete(f"p{number}", stream=number % 2 == 0) for number in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert min(len(engine.requests) for engine in router.engines.values()) >= 10
    assert await router.counter("router_scheduled_total") == 40
    await idle(scheduler)
    assert await scheduler.counter("metadata_requests_finished_total") == 40
    assert await scheduler.counter("metadata_scheduler_void_reports_total") == 0


async def test_pairs_are_assigned_by_the_scheduler(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0", "d1"), **scheduled(store))
    await known(router, scheduler, 4)
    answers = await asyncio.gather(*(router.complete(f"p{number} " * 50) for number in range(20)))
    assert {answer.headers["x-kvstore-engine"] for answer in answers} == {"d0", "d1"}
    assert {answer.headers["x-kvstore-prefill"] for answer in answers} == {"p0", "p1"}
    assert await router.counter("router_scheduled_total") == 20
    await idle(scheduler)


async def test_an_engine_that_is_asked_for_its_figures_keeps_what_it_has(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), **scheduled(store))
    await known(router, scheduler, 2)
    engine, release = router["d0"], asyncio.Event()
    engine.default = Behaviour(hold=release)
    asking = asyncio.create_task(router.complete())
    await engine.until_requests(1)
    engine.silence = asyncio.Event()
    asked, reports = engine.calls["metrics"], await router.counter("router_reports_total")

    async def reported_meanwhile() -> bool:
        return engine.calls["metrics"] > asked and await router.counter("router_reports_total") > reports + 5

    await until(reported_meanwhile, "the engine is asked, and reported of")
    engine.silence.set()
    release.set()
    assert (await asking).status_code == 200
    await idle(scheduler)
    assert await scheduler.counter("metadata_engines_lost_total") == 0


async def test_the_prefix_is_preferred_and_the_load_still_shared(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(router, scheduler, 3)
    sessions = {number: f"session {number} " + "word " * 1_500 for number in range(6)}
    homes: dict[int, str] = {}
    for number, text in sessions.items():
        homes[number] = (await router.complete(text)).headers["x-kvstore-engine"]
    for turn in range(4):
        for number in sessions:
            sessions[number] += f"turn {turn} " + "more " * 60
        answers = await asyncio.gather(*(router.complete(text) for text in sessions.values()))
        assert {number: answer.headers["x-kvstore-engine"] for number, answer in zip(homes, answers, strict=True)} == homes
    assert set(homes.values()) == {"e0", "e1"}


async def test_an_overloaded_engine_is_passed_over_whatever_it_holds(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(router, scheduler, 3)
    shared = "word " * 4_000  # some 5,000 tokens by the router's first guess, above beta: one at a time a engine
    release = asyncio.Event()
    for engine in router.engines.values():
        engine.default = Behaviour(hold=release)
    asking = [asyncio.create_task(router.complete(f"{number} {shared}")) for number in range(3)]
    await router["e0"].until_requests(1)
    await router["e1"].until_requests(1)
    assert sum(len(engine.requests) for engine in router.engines.values()) == 2  # the third waits at the scheduler
    release.set()
    assert {(await one).status_code for one in asking} == {200}
    await idle(scheduler)


async def test_who_leaves_while_waiting_is_called_off(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store))
    await known(router, scheduler, 2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    first = asyncio.create_task(router.complete("word " * 4_000))
    await router["e0"].until_requests(1)
    second = asyncio.create_task(router.complete("other " * 4_000))

    async def waits() -> bool:
        return await scheduler.counter("metadata_scheduler_waiting_prefill") == 1

    await until(waits, "the second waits")
    second.cancel()
    release.set()
    assert (await first).status_code == 200
    await idle(scheduler)
    assert len(router["e0"].requests) == 1


async def test_no_room_in_time_is_said_so(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store, assign_timeout_s=0.5))
    await known(router, scheduler, 2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    first = asyncio.create_task(router.complete("word " * 4_000))
    await router["e0"].until_requests(1)
    refused = await router.complete("other " * 4_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "capacity_exceeded")
    release.set()
    assert (await first).status_code == 200


async def test_an_engine_that_dies_leaves_the_scheduler_and_its_request_goes_elsewhere(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(router, scheduler, 3)
    for engine in router.engines.values():
        engine.default = Behaviour(hold=asyncio.Event())
    asking = asyncio.create_task(router.complete())
    served = await until_one_has_it(router)
    other = next(name for name in router.engines if name != served)
    router[other].default = Behaviour()
    await router[served].stop()
    assert (await asking).headers["x-kvstore-engine"] == other
    await known(router, scheduler, 2)
    await idle(scheduler)


async def test_who_waits_for_prefill_engines_waits_no_longer_than_these_live(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), **scheduled(store))
    await known(router, scheduler, 2)
    router["p0"].default = Behaviour(hold=asyncio.Event())
    router["d0"].script.append(Behaviour(hold=asyncio.Event()))  # as one that waits for a prompt
    asking = [asyncio.create_task(router.complete("word " * 4_000))]
    await router["p0"].until_requests(1)
    asking += [asyncio.create_task(router.complete(f"{number} " + "other " * 4_000)) for number in range(3)]

    async def wait() -> bool:
        return await scheduler.counter("metadata_scheduler_waiting_prefill") == 3

    await until(wait, "the others wait")
    await router["p0"].stop()
    assert {(await one).status_code for one in asking} == {200}
    assert all("kv_transfer_params" not in body for body in router["d0"].requests[1:])
    assert await router.counter("router_waits_in_vain_total") >= 3
    await idle(scheduler)


async def test_a_request_that_ends_as_its_engines_are_lost_is_not_kept(store: LocalCluster, scheduler: Scheduler) -> None:
    engines = [EngineConfig("p0", "http://p0", Role.PREFILL, "host-1"), EngineConfig("d0", "http://d0", Role.DECODE, "host-2")]
    parts = make_parts(RouterConfig(engines, policy="scheduler", metadata=store.metadata_address))
    for engine in engines:
        parts.pool.check_succeeded(engine.name, parts.now_s(), [])
    async with AsyncSchedulerClient(store.metadata_address) as client:
        reporter = Reporter(parts, client, "mine")
        leaders = (client.leader("router:prefill", "prefill"), client.leader("router:decode", "decode"))
        reporter._leaders = leaders
        request = EngineRequest("mine-1", 100)
        reporter.begins(request.request_id)
        assign = asyncio.create_task(client.assign(request, 30.0))
        while not assign.done():
            await reporter._report(leaders)
        reporter.placed(request.request_id, (await assign).generation, "p0")
        reporter.prefilled(request.request_id)
        await reporter._report(leaders)
        for _ in range(10):
            parts.pool.check_failed("p0", parts.now_s(), "gone")
        health = parts.pool.engines["d0"]
        health.config = replace(health.config, node="host-3")  # as another engine of this name
        report = asyncio.create_task(reporter._report(leaders))
        await asyncio.sleep(0)  # it is sent
        reporter.ended(request)
        await report
        await reporter._report(leaders)
        assert await scheduler.counter("metadata_requests_given_back_total") == 1
        assert await scheduler.counter("metadata_scheduler_requests") == 0


async def test_who_waits_as_the_last_engine_goes_is_told_at_once(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store))
    await known(router, scheduler, 2)
    router["e0"].default = Behaviour(hold=asyncio.Event())
    asking = [asyncio.create_task(router.complete("word " * 4_000))]
    await router["e0"].until_requests(1)
    asking.append(asyncio.create_task(router.complete("other " * 4_000)))

    async def waits() -> bool:
        return await scheduler.counter("metadata_scheduler_waiting_prefill") == 1

    await until(waits, "the second waits")
    await router["e0"].stop()
    assert {(await one).status_code for one in asking} == {503}


async def test_an_assignment_to_an_engine_that_is_out_is_given_back(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    reports = await bed("e0", "e1", **scheduled(store, health=NEVER))
    await known(reports, scheduler, 3)
    router = await bed.beside(reports, **scheduled(store, health=NEVER, report=False, retries=1))
    await router["e0"].stop()  # which the router that reports does not notice: the scheduler goes on to assign it
    for number in range(4):
        assert (await router.complete(f"p{number}")).headers["x-kvstore-engine"] == "e1"
    assert await router.counter("router_assigned_dead_total") >= 1
    await idle(scheduler)


async def until_one_has_it(router: Bed) -> str:
    found: list[str] = []

    async def has() -> bool:
        found[:] = [name for name, engine in router.engines.items() if engine.requests]
        return bool(found)

    await until(has, "an engine has the request")
    return found[0]


async def test_while_the_scheduler_is_away_the_router_decides_and_then_asks_again(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(router, scheduler, 3)
    assert (await router.complete()).status_code == 200
    store.kill("metadata")
    answers = await asyncio.gather(*(router.complete(f"p{number}") for number in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert await router.counter("router_unscheduled_total") == 10
    store.start_metadata()

    async def scheduled_again() -> bool:
        before = await router.counter("router_scheduled_total")
        assert (await router.complete()).status_code == 200
        return await router.counter("router_scheduled_total") > before

    await until(scheduled_again, "the scheduler decides again")


async def test_a_router_whose_scheduler_never_came_serves(bed: Make, tmp_path: Path) -> None:
    router = await bed("e0", policy="scheduler", metadata="127.0.0.1:1", health=QUICK)
    assert (await router.complete()).status_code == 200
    assert await router.counter("router_unscheduled_total") == 1


async def test_two_routers_share_a_pool(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    first = await bed("e0", "e1", **scheduled(store))
    await known(first, scheduler, 3)
    second = await bed.beside(first, **scheduled(store, report=False))
    answers = await asyncio.gather(*(router.complete(f"p{number}") for number in range(20) for router in (first, second)))
    assert {answer.status_code for answer in answers} == {200}
    assert await second.counter("router_scheduled_total") == 20
    await idle(scheduler)

    async def even() -> bool:
        engines = (await first.http.get("/router/engines")).json()
        return all(engine["sequences"] == 0 for engine in engines.values())

    await until(even, "the first router's books are even again")


async def test_where_no_router_reports_the_others_decide_by_themselves(
    bed: Make, store: LocalCluster, scheduler: Scheduler
) -> None:
    router = await bed("e0", "e1", **scheduled(store, report=False))
    answers = await asyncio.gather(*(router.complete(f"p{number}") for number in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert await router.counter("router_unscheduled_total") == 6
    await known(await bed.beside(router, **scheduled(store)), scheduler, 3)

    async def scheduled_now() -> bool:
        assert (await router.complete()).status_code == 200
        return await router.counter("router_scheduled_total") > 0

    await until(scheduled_now, "the scheduler decides")


async def test_a_second_reporter_makes_the_first_stop_reporting(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    first = await bed("e0", "e1", **scheduled(store))
    await known(first, scheduler, 3)
    second = await bed.beside(first, **scheduled(store))

    async def yielded() -> bool:
        return await first.counter("router_reports_taken_over_total") == 1

    await until(yielded, "the first has yielded")
    for router in (first, second):
        assert (await router.complete()).status_code == 200
        assert await router.counter("router_scheduled_total") == 1
