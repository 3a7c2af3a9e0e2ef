"""Tests of scheduling with a real server process and real clients."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from metadata_harness import TIMEOUT_S, Peer, server_process

from kvclient import (
    AsyncSchedulerClient,
    ClientOptions,
    EngineFigures,
    EngineRequest,
    GroupUpdates,
    SchedulerClient,
)
from kvclient.scheduling.types import EngineRole
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import (
    CapacityExceeded,
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    NotFound,
    Unavailable,
)
from kvstore.observe.counters import Counters
from kvstore.rpc.client import call, call_aio, connect_aio
from support.wait import wait_until_async

POLL_S = 0.005
TTL_MS = 400


class Engines:
    """A group whose leader polls as in production; each request is computed, or generated, between two polls."""

    def __init__(self, client: AsyncSchedulerClient, group: str, role: EngineRole, *, ends: bool = True) -> None:
        self.client, self.group, self.role, self.ends = client, group, role, ends
        space = 1_000_000 if role == "decode" else 0
        self.figures = [EngineFigures(f"{group}-{number}", f"node-{group}", hbm_tokens=space) for number in range(2)]
        self.served: list[str] = []
        self.news: list[GroupUpdates] = []
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        leader = self.client.leader(self.group, self.role)
        done: list[int] = []
        while True:
            with suppress(Unavailable, DeadlineExceeded):
                if self.role == "prefill":
                    news = await leader.report(self.figures, prefilled=done)
                else:
                    news = await leader.report(self.figures, finished=done)
                if news.first_report:
                    self.news.append(news)
                both = [one for one in news.assigned if one.prefill is not None and one.decode is not None]
                self.served.extend(one.request_id for one in both)
                done = [one.generation for one in both] if self.ends else []
            await asyncio.sleep(POLL_S)

    async def die(self) -> None:
        """Stop reporting."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[AsyncSchedulerClient]:
    """A client whose circuit breaker retries quickly."""
    async with AsyncSchedulerClient(address, options=ClientOptions(breaker_pause_s=0.05)) as client:
        yield client


async def test_assignment_follows_the_rules(tmp_path: Path) -> None:
    with server_process(tmp_path, alpha_tokens=1_000, beta_tokens=100) as server, SchedulerClient(server.address) as client:
        async with connect_aio(server.address) as channel:
            nodes = [Peer(channel, name) for name in ("busy", "idle")]
            for node in nodes:
                await node.register()
            plan = await call_aio(
                nodes[0].stub.PlanLoad,
                pb.PlanLoadRequest(
                    operation_id=secrets.token_bytes(16),
                    policy="prefill_only",
                    prefill_node="busy",
                    blocks=101,
                    block_bytes=1_000,
                    block_tokens=10,
                    budget_ms=600_000,
                ),
                TIMEOUT_S,
            )
            prefill, decode = client.leader("P", "prefill"), client.leader("D", "decode")
            computing = [
                EngineFigures("overloaded", "idle", sequences=1, tokens=101),
                EngineFigures("long-queue", "busy", sequences=0, tokens=0),  # the planner knows that its node has a long queue
                EngineFigures("short-queue", "idle", "10.0.0.3:8000", sequences=1, tokens=50),
            ]
            generating = [
                EngineFigures("d0", "idle", hbm_tokens=10_000, sequences=3, tokens=0, free_hbm_tokens=10_000),
                EngineFigures("d1", "busy", hbm_tokens=10_000, sequences=1, tokens=40, free_hbm_tokens=10_000),
            ]
            assert prefill.report(computing).first_report
            assert decode.report(generating).first_report
            requests = [EngineRequest(f"r{number}", 60, 30, 100) for number in range(4)]
            async with client_of(server.address) as routers:
                calls = []
                for number, request in enumerate(requests):
                    calls.append(asyncio.create_task(routers.assign(request, 60)))
                    await wait_until_async(lambda count=number + 1: _waiting(nodes[0], count))  # type: ignore[misc]
                # C2 first: the only one with a short queue, until it has more than beta; then C3, until that has too
                assert [(one.request_id, one.engine) for one in prefill.report(computing).assigned] == [
                    ("r0", "short-queue"),
                    ("r1", "long-queue"),
                    ("r2", "long-queue"),
                ]
                # Z = 1.05 x (240 + 40) / 2 = 147: fewest sequences of those that stay below it, then fewest tokens
                told = decode.report(generating).assigned
                assert [(one.request_id, one.engine) for one in told] == [("r0", "d1"), ("r1", "d0"), ("r2", "d0"), ("r3", "d1")]
                answers = await asyncio.gather(*calls[:3])
                assert [(one.prefill.engine, one.decode.engine) for one in answers] == [
                    ("short-queue", "d1"),
                    ("long-queue", "d0"),
                    ("long-queue", "d0"),
                ]
                assert answers[0].prefill.address == "10.0.0.3:8000"
                computing[1] = EngineFigures("long-queue", "busy", sequences=2, tokens=120)
                computing[2] = EngineFigures("short-queue", "idle", "10.0.0.3:8000", sequences=2, tokens=110)
                assert [one.decode and one.decode.node for one in prefill.report(computing).assigned] == ["busy", "idle", "idle"]
                # completed reads leave the queue
                finished = pb.LoadReport(plan_id=plan.plan_id, finished=True)
                await call_aio(nodes[0].stub.ReportLoads, pb.ReportLoadsRequest(loads=[finished]), TIMEOUT_S)
                computing[1] = EngineFigures("long-queue", "busy", sequences=0, tokens=0)
                (last,) = prefill.report(computing, prefilled=[one.generation for one in answers]).assigned
                assert (last.request_id, last.engine) == ("r3", "long-queue")
                assert (await calls[3]).generation == last.generation
                decode.report(generating, finished=[last.generation, *(one.generation for one in answers)])
                assert (await nodes[0].counters())["metadata_scheduler_requests"] == 0
                with pytest.raises(NotFound):
                    await routers.assign(requests[0], 1)


