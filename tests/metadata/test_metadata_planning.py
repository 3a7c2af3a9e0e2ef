"""Tests of load plans over a real socket: idempotent, bounded, and only over live nodes."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metadata_harness import TIMEOUT_S, Peer, Running

from kvclient import ClientOptions
from kvclient.nodes import metadata_client as directory
from kvclient.nodes.connect import watch_servers
from kvclient.nodes.metadata_client import MetadataClient
from kvproto.v1 import admin_pb2
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.config.metadata import MetadataConfig
from kvstore.core import limits
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.dualpath.contract import LoadPlan
from kvstore.dualpath.planner import DEADLINE_GRACE_S, PATIENCE_S, PLAN_LIFE_S
from kvstore.dualpath.queues import QUEUE_S
from kvstore.metadata.scheduling import planner_service
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.server import MetadataServer
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.failover.addresses import MetadataAddresses
from support.wait import wait_until_async


class Host(Peer):
    """A node with a role."""

    def __init__(self, running: Running, node_id: str, *roles: str) -> None:
        super().__init__(running.channel, node_id)
        self.roles = roles or ("prefill",)

    def info(self) -> NodeInfo:
        info = super().info()
        del info.roles[:]
        info.roles.extend(self.roles)
        info.storage_bytes_per_s = info.compute_bytes_per_s = 10**9
        return info


async def hosts(running: Running) -> dict[str, Host]:
    made = {
        name: Host(running, name, role) for name, role in (("p", "prefill"), ("d", "decode"), ("r", "decode"), ("s", "storage"))
    }
    for host in made.values():
        await host.register()
    return made


def asked(blocks: int = 100, **more: Any) -> pb.PlanLoadRequest:
    fields: dict[str, Any] = {
        "operation_id": secrets.token_bytes(16), "prefill_node": "p", "decode_node": "d", "relays": True, "blocks": blocks,
        "block_bytes": 1 << 20, "block_tokens": 64, "policy": "split", **more,
    }  # fmt: skip
    return pb.PlanLoadRequest(**fields)


async def plan(peer: Peer, request: pb.PlanLoadRequest) -> pb.LoadPlan:
    return await call_aio(peer.stub.PlanLoad, request, TIMEOUT_S)


async def price(peer: Peer, request: pb.PlanLoadRequest) -> pb.LoadPrice:
    return await call_aio(peer.stub.PriceLoad, request, TIMEOUT_S)


async def report(peer: Peer, *loads: pb.LoadReport) -> list[int]:
    return list((await call_aio(peer.stub.ReportLoads, pb.ReportLoadsRequest(loads=loads), TIMEOUT_S)).forgotten)


async def replan(peer: Peer, plan_id: int, index: int, *arrived: tuple[int, int]) -> pb.LoadPlan:
    request = pb.ReplanLoadRequest(plan_id=plan_id, index=index, why="stalled")
    for start, count in arrived:
        request.arrived.add(start=start, count=count)
    return await call_aio(peer.stub.ReplanLoad, request, TIMEOUT_S)


def covered(answer: pb.LoadPlan) -> list[int]:
    return sorted(position for part in answer.parts for position in range(part.start, part.start + part.count))


async def pending(peer: Peer) -> int:
    """Pending blocks of all queues, as reported with a plan that reads nothing."""
    told = (await plan(peer, asked(policy="oracle"))).reason
    return round(sum(float(found) for found in re.findall(r"([0-9.]+) MB queued", told)) * 1e6 / (1 << 20))


async def test_plan_covers_each_block_once(running: Running) -> None:
    p = (await hosts(running))["p"]
    for policy in ("prefill_only", "round_robin", "shorter_queue", "split", ""):
        answer = await plan(p, asked(policy=policy))
        assert covered(answer) == list(range(100)), policy
        assert {part.node_id for part in answer.parts} <= {"p", "d", "r"}, "a storage node has no link to lend"
        assert answer.plan_id
        assert answer.predicted_seconds > 0
    answer = await plan(p, asked(relays=False))
    assert {part.node_id for part in answer.parts} == {"p", "d"}
    assert (await plan(p, asked(policy="oracle"))).parts == []


async def test_price_is_that_of_the_plan_and_changes_nothing(running: Running) -> None:
    p = (await hosts(running))["p"]
    for policy in ("prefill_only", "round_robin", "split"):
        quoted = [await price(p, asked(policy=policy)) for _ in range(3)]
        assert {one.seconds for one in quoted} == {quoted[0].seconds}
        assert 0 < quoted[0].first_seconds < quoted[0].seconds
        made = await plan(p, asked(policy=policy))
        assert made.predicted_seconds == pytest.approx(quoted[0].seconds), policy
        await report(p, pb.LoadReport(plan_id=made.plan_id, finished=True))
        assert await pending(p) == 0


async def test_price_grows_with_the_queue_of_other_loads(running: Running) -> None:
    p = (await hosts(running))["p"]
    idle = await price(p, asked(relays=False))
    other = await plan(p, asked(5000, relays=False))
    busy = await price(p, asked(relays=False))
    assert busy.first_seconds > idle.first_seconds + 1.0
    assert busy.seconds - busy.first_seconds == pytest.approx(idle.seconds - idle.first_seconds, rel=0.1)
    await report(p, pb.LoadReport(plan_id=other.plan_id, finished=True))
    assert (await price(p, asked(relays=False))).seconds == pytest.approx(idle.seconds)


async def test_price_of_nothing_and_of_no_node(running: Running) -> None:
    p = (await hosts(running))["p"]
    assert (await price(p, asked(0))).seconds == 0
    with pytest.raises(Unavailable):
        await price(p, asked(prefill_node="unknown", decode_node="", relays=False))
    with pytest.raises(InvalidArgument):
        await price(p, asked(prefill_node=""))


async def test_plan_without_live_nodes_is_unavailable(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PLAN_TIMEOUT_S", TIMEOUT_S)  # tolerate a busy machine
    await hosts(running)
    spec, clock = CacheSpec("m", 16, 1, 1 << 20), MonotonicClock()
    incidents = LimitedLog(logging.getLogger("kvclient"), 1.0, clock.now_s)
    liveness = watch_servers(None, incidents.counters)
    addresses = MetadataAddresses.parse(running.address)
    client = MetadataClient(addresses, spec, None, clock, ClientOptions(), incidents, liveness)
    try:
        made = await asyncio.to_thread(
            client.plan_load, "p", None, None, 8, spec.block_bytes, spec.block_tokens, TIMEOUT_S, relays=False
        )
        with pytest.raises(Unavailable, match="no node can read"):
            await asyncio.to_thread(client.replan_load, made, made.parts[0], (), "stalled", TIMEOUT_S)
    finally:
        client.close()
        liveness.close()


async def test_plan_retry_gets_same_plan(running: Running) -> None:
    p = (await hosts(running))["p"]
    request = asked()
    assert await plan(p, request) == await plan(p, request)
    request.budget_ms = 7  # there is less time left
    assert await plan(p, request) == await plan(p, request)
    assert (await p.counters())["metadata_plans_total"] == 1


async def test_plan_reused_operation_id_is_conflict(running: Running) -> None:
    p = (await hosts(running))["p"]
    request = asked()
    await plan(p, request)
    with pytest.raises(Conflict, match="another load"):
        await plan(p, asked(50, operation_id=request.operation_id))


@pytest.mark.parametrize(
    "wrong",
    [
        {"operation_id": b"short"},
        {"prefill_node": ""},
        {"prefill_node": "x" * 5000},
        {"decode_node": "a\nb"},
        {"policy": "best"},
        {"blocks": 4_000_000_000},
        {"block_bytes": 1 << 60},
        {"block_bytes": 0},
        {"block_tokens": 0},
    ],
)
async def test_malformed_requests_are_refused(running: Running, wrong: dict[str, Any]) -> None:
    p = (await hosts(running))["p"]
    with pytest.raises(InvalidArgument):
        await plan(p, asked(**wrong))
    assert covered(await plan(p, asked())) == list(range(100))


async def test_replan_covers_missing_blocks_only(running: Running) -> None:
    p = (await hosts(running))["p"]
    first = await plan(p, asked())
    part = next(part for part in first.parts if part.node_id == "d")
    again = await replan(p, first.plan_id, part.index, (part.start, 3))
    assert covered(again) == list(range(part.start + 3, part.start + part.count))
    assert (again.plan_id, again.attempt) == (first.plan_id, 1)
    assert "d" not in {one.node_id for one in again.parts}
    assert not {one.index for one in again.parts} & {one.index for one in first.parts}
    for wrong in ((part.index, ()), (99, ()), (again.parts[0].index, ((0, 1_000),)), (again.parts[0].index, ((part.start, 0),))):
        with pytest.raises(InvalidArgument):
            await replan(p, first.plan_id, wrong[0], *wrong[1])
    with pytest.raises(NotFound):
        await replan(p, first.plan_id + 1, 0)


async def test_replan_keeps_path_policy(running: Running) -> None:
    p = (await hosts(running))["p"]
    first = await plan(p, asked(policy="split"))
    await plan(p, asked(policy="oracle"))  # another client's plan reads nothing
    part = first.parts[-1]
    again = await replan(p, first.plan_id, part.index)
    assert covered(again) == list(range(part.start, part.start + part.count))
    assert again.policy == "split"


async def test_report_progress_shortens_queues(running: Running) -> None:
    p = (await hosts(running))["p"]
    answer = await plan(p, asked())
    assert await pending(p) == 100
    part = answer.parts[0]
    moved = pb.LoadReport(plan_id=answer.plan_id, parts=[pb.PartReport(index=part.index, blocks_done=5)])
    assert await report(p, moved, moved) == []
    assert await pending(p) == 95
    assert await report(p, pb.LoadReport(plan_id=answer.plan_id, finished=True)) == []
    assert await pending(p) == 0
    assert await report(p, moved) == [answer.plan_id]


async def test_report_invalid_part_keeps_other_reports(running: Running) -> None:
    p = (await hosts(running))["p"]
    one, two = await plan(p, asked()), await plan(p, asked())
    wrong = pb.LoadReport(plan_id=one.plan_id, parts=[pb.PartReport(index=77, blocks_done=5)])
    with pytest.raises(InvalidArgument):
        await report(p, wrong, pb.LoadReport(plan_id=two.plan_id, finished=True))
    assert await pending(p) == 100
    with pytest.raises(InvalidArgument):
        await report(p, *[pb.LoadReport(plan_id=1)] * 5_000)


async def test_plan_skips_dead_nodes_until_they_return(running: Running) -> None:
    made = await hosts(running)
    p = made["p"]

    async def readers() -> set[str]:
        return {part.node_id for part in (await plan(p, asked())).parts}

    async def without_d() -> bool:
        running.clock.advance(0.06)
        for name in ("p", "r", "s"):
            await made[name].beat()
        return await readers() <= {"p", "r"}

    async def with_d() -> bool:
        for host in made.values():
            await host.beat()
        return "d" in await readers()

    async def nobody() -> bool:
        running.clock.advance(0.06)
        try:
            await plan(p, asked())
        except Unavailable:
            return True
        return False

    for condition in (without_d, with_d, nobody):
        await wait_until_async(condition)


async def test_plan_of_silent_client_expires(running: Running) -> None:
    made = await hosts(running)
    p = made["p"]
    answer = await plan(p, asked())
    running.clock.advance(PLAN_LIFE_S + 1)

    async def forgotten() -> bool:
        for host in made.values():
            await host.beat()
        return await pending(p) == 0

    await wait_until_async(forgotten)
    assert await report(p, pb.LoadReport(plan_id=answer.plan_id, finished=True)) == [answer.plan_id]


async def test_plan_expires_at_its_deadline(running: Running) -> None:
    made = await hosts(running)
    p = made["p"]
    short, long = await plan(p, asked(budget_ms=50)), await plan(p, asked(budget_ms=600_000))
    moved = [pb.LoadReport(plan_id=one.plan_id, parts=[pb.PartReport(index=one.parts[0].index)]) for one in (short, long)]
    assert await report(p, *moved) == []  # must not extend the first one by a minute
    running.clock.advance(DEADLINE_GRACE_S + 0.1)

    async def forgotten() -> bool:
        for host in made.values():
            await host.beat()
        return await pending(p) == 100

    await wait_until_async(forgotten)
    assert await report(p, *moved) == [short.plan_id]


async def test_plan_node_left_during_planning_charges_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    p = (await hosts(running))["p"]
    first = await plan(p, asked())

    def gone(_planning: PlannerService, _plan: LoadPlan) -> pb.LoadPlan:
        raise NotFound("a node left while a load was planned over it")

    with monkeypatch.context() as patch:
        patch.setattr(PlannerService, "_message", gone)
        with pytest.raises(NotFound):
            await plan(p, asked())
        with pytest.raises(NotFound):
            await replan(p, first.plan_id, first.parts[0].index)
    assert await pending(p) == 0
    assert await report(p, pb.LoadReport(plan_id=first.plan_id, finished=True)) == [first.plan_id]


async def test_report_to_another_server_is_forgotten(running: Running, tmp_path: Path) -> None:
    p = (await hosts(running))["p"]
    old = [await plan(p, asked()) for _ in range(3)]
    config = MetadataConfig(index_path=tmp_path / "other", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    server = MetadataServer(config, clock=ManualClock())
    address = await server.start()
    async with connect_aio(address) as channel:
        anew = Running(server, running.clock, channel, address)
        fresh = (await hosts(anew))["p"]
        for _ in range(3):
            await plan(fresh, asked())
        assert await report(fresh, *(pb.LoadReport(plan_id=one.plan_id, finished=True) for one in old)) == [
            one.plan_id for one in old
        ]
        for one in old:
            with pytest.raises(NotFound):
                await replan(fresh, one.plan_id, one.parts[0].index)
    await server.stop(0.0)


async def test_report_describes_plan_to_another_server(running: Running, tmp_path: Path) -> None:
    p = (await hosts(running))["p"]
    request = asked()
    answer = await plan(p, request)
    config = MetadataConfig(index_path=tmp_path / "other", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    server = MetadataServer(config, clock=ManualClock())
    address = await server.start()
    async with connect_aio(address) as channel:
        fresh = (await hosts(Running(server, running.clock, channel, address)))["p"]
        described = pb.PlanInProgress(load=request, parts=answer.parts)
        moved = pb.LoadReport(plan_id=answer.plan_id, parts=[pb.PartReport(index=answer.parts[0].index, blocks_done=5)])
        assert await report(fresh, moved) == [answer.plan_id]
        moved.restored_plan.CopyFrom(described)
        assert await report(fresh, moved, moved) == []
        assert await pending(fresh) == 95

        async def rates() -> set[str]:
            return set(re.findall(r"queued at ([0-9]+) MB/s", (await plan(fresh, asked(policy="oracle"))).reason))

        assert await rates() == {"1000"}, "blocks read under the former planner say nothing about a link"
        moved.parts[0].blocks_done = 10
        assert await report(fresh, moved) == []
        assert len(await rates()) == 2, "blocks read since then do, even if the report repeats the description"
        with pytest.raises(NotFound):
            await replan(fresh, answer.plan_id, answer.parts[0].index)
        for wrong in ({"block_bytes": 0}, {"prefill_node": ""}, {"policy": "none"}, {"blocks": 50}):
            load = asked(**wrong)
            with pytest.raises(InvalidArgument):
                await report(fresh, pb.LoadReport(plan_id=5, restored_plan=pb.PlanInProgress(load=load, parts=answer.parts)))
        with pytest.raises(InvalidArgument, match=r"plan_id must be 1 to 2\*\*63-1"):
            await report(fresh, pb.LoadReport(plan_id=1 << 63, restored_plan=described))
        assert await report(fresh, pb.LoadReport(plan_id=answer.plan_id, finished=True)) == []
        assert await pending(fresh) == 0
    await server.stop(0.0)


async def test_restored_part_of_host_with_both_roles_stays(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    p = (await hosts(running))["p"]
    monkeypatch.delattr(PlannerService, "_relays")  # a search over all nodes, which no restored plan needs
    load, part = asked(decode_node="p"), pb.PlanPart(count=100, node_id="p")
    assert await report(p, pb.LoadReport(plan_id=5, restored_plan=pb.PlanInProgress(load=load, parts=[part]))) == []
    seen = await call_aio(MetadataAdminStub(running.channel).DescribePlanning, admin_pb2.DescribePlanningRequest(), TIMEOUT_S)
    [queue] = [queue for queue in seen.queues if queue.node_id == "p"]
    assert (queue.pending_bytes, queue.sending_bytes, queue.receiving_bytes) == (100 << 20, 0, 0)


async def test_report_on_unknown_part_of_restored_plan_is_ignored(running: Running) -> None:
    p = (await hosts(running))["p"]
    load, parts = (
        asked(),
        [pb.PlanPart(index=3, count=50, node_id="p"), pb.PlanPart(index=70, start=50, count=50, node_id="gone")],
    )
    moved = [pb.PartReport(index=index, blocks_done=10) for index in (3, 70, 4_000)]
    described = pb.LoadReport(plan_id=5, parts=moved, restored_plan=pb.PlanInProgress(load=load, parts=parts))
    assert await report(p, described, pb.LoadReport(plan_id=6)) == [6]
    assert await report(p, described) == []
    assert await pending(p) == 40


async def test_plan_ids_are_random(running: Running) -> None:
    p = (await hosts(running))["p"]
    made = [(await plan(p, asked())).plan_id for _ in range(20)]
    near = {plan_id + step for plan_id in made for step in (-2, -1, 1, 2)}
    assert near.isdisjoint(made)
    assert max(made) > 1 << 55
    assert set(await report(p, *(pb.LoadReport(plan_id=one, finished=True) for one in near))) == near
    assert await pending(p) == 2_000
    assert await report(p, *(pb.LoadReport(plan_id=one, finished=True) for one in made)) == []


async def test_replan_too_many_ranges_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    p = (await hosts(running))["p"]
    one = await plan(p, asked(65_536, policy="prefill_only", block_bytes=100))
    with pytest.raises(InvalidArgument, match="leave out the smallest"):
        await replan(p, one.plan_id, 0, *((at, 1) for at in range(0, 65_536, 2)))
    again = await replan(p, one.plan_id, 0, *((at, 1) for at in range(0, 2 * limits.MAX_REPLAN_RANGES, 2)))
    assert covered(again) == [*range(1, 2 * limits.MAX_REPLAN_RANGES, 2), *range(2 * limits.MAX_REPLAN_RANGES, 65_536)]
    monkeypatch.setattr(limits, "MAX_PLAN_PARTS", 2_000)
    largest = max(again.parts, key=lambda part: part.count)
    with pytest.raises(CapacityExceeded):
        await replan(p, one.plan_id, largest.index, *((at, 1) for at in range(largest.start, largest.start + 2_000, 2)))
    monkeypatch.setattr(limits, "MAX_PARTS_UNDER_WAY", 100)
    with pytest.raises(CapacityExceeded):
        await plan(p, asked())
    assert (await p.counters())["metadata_plans_refused_total"] == 2
    assert await report(p, pb.LoadReport(plan_id=one.plan_id, finished=True)) == []
    assert await pending(p) == 0


class TwoNodes:
    """The part of the node table that the planner uses, with counted reads."""

    def __init__(self) -> None:
        records = {
            name: NodeInfo(
                node_id=name,
                boot_id=bytes(16),
                control_address="h:1",
                roles=["prefill"],
                storage_bytes_per_s=10**9,
                compute_bytes_per_s=10**9,
            )
            for name in ("p", "d")
        }
        self.last_view = SimpleNamespace(nodes=records)
        self.updates = 0
        self.dead: set[str] = set()
        self.reads = 0

    def view(self) -> SimpleNamespace:
        return self.last_view

    def is_alive(self, node_id: str) -> bool:
        self.reads += 1
        return node_id not in self.dead

    def is_draining(self, node_id: str) -> bool:
        return False

    def read_bytes_per_s(self, node_id: str) -> int:
        return 0


def test_plan_reads_nodes_after_a_change_only() -> None:
    nodes = TwoNodes()
    service = PlannerService(nodes, "split", Counters(), ManualClock())  # type: ignore[arg-type]
    for _ in range(5):
        service.price(asked())
        assert {part.node_id for part in service.plan(asked()).parts} == {"p", "d"}
    assert nodes.reads == 2
    nodes.dead.add("d")
    nodes.updates += 1
    assert {part.node_id for part in service.plan(asked()).parts} == {"p"}
    service.clear()
    assert {part.node_id for part in service.plan(asked()).parts} == {"p"}


def test_clear_forgets_queues_of_silent_nodes() -> None:
    nodes, clock = TwoNodes(), ManualClock()
    service = PlannerService(nodes, "split", Counters(), clock)  # type: ignore[arg-type]
    assert {part.node_id for part in service.plan(asked()).parts} == {"p", "d"}
    nodes.dead.add("d")
    nodes.updates += 1
    service.expire()
    service.clear()
    nodes.dead.clear()
    nodes.updates += 1
    service.expire()
    assert [queued(service, node, clock) for node in ("p", "d")] == [0, 0]


def test_queue_of_removed_node_is_forgotten() -> None:
    nodes, clock = TwoNodes(), ManualClock()
    service = PlannerService(nodes, "split", Counters(), clock)  # type: ignore[arg-type]
    service.plan(asked())
    nodes.dead.add("d")
    nodes.updates += 1
    service.expire()
    assert queued(service, "d", clock) > 0, "the plan still reads there"
    del nodes.last_view.nodes["d"]
    nodes.updates += 1
    service.expire()
    assert service.planner.queues.nodes() == ["p"]


def queued(service: PlannerService, node: str, clock: ManualClock) -> int:
    state = service.planner.queues.state(node, clock.now_s())
    assert state is not None
    return state.pending_bytes


async def test_plan_tenant_leaves_space_for_others(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    p = (await hosts(running))["p"]
    monkeypatch.setattr(limits, "MAX_PARTS_UNDER_WAY", 40)
    monkeypatch.setattr(planner_service, "tenant", lambda: "confined")
    for _ in range(5):
        await plan(p, asked(policy="prefill_only"))
    with pytest.raises(CapacityExceeded, match="of this tenant"):
        await plan(p, asked(policy="prefill_only"))
    monkeypatch.setattr(planner_service, "tenant", lambda: None)
    assert covered(await plan(p, asked(policy="prefill_only"))) == list(range(100))


async def test_plan_stalled_leaves_queues(running: Running) -> None:
    made = await hosts(running)
    p = made["p"]
    dead = await plan(p, asked(60_000, budget_ms=600_000, policy="prefill_only"))
    assert await pending(p) == pytest.approx(QUEUE_S * 1e9 / (1 << 20), abs=1), "and never in it for longer than this"
    running.clock.advance(PATIENCE_S + 0.1)

    async def stalled() -> bool:
        for host in made.values():
            await host.beat()
        return await pending(p) == 0

    await wait_until_async(stalled)
    assert (await p.counters())["metadata_plans_stalled_total"] == 1
    moved = pb.LoadReport(plan_id=dead.plan_id, parts=[pb.PartReport(index=dead.parts[0].index, blocks_done=59_000)])
    assert await report(p, moved) == []
    assert await pending(p) == 1_000


async def test_plan_random_calls_keep_invariants(running: Running) -> None:
    dice = random.Random(11)
    p = (await hosts(running))["p"]
    plans = [await plan(p, asked(blocks=dice.randrange(50))) for _ in range(5)]
    refused = 0
    for _ in range(150):
        one = dice.choice(plans)
        plan_id = dice.choice((one.plan_id, one.plan_id + 1, 0, 2**64 - 1))
        index = dice.choice((0, 1, 5, 2**32 - 1))
        try:
            if dice.random() < 0.5:
                parts = [pb.PartReport(index=index, blocks_done=dice.choice((0, 1, 2**32 - 1)))]
                await report(p, pb.LoadReport(plan_id=plan_id, parts=parts, finished=dice.random() < 0.1))
            else:
                await replan(p, plan_id, index, (dice.randrange(60), dice.randrange(60)))
        except (InvalidArgument, NotFound, Unavailable):
            refused += 1
    assert refused
    assert covered(await plan(p, asked())) == list(range(100))
