"""The router and the scheduler in a real metadata server: assignments, reports, and an unreachable scheduler."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router_bed import FIRST_CHECK_ONLY, QUICK, Bed, Make, engine_settings

from kvclient import Assignment, AsyncSchedulerClient, ClientOptions, EnginePlace, EngineRequest
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.config.client import ClientSection
from kvstore.config.router import RouterConfig
from kvstore.core.errors import Unavailable
from kvstore.embedded.cluster import LocalCluster
from kvstore.lab.fake_engine import Behaviour
from kvstore.router.engines import EngineConfig, Role
from kvstore.router.health.engine_metrics import EngineMetrics
from kvstore.router.main import make_context
from kvstore.router.placement.local_placement import LocalPlacement
from kvstore.router.placement.placement import PlacementRequest
from kvstore.router.placement.scheduled_placement import ScheduledPlacement
from kvstore.router.placement.scheduler_reporter import SchedulerReporter
from kvstore.rpc.client import call_aio, connect_aio
from support.wait import wait_until_async


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([], tmp_path, metadata_settings=(("beta_tokens", "1000"), ("engine_ttl", "2s"))) as cluster:
        yield cluster


ROLES = (("p0", Role.PREFILL), ("d0", Role.DECODE))


class Scheduler:
    """Counters of the metadata server."""

    def __init__(self, address: str) -> None:
        self._channel = connect_aio(address, own_connection=True)  # an earlier test's may wait to connect to the same port
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
    return {"policy": "scheduler", "metadata": store.metadata_address, **QUICK, **config}


async def counter_reaches(scheduler: Scheduler, name: str, value: int) -> None:
    async def reached() -> bool:
        return await scheduler.counter(name) == value

    await wait_until_async(reached, f"{name} is {value}")


async def known(scheduler: Scheduler, engines: int) -> None:
    """Wait until this number of engines has joined."""
    await counter_reaches(scheduler, "metadata_scheduler_engines", engines)


async def idle(scheduler: Scheduler) -> None:
    """Wait until all requests of the scheduler have ended."""
    await counter_reaches(scheduler, "metadata_scheduler_requests", 0)


async def test_scheduler_assigns_plain_engines(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)  # and the virtual decode engine
    answers = await asyncio.gather(*(router.complete(f"p{number}", stream=number % 2 == 0) for number in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert min(len(engine.requests) for engine in router.engines.values()) >= 10
    assert await router.counter("router_scheduled_total") == 40
    await idle(scheduler)
    assert await scheduler.counter("metadata_requests_finished_total") == 40
    assert await scheduler.counter("metadata_scheduler_void_reports_total") == 0


async def test_scheduler_assigns_pairs(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed(prefill=("p0", "p1"), decode=("d0", "d1"), **scheduled(store))
    await known(scheduler, 4)
    answers = await asyncio.gather(*(router.complete(f"p{number} " * 50) for number in range(20)))
    assert {answer.headers["x-kvstore-engine"] for answer in answers} == {"d0", "d1"}
    assert {answer.headers["x-kvstore-prefill"] for answer in answers} == {"p0", "p1"}
    assert await router.counter("router_scheduled_total") == 20
    await idle(scheduler)


async def test_engine_metrics_hanging_keeps_its_requests(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), **scheduled(store))
    await known(scheduler, 2)
    engine, release = router["d0"], asyncio.Event()
    engine.default = Behaviour(hold=release)
    pending = asyncio.create_task(router.complete())
    await engine.until_requests(1)
    engine.silence = asyncio.Event()
    calls, reports = engine.calls["metrics"], await router.counter("router_reports_total")

    async def reported() -> bool:
        return engine.calls["metrics"] > calls and await router.counter("router_reports_total") > reports + 5

    await wait_until_async(reported, "metrics were requested and reports sent")
    engine.silence.set()
    release.set()
    assert (await pending).status_code == 200
    await idle(scheduler)
    assert await scheduler.counter("metadata_engines_lost_total") == 0


async def test_scheduler_prefers_prefix_and_shares_load(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
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


async def test_scheduler_skips_overloaded_engine(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
    shared = "word " * 4_000  # about 5,000 tokens by the first estimate, above beta: one at a time per engine
    release = asyncio.Event()
    for engine in router.engines.values():
        engine.default = Behaviour(hold=release)
    pending = [asyncio.create_task(router.complete(f"{number} {shared}")) for number in range(3)]
    await router["e0"].until_requests(1)
    await router["e1"].until_requests(1)
    assert sum(len(engine.requests) for engine in router.engines.values()) == 2  # the third waits at the scheduler
    release.set()
    assert {(await one).status_code for one in pending} == {200}
    await idle(scheduler)


async def test_client_leaving_while_waiting_is_cancelled(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store))
    await known(scheduler, 2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    first = asyncio.create_task(router.complete("word " * 4_000))
    await router["e0"].until_requests(1)
    second = asyncio.create_task(router.complete("other " * 4_000))
    await counter_reaches(scheduler, "metadata_scheduler_waiting_prefill", 1)
    second.cancel()
    release.set()
    assert (await first).status_code == 200
    await idle(scheduler)
    assert len(router["e0"].requests) == 1


async def test_assign_timeout_answers_429(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store, assign_timeout_ms=500))
    await known(scheduler, 2)
    release = asyncio.Event()
    router["e0"].default = Behaviour(hold=release)
    first = asyncio.create_task(router.complete("word " * 4_000))
    await router["e0"].until_requests(1)
    refused = await router.complete("other " * 4_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "capacity_exceeded")
    release.set()
    assert (await first).status_code == 200


async def test_engine_dying_is_removed_and_request_retried(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
    for engine in router.engines.values():
        engine.default = Behaviour(hold=asyncio.Event())
    pending = asyncio.create_task(router.complete())
    served = await engine_with_request(router)
    other = next(name for name in router.engines if name != served)
    router[other].default = Behaviour()
    await router[served].stop()
    assert (await pending).headers["x-kvstore-engine"] == other
    await known(scheduler, 2)
    await idle(scheduler)


async def test_wait_for_prefill_ends_with_last_prefill_engine(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), **scheduled(store))
    await known(scheduler, 2)
    router["p0"].default = Behaviour(hold=asyncio.Event())
    router["d0"].script.append(Behaviour(hold=asyncio.Event()))  # like an engine that waits for a prompt
    pending = [asyncio.create_task(router.complete("word " * 4_000))]
    await router["p0"].until_requests(1)
    pending += [asyncio.create_task(router.complete(f"{number} " + "other " * 4_000)) for number in range(3)]
    await counter_reaches(scheduler, "metadata_scheduler_waiting_prefill", 3)
    router["p0"].well = False
    assert {(await one).status_code for one in pending[1:]} == {200}
    assert all("kv_transfer_params" not in body for body in router["d0"].requests[1:])
    assert await router.counter("router_waits_abandoned_total") == 3
    pending[0].cancel()
    await router["p0"].until_gone(1)
    await idle(scheduler)


async def place(request: EngineRequest, client: AsyncSchedulerClient, reporter: SchedulerReporter) -> None:
    """Assign a request to engine p0, as the router of the reporter."""
    reporter.request_waiting(request.request_id)
    assign = asyncio.create_task(client.assign(request, 30.0))
    while not assign.done():
        await reporter.report()
    reporter.request_placed(request.request_id, (await assign).generation, "p0")


async def test_request_ending_as_engine_is_lost_is_released(store: LocalCluster, scheduler: Scheduler) -> None:
    engines = [EngineConfig("p0", "http://p0", Role.PREFILL, "host-1"), EngineConfig("d0", "http://d0", Role.DECODE, "host-2")]
    context = make_context(RouterConfig(**engine_settings(engines), policy="scheduler", metadata=store.metadata_address))
    for engine in engines:
        context.health.check_succeeded(engine.name, context.now_s(), [])
    async with AsyncSchedulerClient(store.metadata_address) as client:
        reporter = SchedulerReporter(context, client, "mine")
        reporter.lead()
        request = EngineRequest("mine-1", 100)
        await place(request, client, reporter)
        reporter.request_prefilled(request.request_id)
        await reporter.report()
        for _ in range(10):
            context.health.check_failed("p0", context.now_s(), "gone")
        health = context.health.engines["d0"]
        health.config = replace(health.config, node="host-3")  # like another engine of the same name
        report = asyncio.create_task(reporter.report())
        await asyncio.sleep(0)  # it is sent
        reporter.request_finished(request)
        await report
        await reporter.report()
        assert await scheduler.counter("metadata_requests_given_back_total") == 1
        assert await scheduler.counter("metadata_scheduler_requests") == 0


async def test_wait_ends_when_last_engine_dies(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", **scheduled(store))
    await known(scheduler, 2)
    router["e0"].default = Behaviour(hold=asyncio.Event())
    pending = [asyncio.create_task(router.complete("word " * 4_000))]
    await router["e0"].until_requests(1)
    pending.append(asyncio.create_task(router.complete("other " * 4_000)))
    await counter_reaches(scheduler, "metadata_scheduler_waiting_prefill", 1)
    await router["e0"].stop()
    assert {(await one).status_code for one in pending} == {503}


async def test_assignment_to_ejected_engine_is_returned(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    reports = await bed("e0", "e1", **scheduled(store, **FIRST_CHECK_ONLY))
    await known(scheduler, 3)
    router = await bed.beside(reports, **scheduled(store, **FIRST_CHECK_ONLY, report=False, retries=1))
    await router["e0"].stop()  # the reporting router does not notice it, so the scheduler continues to assign e0
    for number in range(16):
        assert (await router.complete(f"p{number}")).headers["x-kvstore-engine"] == "e1"
    assert await router.counter("router_assignments_ejected_total") >= 1
    await idle(scheduler)


async def engine_with_request(router: Bed) -> str:
    found: list[str] = []

    async def has() -> bool:
        found[:] = [name for name, engine in router.engines.items() if engine.requests]
        return bool(found)

    await wait_until_async(has, "an engine received the request")
    return found[0]


async def test_scheduler_down_router_places_until_it_is_back(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
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

    await wait_until_async(scheduled_again, "the scheduler decides again")


async def test_scheduler_never_started_router_serves(bed: Make, tmp_path: Path) -> None:
    router = await bed("e0", policy="scheduler", metadata="127.0.0.1:1", **QUICK)
    assert (await router.complete()).status_code == 200
    assert await router.counter("router_unscheduled_total") == 1


async def test_two_routers_share_one_pool(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    first = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
    second = await bed.beside(first, **scheduled(store, report=False))
    answers = await asyncio.gather(*(router.complete(f"p{number}") for number in range(20) for router in (first, second)))
    assert {answer.status_code for answer in answers} == {200}
    assert await second.counter("router_scheduled_total") == 20
    await idle(scheduler)

    async def even() -> bool:
        engines = await first.states()
        return all(engine["sequences"] == 0 for engine in engines.values())

    await wait_until_async(even, "the first router counts no request in flight")


async def test_second_router_needs_role_engine_only(bed: Make, tmp_path: Path) -> None:
    tokens, shown = tmp_path / "tokens", tmp_path / "shown"
    tokens.write_text("engine routers the-token-of-routers\n")
    shown.write_text("the-token-of-routers\n")
    for path in (tokens, shown):
        path.chmod(0o600)
    with LocalCluster([], tmp_path / "data", metadata_settings=[("tokens_file", str(tokens))]) as store:
        settings = scheduled(store, client=ClientSection(token_file=shown))
        first = await bed("e0", **settings)
        async with AsyncSchedulerClient(store.metadata_address, options=ClientOptions(token_file=shown)) as client:

            async def joined() -> bool:
                return await client.engines() == 2

            await wait_until_async(joined, "the first router has reported")
        second = await bed.beside(first, **settings, report=False)
        assert (await second.complete()).status_code == 200
        assert await second.counter("router_scheduled_total") == 1
        assert await second.counter("router_reports_failed_total") == 0


async def test_no_reporting_router_others_place_alone(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store, report=False))
    answers = await asyncio.gather(*(router.complete(f"p{number}") for number in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert await router.counter("router_unscheduled_total") == 6
    await bed.beside(router, **scheduled(store))
    await known(scheduler, 3)

    async def scheduled_now() -> bool:
        assert (await router.complete()).status_code == 200
        return await router.counter("router_scheduled_total") > 0

    await wait_until_async(scheduled_now, "the scheduler decides")


async def test_second_reporter_takes_over(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    first = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
    second = await bed.beside(first, **scheduled(store))

    async def taken_over() -> bool:
        return await first.counter("router_reports_taken_over_total") == 1

    await wait_until_async(taken_over, "the first router stopped reporting")
    for router in (first, second):
        assert (await router.complete()).status_code == 200
        assert await router.counter("router_scheduled_total") == 1


@pytest.mark.parametrize("unanswered", [False, True])
async def test_request_ending_unreported_at_takeover_is_cancelled(
    unanswered: bool, store: LocalCluster, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise Unavailable("no answer")

    engines = [EngineConfig("p0", "http://p0", Role.PREFILL, "host-1"), EngineConfig("d0", "http://d0", Role.DECODE, "host-2")]
    settings = {**engine_settings(engines), "policy": "scheduler", "metadata": store.metadata_address, "report": False}
    contexts = [make_context(RouterConfig(**settings)) for _ in range(2)]
    for engine, context in itertools.product(engines, contexts):
        context.health.check_succeeded(engine.name, context.now_s(), [])
    async with AsyncSchedulerClient(store.metadata_address) as client:
        reporter, other = (SchedulerReporter(context, client, name) for context, name in zip(contexts, "ab", strict=True))
        reporter.lead()
        request = EngineRequest("a-1", 100)
        await place(request, client, reporter)
        if unanswered:  # a report of the end was lost before the takeover
            reporter.request_finished(request)
            with monkeypatch.context() as patch:
                patch.setattr(client, "report_engines", fail)
                with pytest.raises(Unavailable):
                    await reporter.report()
        other.lead()
        await other.report()
        assert await scheduler.counter("metadata_scheduler_requests") == 1
        if not unanswered:
            reporter.request_finished(request)
        reporter.start()

        async def taken_over() -> bool:
            return contexts[0].counters.snapshot().get("router_reports_taken_over_total", 0) == 1

        await wait_until_async(taken_over, "the other router reports")
        await idle(scheduler)
        assert await scheduler.counter("metadata_requests_cancelled_total") == 1
        await reporter.stop()


async def test_reporter_dying_is_replaced_by_standby(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed("e0", "e1", **scheduled(store))
    await known(scheduler, 3)
    settings = engine_settings(router.configs)
    context = make_context(RouterConfig(**settings, policy="scheduler", metadata=store.metadata_address))
    for engine in router.configs:
        context.health.check_succeeded(engine.name, context.now_s(), [])
    async with AsyncSchedulerClient(store.metadata_address) as client:
        other = SchedulerReporter(context, client, "other")
        other.start()

        async def taken_over() -> bool:
            return await router.counter("router_reports_taken_over_total") == 1

        await wait_until_async(taken_over, "the other router reports")
    assert (await router.counter("router_reports_resumed_total")) == 0

    async def resumed() -> bool:  # after the groups of the other router, whose connection is closed, have expired
        return await router.counter("router_reports_resumed_total") == 1

    await wait_until_async(resumed, "the first router reports again")
    await other.stop()
    await known(scheduler, 3)
    before = await router.counter("router_scheduled_total")
    assert (await router.complete()).status_code == 200
    assert await router.counter("router_scheduled_total") == before + 1
    await idle(scheduler)


class AssigningScheduler(AsyncSchedulerClient):
    """A scheduler whose answers the test sends."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.answer: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self.asked: EngineRequest | None = None
        self.cancelled: list[EngineRequest] = []

    async def assign(self, request: EngineRequest, deadline_s: float) -> Assignment:
        self.asked = request
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:  # as the client does
            self.cancelled.append(request)
            raise

    async def cancel(self, request: EngineRequest, deadline_s: float = 1.0) -> bool:
        self.cancelled.append(request)
        return True


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("turns", range(8))
async def test_assignment_of_cancelled_request_is_returned(turns: int, cancels: int) -> None:
    engine = EngineConfig("e0", "http://e0", Role.PLAIN, "host-1")
    context = make_context(RouterConfig(**engine_settings([engine]), policy="scheduler", metadata="127.0.0.1:1"))
    context.health.check_succeeded("e0", context.now_s(), [])
    async with AssigningScheduler() as client:
        placement = ScheduledPlacement(context, client, LocalPlacement(context, round_robin=False))
        place = asyncio.create_task(placement.place(PlacementRequest("a", "m", 10, {}, 0, 1)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert client.asked is not None
        engines = EnginePlace("router:e0", "host-1", "g", ""), EnginePlace("router:whole", "x", "g", "")
        client.answer.set_result(Assignment(client.asked.request_id, 7, *engines))
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(cancels):
            place.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((place,))
        for _ in range(8):
            await asyncio.sleep(0)
        if not place.cancelled():
            placement.release(place.result())
            await asyncio.wait(context.background)
        assert client.cancelled == [client.asked]


async def test_oversized_prompt_skips_the_scheduler(bed: Make, store: LocalCluster, scheduler: Scheduler) -> None:
    router = await bed(prefill=("p0",), decode=("d0",), **scheduled(store))
    await known(scheduler, 2)
    release = asyncio.Event()
    router["d0"].default = Behaviour(hold=release)
    first = asyncio.create_task(router.complete())
    await router["d0"].until_requests(1)
    oversized = asyncio.create_task(router.complete("word " * 400_000))
    await router["d0"].until_requests(2)  # at once, though the engine is not idle
    third = asyncio.create_task(router.complete())
    await router["d0"].until_requests(3)
    release.set()
    assert [(await one).status_code for one in (first, oversized, third)] == [200] * 3
    assert await router.counter("router_unscheduled_total") == 1


@pytest.mark.parametrize(("prompt", "output", "expected"), [(100, 512_000_000, 125), (990, 512, 10), (100, 20, 20)])
async def test_pair_output_reservation_is_bounded(prompt: int, output: int, expected: int) -> None:
    engines = [EngineConfig(name, f"http://{name}", role, f"host-{name}") for name, role in ROLES]
    context = make_context(RouterConfig(**engine_settings(engines), policy="scheduler", metadata="127.0.0.1:1"))
    for engine, tokens in zip(engines, (100_000, 1_000), strict=True):  # the prefill engine is larger, and does not count
        context.health.check_succeeded(engine.name, context.now_s(), [])
        context.metrics[engine.name] = EngineMetrics(capacity_tokens=tokens)
    async with AssigningScheduler() as client:
        placement = ScheduledPlacement(context, client, LocalPlacement(context, round_robin=False))
        place = asyncio.create_task(placement.place(PlacementRequest("a", "m", prompt, {}, 0, output)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert client.asked is not None
        assert (client.asked.prompt_tokens, client.asked.expected_output_tokens) == (prompt, expected)
        place.cancel()
        await asyncio.wait((place,))
