"""Tests of the scheduler service with lost messages and dead engines: each request is served once."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvclient.scheduling.types import Assigned, EngineFigures, EngineGroupState, GroupUpdates, RevokedRequest
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.clock import ManualClock
from kvstore.core.errors import KVStoreError
from kvstore.dualpath.queues import ReadQueues
from kvstore.dualpath.scheduler import SchedulerLimits
from kvstore.metadata.scheduling.scheduler_service import SchedulerService
from kvstore.observe.counters import Counters

TTL_S = 1.0
ROOM = 400


def scheduler(clock: ManualClock) -> SchedulerService:
    limits = SchedulerLimits(1_000, 100, max_waiting=1_000)
    return SchedulerService(limits, ReadQueues(), engine_ttl_s=TTL_S, request_ttl_s=1e6, counters=Counters(), clock=clock)


class Group:
    """A leader with engines that know only received assignments. The test chooses which answers and calls are lost."""

    def __init__(self, service: SchedulerService, name: str, engines: int) -> None:
        self.service, self.name, self.decodes = service, name, name.startswith("D")
        self.names = [f"{name}-{number}" for number in range(engines)]
        self.restart()

    def restart(self) -> None:
        self.book = EngineGroupState(self.name, "decode" if self.decodes else "prefill")
        self.work: dict[str, tuple[int, str, int, bool]] = {}  # request -> generation, engine, tokens, has its other engine

    def figures(self) -> list[EngineFigures]:
        figures = []
        for name in self.names:
            tokens = [one[2] for one in self.work.values() if one[1] == name]
            free = ROOM - sum(tokens) if self.decodes else None
            figures.append(
                EngineFigures(
                    name,
                    f"node-{name}",
                    hbm_tokens=ROOM if self.decodes else 0,
                    sequences=len(tokens),
                    tokens=sum(tokens),
                    free_hbm_tokens=free,
                )
            )
        return figures

    def report(self, ended: list[int], *, call_lost: bool = False, answer_lost: bool = False) -> None:
        request = self.book.request(self.figures(), [] if self.decodes else ended, ended if self.decodes else [])
        if call_lost:
            return
        answer = self.service.report(request)
        if answer_lost:
            return
        news = self.book.take(request, answer)
        if news.first_report:
            self.work.clear()
        for one in news.assigned:
            assert one.engine in self.names
            self.work[one.request_id] = (one.generation, one.engine, one.prompt_tokens, None not in {one.prefill, one.decode})
        for gone in news.revoked:
            if gone.request_id in self.work and self.work[gone.request_id][0] <= gone.generation:
                del self.work[gone.request_id]
        if self.decodes:  # space was granted once
            assert all(figures.free_hbm_tokens is not None and figures.free_hbm_tokens >= 0 for figures in self.figures())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 40), losses=st.sampled_from([0.0, 0.2, 0.5]))
@example(seed=20, requests=40, losses=0.5)  # an answer with an attempt, its successor, and that this one is called off
def test_each_request_is_served_once(seed: int, requests: int, losses: float) -> None:
    asyncio.run(_serve(random.Random(seed), requests, losses))


async def _serve(draw: random.Random, requests: int, losses: float) -> None:
    clock = ManualClock()
    service = scheduler(clock)
    groups = [Group(service, name, draw.randint(1, 3)) for name in ("P1", "P2", "D1", "D2")]
    calls = []
    for number in range(requests):
        wanted = pb.AssignRequestRequest(
            operation_id=secrets.token_bytes(16),
            request_id=f"r{number}",
            prompt_tokens=draw.randint(1, 120),
            budget_ms=600_000,
        )
        calls.append(asyncio.create_task(service.assign(wanted)))
    await asyncio.sleep(0)
    assert service.gauges()["metadata_scheduler_requests"] == requests
    rounds = 0
    while service.gauges()["metadata_scheduler_requests"]:
        rounds += 1
        assert rounds < 2_000
        rough = rounds < 60
        for group in draw.sample(groups, len(groups)):
            if rough and draw.random() < losses / 4:
                group.restart()
            if rough and draw.random() < losses / 4:
                continue  # silent for a round; twice is too long
            before = service.gauges()["metadata_scheduler_requests"]
            ready = [name for name, (_, _, _, both) in group.work.items() if both]
            ended = [group.work.pop(name)[0] for name in draw.sample(ready, min(len(ready), draw.randint(0, 3)))]
            group.report(ended, call_lost=rough and draw.random() < losses, answer_lost=rough and draw.random() < losses)
            assert before - service.gauges()["metadata_scheduler_requests"] <= (3 + 60 if group.decodes else 0)
        clock.advance(TTL_S * 0.6)
        service.expire()
    for call in calls:
        assert (await call).decode.group in {"D1", "D2"}
    clock.advance(10 * TTL_S)
    service.expire()
    assert set(service.gauges().values()) == {0}


names = st.sampled_from(["a", "b", "", "\n", "x" * 600])
u64 = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
u32 = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
ids = st.sampled_from([b"1" * 16, b"2" * 16, b"", b"short"])
states = st.builds(
    pb.EngineState,
    engine=names,
    node=names,
    address=names,
    hbm_tokens=u64,
    sequences=st.none() | u64,
    tokens=st.none() | u64,
    free_hbm_tokens=st.none() | u64,
    read_tokens=st.none() | u64,
)
reports = st.builds(
    pb.ReportEnginesRequest,
    group=names,
    boot_id=ids,
    role=st.integers(0, 5),
    sequence=u64,
    engines=st.lists(states, max_size=3),
    prefilled=st.lists(u64, max_size=2),
    finished=st.lists(u64, max_size=2),
    membership=ids,
    acknowledged=u64,
)
asks = st.builds(
    pb.AssignRequestRequest,
    operation_id=ids,
    request_id=names,
    prompt_tokens=u32,
    hit_tokens=u32,
    expected_output_tokens=u32,
    budget_ms=u32,
    after_generation=u64,
)
cancels = st.builds(pb.CancelRequestRequest, operation_id=ids, request_id=names)


@settings(max_examples=200, deadline=None)
@given(calls=st.lists(st.one_of(reports, asks, cancels), max_size=12))
def test_hostile_calls_are_refused_or_done(calls: list[object]) -> None:
    asyncio.run(_bear(calls))


async def _bear(calls: list[object]) -> None:
    clock = ManualClock()
    service = scheduler(clock)
    waiting = []
    for call in calls:
        try:
            if isinstance(call, pb.ReportEnginesRequest):
                service.report(call)
            elif isinstance(call, pb.AssignRequestRequest):
                waiting.append(asyncio.create_task(service.assign(call)))
                await asyncio.sleep(0)
            elif isinstance(call, pb.CancelRequestRequest):
                service.cancel(call)
        except KVStoreError:
            continue
    clock.advance(1e5)
    service.expire()
    service.expire()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, pb.Assignment | KVStoreError), outcome
    clock.advance(2e6)
    service.expire()
    assert set(service.gauges().values()) == {0}


def test_engine_group_state_rejects_invalid_generations() -> None:
    with pytest.raises(KVStoreError):
        EngineGroupState("g", "decode").request([], [-1], [])


def told(request: str, generation: int) -> Assigned:
    return Assigned(request, generation, "e", 1, 0, 0, None, None)


@pytest.mark.parametrize(
    ("events", "work"),
    [
        ([told("r", 1), told("r", 1)], [1]),
        ([told("r", 1), told("r", 2)], [2]),
        ([told("r", 1), told("r", 2), RevokedRequest("r", 2)], []),
        ([told("r", 2), RevokedRequest("r", 1)], [2]),
        ([RevokedRequest("r", 1), told("r", 2), told("s", 3)], [2, 3]),
    ],
)
def test_answer_work_is_last_event_per_request(events: list[Assigned | RevokedRequest], work: list[int]) -> None:
    assert [one.generation for one in GroupUpdates(tuple(events), first_report=False).assigned] == work