async def _waiting(peer: Peer, count: int) -> bool:
    return (await peer.counters())["metadata_scheduler_waiting_prefill"] == count


async def test_assign_again_returns_replacement_engines(tmp_path: Path) -> None:
    with server_process(tmp_path, ttl_ms=TTL_MS, engine_ttl_ms=TTL_MS) as server:
        async with client_of(server.address) as client:
            prefill, first = Engines(client, "P", "prefill"), Engines(client, "D", "decode", ends=False)
            request = EngineRequest("r", 1_000)
            answer = await client.assign(request, 20)
            assert answer.decode.group == "D"
            second = Engines(client, "E", "decode", ends=False)
            waits = asyncio.create_task(client.reassign(request, answer, 20))
            with pytest.raises(DeadlineExceeded):
                await client.reassign(request, answer, 0.05)  # all is well
            await first.die()
            again = await waits
            assert again.decode.group == "E"
            assert again.generation > answer.generation
            assert again == await client.assign(request, 20)
            assert await client.cancel(request)
            assert not await client.cancel(request)
            with pytest.raises(NotFound):
                await client.reassign(request, again, 20)
            for engines in (prefill, second):
                await engines.die()
        assert "reason=silent for" in server.log()


async def test_server_restart_waiting_calls_continue(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with client_of(server.address) as client:
            running, waiting = EngineRequest("running", 1_000), EngineRequest("waiting", 1_000)
            groups = [Engines(client, "P", "prefill", ends=False), Engines(client, "D", "decode", ends=False)]
            answer = await client.assign(running, 20)
            await groups[0].die()
            waits = asyncio.create_task(client.assign(waiting, 30))
            async with connect_aio(server.address) as channel:
                await wait_until_async(lambda: _waiting(Peer(channel), 1))
            server.stop(signal.SIGKILL)
            server.start()
            groups.append(Engines(client, "Q", "prefill", ends=False))
            assert (await waits).prefill.group == "Q"
            with pytest.raises(NotFound):
                await client.reassign(running, answer, 20)
            anew = await client.assign(running, 20)
            assert anew.generation != answer.generation
            assert len(groups[1].news) == 2  # it joined again after the restart
            for engines in groups:
                await engines.die()


async def test_many_requests_are_served_once_each(tmp_path: Path) -> None:
    with server_process(tmp_path, max_requests=500) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            budget = {"prompt_tokens": 1, "budget_ms": 2_000}
            calls = [
                call_aio(
                    peer.stub.AssignRequest,
                    pb.AssignRequestRequest(operation_id=secrets.token_bytes(16), request_id=f"x{number}", **budget),
                    TIMEOUT_S,
                )
                for number in range(3_000)
            ]
            together = asyncio.gather(*calls, return_exceptions=True)
            await peer.register()
            assert not (await peer.beat()).register_again  # nodes are not rejected
            ended = Counter(type(error) for error in await together)
            # those that the library itself turns away before they are looked at are Unavailable
            assert sum(ended.values()) == len(calls)
            assert set(ended) <= {CapacityExceeded, DeadlineExceeded, Unavailable}
            assert ended[DeadlineExceeded] >= 500
            assert ended[CapacityExceeded] >= 500
            assert (await peer.counters())["metadata_scheduler_requests"] == 0
        async with client_of(server.address) as client:
            groups = [Engines(client, group, role) for group, role in (("P", "prefill"), ("D", "decode"), ("E", "decode"))]  # type: ignore[arg-type]
            requests = [EngineRequest(f"r{number}", 100) for number in range(2_000)]
            answers = await asyncio.gather(*(client.assign(request, 60) for request in requests))
            assert len({one.generation for one in answers}) == len(requests)

            async def all_served() -> bool:
                return len(groups[1].served) + len(groups[2].served) >= len(requests)

            await wait_until_async(all_served)
            assert sorted(groups[1].served + groups[2].served) == sorted(request.request_id for request in requests)
            for engines in groups:
                await engines.die()


async def test_router_cancelled_call_cancels_request(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel, client_of(server.address) as client:
            peer = Peer(channel)
            waits = asyncio.create_task(client.assign(EngineRequest("r", 10), 600))
            await wait_until_async(lambda: _waiting(peer, 1))
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            await wait_until_async(lambda: _waiting(peer, 0))


@pytest.mark.parametrize("lost", [DeadlineExceeded, Unavailable])
async def test_assign_lost_answer_frees_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: type[KVStoreError]
) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel, client_of(server.address) as client:
            groups = [Engines(client, "P", "prefill", ends=False), Engines(client, "D", "decode", ends=False)]
            peer = Peer(channel)

            async def too_late(method: Any, request: Any, timeout_s: float) -> Any:
                answer = await call_aio(method, request, timeout_s)
                if isinstance(request, pb.AssignRequestRequest):
                    raise lost("the answer came a moment after, or the connection ended")
                return answer

            monkeypatch.setattr("kvclient.scheduling.client.call_aio", too_late)
            with pytest.raises(lost):
                await client.assign(EngineRequest("r", 10), 1.0)

            async def nothing_left() -> bool:
                return (await peer.counters())["metadata_scheduler_requests"] == 0

            await wait_until_async(nothing_left)
            with SchedulerClient(server.address) as other:

                def late(method: Any, request: Any, timeout_s: float) -> Any:
                    answer = call(method, request, timeout_s)
                    if isinstance(request, pb.AssignRequestRequest):
                        raise lost("the answer came a moment after, or the connection ended")
                    return answer

                monkeypatch.setattr("kvclient.scheduling.client.call", late)
                with pytest.raises(lost):
                    await asyncio.to_thread(other.assign, EngineRequest("s", 10), 1.0)
                await wait_until_async(nothing_left)
            for engines in groups:
                await engines.die()


async def test_cancel_reaches_hung_server_later(tmp_path: Path) -> None:
    """The request has engines by then, and neither a deadline nor the end of a call would free them."""
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel, client_of(server.address) as client:
            groups = [Engines(client, "P", "prefill", ends=False), Engines(client, "D", "decode", ends=False)]
            request = EngineRequest("r", 10)
            await client.assign(request, 30)
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(DeadlineExceeded):  # the client then cancels the request in the background
                    await client.assign(request, 0.2)
                await asyncio.sleep(1.5)  # longer than one attempt waits
            finally:
                server.process.send_signal(signal.SIGCONT)
            peer = Peer(channel)

            async def cancelled() -> bool:
                return (await peer.counters()).get("metadata_requests_cancelled_total") == 1

            await wait_until_async(cancelled)
            for engines in groups:
                await engines.die()


async def test_cancel_beyond_the_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.scheduling.client.MAX_CANCELLATIONS", 0)
    counters = Counters()
    with SchedulerClient("127.0.0.1:1", counters=counters) as client, pytest.raises(KVStoreError):
        client.assign(EngineRequest("r", 10), 0.05)
    assert counters.get("client_cancellations_failed_total") == 1
    async with AsyncSchedulerClient("127.0.0.1:1", counters=counters) as other:
        with pytest.raises(KVStoreError):
            await other.assign(EngineRequest("s", 10), 0.05)
    assert counters.get("client_cancellations_failed_total") == 2


async def test_engines_probe_repeats_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server remembers ended operations, so new ids would replace those of requests."""
    seen: list[pb.CancelRequestRequest] = []

    async def answered(method: Any, request: pb.CancelRequestRequest, timeout_s: float) -> pb.CancelRequestResponse:
        seen.append(request)
        return pb.CancelRequestResponse(engines=3)

    monkeypatch.setattr("kvclient.scheduling.client.call_aio", answered)
    async with client_of("127.0.0.1:1") as client:
        assert [await client.engines() for _ in range(3)] == [3, 3, 3]
    assert [one == seen[0] for one in seen] == [True] * 3


def test_scheduler_calls_have_deadlines_and_typed_errors(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, SchedulerClient(server.address) as client:
        leader, twin = client.leader("P", "prefill"), client.leader("P", "prefill")
        leader.report([EngineFigures("p", "n")])
        assert twin.report([EngineFigures("p", "n")]).first_report
        with pytest.raises(Conflict):
            leader.report([EngineFigures("p", "n")])
        with pytest.raises(DeadlineExceeded):
            client.assign(EngineRequest("r", 10), 0.2)
        with pytest.raises(InvalidArgument):
            client.assign(EngineRequest("r\n", 10), 1)
        with pytest.raises(InvalidArgument):
            client.leader("P", "storage")  # type: ignore[arg-type]
        for wrong in ({"prompt_tokens": 0}, {"prompt_tokens": 2**32}, {"prompt_tokens": 1, "hit_tokens": 2}):
            with pytest.raises(InvalidArgument):
                EngineRequest("r", **wrong)  # type: ignore[arg-type]
        twin.leave()
        assert twin.report([EngineFigures("p", "n")]).first_report
        server.stop(signal.SIGKILL)
        refused: list[type[KVStoreError]] = []
        for _ in range(4):  # the last one is not sent at all
            with pytest.raises(Unavailable) as caught:
                twin.report([], finished=[])
            refused.append(type(caught.value))
        assert "calls fail for a moment" in str(caught.value)
