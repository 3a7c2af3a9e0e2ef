"""Tests of roles with real processes: two metadata servers over one index in Valkey, which are killed and stopped."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
from metadata_harness import TIMEOUT_S, Peer, ServerProcess, run_of, server_process

from kvclient import AsyncSchedulerClient, ClientOptions, EngineFigures, EngineRequest
from kvclient.scheduling.types import EngineRole
from kvproto.v1 import admin_pb2
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvstore.core.errors import Conflict, DeadlineExceeded, KVStoreError, NotFound, Unavailable
from kvstore.embedded.valkey import SLOTS, ValkeyServer, ValkeyServers, find_server
from kvstore.index.contract import ServerRole
from kvstore.index.valkey.keys import LEASES, SMALL_SLOT
from kvstore.rpc.client import call_aio, connect_aio
from samples import sample
from support.chains import chain
from support.wait import wait_until, wait_until_async

KEYS = chain("roles", 50)
TAKE_OVER_S = 4.0
"""Time from the loss of the planning server until another one plans."""
STOPPED_S = 10.0
TWO_OWNERS_S = 3.0
"""Time to live of a lease."""
QUOTA = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    if find_server() is None:
        pytest.skip("no valkey-server here")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1) as cluster:
        yield cluster


class Pair:
    """Two servers, a node at each, and channels to both. The first server holds all roles when the second one starts."""

    def __init__(self, owner: ServerProcess, other: ServerProcess) -> None:
        self.owner, self.other = owner, other
        self.channels = [connect_aio(server.address) for server in (owner, other)]
        self.at_owner, self.at_other = (Peer(channel, f"host-{number}") for number, channel in enumerate(self.channels))
        self.beats: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Register both nodes at both servers; each beats to one of them."""
        for peer in (self.at_owner, self.at_other):
            await peer.register()
            self.beats.append(asyncio.create_task(_beat(peer)))
        for peer in (self.at_owner, self.at_other):
            await wait_until_async(lambda peer=peer: _sees_nodes(peer, 2))  # type: ignore[misc]

    async def end(self) -> None:
        for task in self.beats:
            task.cancel()
        await asyncio.gather(*self.beats, return_exceptions=True)
        for channel in self.channels:
            await channel.close()

    def signal_owner(self, number: int) -> None:
        assert self.owner.process is not None
        os.kill(self.owner.process.pid, number)


async def _beat(peer: Peer) -> None:
    while True:
        with suppress(KVStoreError):
            await peer.beat()
        await asyncio.sleep(0.1)


async def _sees_nodes(peer: Peer, count: int) -> bool:
    nodes = (await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes
    return sum(node.alive for node in nodes) == count


@asynccontextmanager
async def two_servers(folder: Path, cluster: ValkeyServers) -> AsyncIterator[Pair]:
    """Two servers over an empty index."""
    for server in cluster.primaries:
        server.call("FLUSHALL")
    engine = f"valkey://{','.join(cluster.seeds)}"
    with ExitStack() as stack:
        servers = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            servers.append(stack.enter_context(server_process(folder / name, engine=engine)))
        pair = Pair(*servers)
        await pair.begin()
        try:
            yield pair
        finally:
            await pair.end()


@pytest.fixture
async def pair(tmp_path: Path, cluster: ValkeyServers) -> AsyncIterator[Pair]:
    async with two_servers(tmp_path, cluster) as pair:
        yield pair


def load_request() -> pb.PlanLoadRequest:
    return pb.PlanLoadRequest(
        operation_id=secrets.token_bytes(16),
        prefill_node="host-1",
        blocks=10,
        block_bytes=1_000,
        block_tokens=10,
        budget_ms=60_000,
    )


async def plan_at(peer: Peer, timeout_s: float = TIMEOUT_S) -> pb.LoadPlan:
    return await call_aio(peer.stub.PlanLoad, load_request(), timeout_s)


async def plans(peer: Peer) -> bool:
    with suppress(Unavailable, DeadlineExceeded):
        return bool((await plan_at(peer, 1.0)).plan_id)
    return False


async def report_at(peer: Peer, plan_id: int) -> list[int]:
    """Ids of the plans that the owner does not know."""
    request = pb.ReportLoadsRequest(loads=[pb.LoadReport(plan_id=plan_id, finished=True)])
    return list((await call_aio(peer.stub.ReportLoads, request, TIMEOUT_S)).forgotten)


async def test_plans_are_made_by_one_server_for_both(pair: Pair) -> None:
    made = [await plan_at(peer) for peer in (pair.at_owner, pair.at_other)]
    assert await report_at(pair.at_other, made[0].plan_id) == []
    assert await report_at(pair.at_owner, made[1].plan_id) == []
    counters = [await peer.counters() for peer in (pair.at_owner, pair.at_other)]
    assert [one.get("metadata_plans_total", 0) for one in counters] == [2, 0]
    assert [one.get("metadata_forwarded_calls_total", 0) for one in counters] == [0, 2]
    assert [one.get("metadata_roles_taken_plan_total", 0) for one in counters] == [1, 0]
    with pytest.raises(NotFound):
        await call_aio(pair.at_other.stub.ReplanLoad, pb.ReplanLoadRequest(plan_id=1), TIMEOUT_S)
    policy = admin_pb2.SetPathPolicyRequest(policy="round_robin")
    await call_aio(MetadataAdminStub(pair.channels[1]).SetPathPolicy, policy, TIMEOUT_S)
    for channel in pair.channels:
        stub = MetadataAdminStub(channel)

        async def follows(stub: MetadataAdminStub = stub) -> bool:
            described = await call_aio(stub.DescribePlanning, admin_pb2.DescribePlanningRequest(), TIMEOUT_S)
            return described.path_policy == "round_robin"

        await wait_until_async(follows)


async def test_owner_killed_other_server_plans(pair: Pair) -> None:
    await pair.at_other.publish(pair.at_other.nvme, run_of(KEYS), sync_end=True)
    before = await plan_at(pair.at_other)
    pair.signal_owner(signal.SIGKILL)
    began_s = asyncio.get_running_loop().time()
    assert await pair.at_other.hit(KEYS) == 50
    with pytest.raises(Unavailable):
        await plan_at(pair.at_other)
    await wait_until_async(lambda: plans(pair.at_other))
    took_s = asyncio.get_running_loop().time() - began_s
    print(f"another server plans after {took_s:.2f} s")
    assert took_s <= TAKE_OVER_S
    assert await report_at(pair.at_other, before.plan_id) == [before.plan_id]
    assert "role taken: plan" in pair.other.log()


async def test_owner_ended_frees_its_roles(pair: Pair) -> None:
    pair.signal_owner(signal.SIGTERM)
    await wait_until_async(lambda: plans(pair.at_other))
    wait_until(lambda: "role lost: plan" in pair.owner.log())
    for role in ("sweep", "quota", "plan"):
        wait_until(lambda role=role: f"role taken: {role}" in pair.other.log())  # type: ignore[misc]


async def test_owner_ended_while_valkey_hangs_ends_in_order(pair: Pair, cluster: ValkeyServers) -> None:
    """Its leases end by themselves: calls that free them must not use up the time of its stop."""
    for server in cluster.servers:
        server.kill(signal.SIGSTOP)
    try:
        await asyncio.sleep(1.2)  # a renewal is under way
        assert await asyncio.to_thread(pair.owner.stop) == 0
        assert "shutdown step timed out" not in pair.owner.log()
    finally:
        for server in cluster.servers:
            server.kill(signal.SIGCONT)


async def test_owner_stopped_answers_nothing_after_it_wakes(pair: Pair) -> None:
    await plan_at(pair.at_owner)
    request = pb.AssignRequestRequest(operation_id=secrets.token_bytes(16), request_id="r", prompt_tokens=10, budget_ms=60_000)
    waiting = asyncio.create_task(call_aio(pair.at_other.stub.AssignRequest, request, 60.0))
    await wait_until_async(lambda: _has_requests(pair.at_owner, 1))
    pair.signal_owner(signal.SIGSTOP)
    try:
        asked = [asyncio.create_task(plan_at(pair.at_owner, 60.0)) for _ in range(5)]
        with pytest.raises(Unavailable):  # it waited at the owner that is lost now
            await waiting
        await wait_until_async(lambda: plans(pair.at_other))
        await asyncio.sleep(STOPPED_S)
    finally:
        pair.signal_owner(signal.SIGCONT)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, (pb.LoadPlan, Unavailable)) for answer in answers)
    assert (await pair.at_owner.counters())["metadata_plans_total"] == 1, "calls to the former owner are answered by the new one"
    assert await plan_at(pair.at_owner)
    assert (await pair.at_owner.counters())["metadata_plans_total"] == 1
    assert await _has_requests(pair.at_owner, 0)
    wait_until(lambda: "role lost: plan" in pair.owner.log())


async def _has_requests(peer: Peer, count: int) -> bool:
    return (await peer.counters()).get("metadata_scheduler_requests", 0) == count


class Group:
    """An engine group that reports to one server, and records under which generations its engines got requests."""

    def __init__(self, client: AsyncSchedulerClient, name: str, role: EngineRole) -> None:
        self.client, self.name, self.role = client, name, role
        space = 1_000_000 if role == "decode" else 0
        self.figures = [EngineFigures(f"{name}-{number}", f"node-{name}", hbm_tokens=space) for number in range(2)]
        self.engines_of: dict[int, set[str]] = defaultdict(set)
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        leader = self.client.leader(self.name, self.role)
        done: list[int] = []
        while True:
            with suppress(Unavailable, DeadlineExceeded, Conflict):
                if self.role == "prefill":
                    news = await leader.report(self.figures, prefilled=done)
                else:
                    news = await leader.report(self.figures, finished=done)
                done = []
                for one in news.assigned:
                    if one.prefill is not None and one.decode is not None:
                        self.engines_of[one.generation].add(one.engine)
                        done.append(one.generation)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[AsyncSchedulerClient]:
    async with AsyncSchedulerClient(address, options=ClientOptions(breaker_pause_s=0.05)) as client:
        yield client


async def test_scheduling_goes_on_with_another_owner(pair: Pair) -> None:
    """Routers and engines at either server; the owner is killed under load."""
    both = f"{pair.owner.address},{pair.other.address}"
    async with client_of(pair.owner.address) as first, client_of(pair.other.address) as second, client_of(both) as third:
        groups = [Group(third, "P", "prefill"), Group(second, "D", "decode")]
        assigned: list[str] = []
        for client, name in ((first, "a"), (second, "b")):
            answer = await client.assign(EngineRequest(name, 60, 30, 100), 30.0)
            assigned.append(answer.prefill.engine)
        assert set(assigned) <= {"P-0", "P-1"}

        async def route(name: str) -> None:
            while True:
                with suppress(Unavailable, DeadlineExceeded, NotFound, Conflict):
                    await second.assign(EngineRequest(name, 60, 30, 100), 5.0)
                    return
                await asyncio.sleep(0.05)

        requests = [asyncio.create_task(route(f"r{number}")) for number in range(100)]
        pair.signal_owner(signal.SIGKILL)
        requests += [asyncio.create_task(route(f"s{number}")) for number in range(100)]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*requests)
        for group in groups:
            group.task.cancel()
            await asyncio.gather(group.task, return_exceptions=True)
            assert group.engines_of
            assert all(len(engines) == 1 for engines in group.engines_of.values())


async def set_quota(channels: Sequence[grpc.aio.Channel], nbytes: int) -> None:
    """Set the quota of a tenant. The servers share it, so the second order changes nothing."""
    quota = admin_pb2.TenantQuota(nvme_bytes=nbytes)
    for channel in channels:
        order = admin_pb2.SetTenantQuotaRequest(operation_id=secrets.token_bytes(16), tenant="t", quota=quota)
        await call_aio(MetadataAdminStub(channel).SetTenantQuota, order, TIMEOUT_S)


async def test_quota_shares_maker_killed_stay_within_quota(pair: Pair) -> None:
    await set_quota(pair.channels, QUOTA)
    shares: dict[str, int] = {}

    async def beat(*peers: Peer) -> int:
        """Let nodes beat; returns the sum of the shares that they have then."""
        for peer in peers:
            answer = await peer.beat()
            if answer.HasField("retention"):  # else the node keeps its last share
                for share in answer.retention.shares:
                    shares[peer.node_id] = share.nvme_bytes
        return sum(shares.values())

    async def have_shares() -> bool:
        return 0 < await beat(pair.at_owner, pair.at_other) <= QUOTA and len(shares) == 2

    await wait_until_async(have_shares)
    assert (await pair.at_other.counters()).get("metadata_roles_taken_quota_total", 0) == 0, "it hands out what the holder made"
    pair.signal_owner(signal.SIGKILL)
    moved = Peer(pair.channels[1], pair.at_owner.node_id)
    moved.boot_id = pair.at_owner.boot_id
    while "role taken: quota" not in pair.other.log():
        assert 0 < await beat(moved, pair.at_other) <= QUOTA
        await asyncio.sleep(0.05)
    await set_quota(pair.channels[1:], QUOTA // 2)

    async def share_half() -> bool:
        nbytes = await beat(moved, pair.at_other)
        assert 0 < nbytes <= QUOTA
        return nbytes <= QUOTA // 2

    await wait_until_async(share_half)
    for _ in range(10):
        assert await share_half()
        await asyncio.sleep(0.1)


async def test_leases_lost_by_valkey_one_owner_again(pair: Pair, cluster: ValkeyServers) -> None:
    """A promoted replica lacks the leases, so another server takes the roles while the former one still counts on them."""
    await set_quota(pair.channels, QUOTA)
    peers = (pair.at_owner, pair.at_other)
    shares: dict[str, int] = {}

    async def beat() -> None:
        for peer in peers:
            answer = await peer.beat()
            if answer.HasField("retention"):
                for share in answer.retention.shares:
                    shares[peer.node_id] = share.nvme_bytes
        assert sum(shares.values()) <= QUOTA

    async def have_shares() -> bool:
        await beat()
        return len(shares) == 2

    async def changes() -> list[tuple[int, int]]:
        """Roles taken and lost, by server."""
        found = [await peer.counters() for peer in peers]
        return [
            tuple(sum(one.get(f"metadata_roles_{what}_{role}_total", 0) for role in ServerRole) for what in ("taken", "lost"))  # type: ignore[misc]
            for one in found
        ]

    await wait_until_async(have_shares)
    clock_s = asyncio.get_running_loop().time
    for turn in range(sample(3, of=20)):
        before = await changes()
        while (found := await changes()) == before:  # the former owner renews its leases once per second
            cluster.primaries[0].call("DEL", *LEASES.values())
            await beat()
        taken_s = clock_s()
        planned = [await plans(peer) for peer in peers]
        while [taken - lost for taken, lost in found].count(0) == 0:
            await beat()
            found = await changes()
        print(f"turn {turn}: two owners for {clock_s() - taken_s:.2f} s, servers that planned then: {sum(planned)}")
        assert clock_s() - taken_s < TWO_OWNERS_S
        await wait_until_async(lambda: _has_all(changes))
        for peer in peers:
            await wait_until_async(lambda peer=peer: plans(peer))  # type: ignore[misc]
        await beat()


async def _has_all(changes: Callable[[], Awaitable[list[tuple[int, int]]]]) -> bool:
    """Whether one server holds all roles."""
    return sorted(taken - lost for taken, lost in await changes()) == [0, len(ServerRole)]


async def test_valkey_primary_killed_planning_goes_on(tmp_path: Path) -> None:
    """The shard that keeps the leases fails over to its replica."""
    if find_server() is None:
        pytest.skip("no valkey-server here")
    with ValkeyServers(tmp_path / "valkey", shards=3, replicas=1) as cluster:
        async with two_servers(tmp_path, cluster) as pair:
            await wait_until_async(lambda: plans(pair.at_other))
            shard = SMALL_SLOT * len(cluster.primaries) // SLOTS
            cluster.primaries[shard].kill()
            wait_until(lambda: any(_is_primary(server) for server in cluster.replicas))
            for peer in (pair.at_owner, pair.at_other):
                await wait_until_async(lambda peer=peer: plans(peer))  # type: ignore[misc]
            made = [(await peer.counters()).get("metadata_plans_total", 0) for peer in (pair.at_owner, pair.at_other)]
            assert sum(made) >= 3
            # a lease that was lost in the failover can still change the owner
            await wait_until_async(lambda: _is_planned_and_reported(pair))


async def _is_planned_and_reported(pair: Pair) -> bool:
    """Whether a plan of one server can be reported at the other."""
    try:
        return await report_at(pair.at_owner, (await plan_at(pair.at_other)).plan_id) == []
    except Unavailable:
        return False


def _is_primary(server: ValkeyServer) -> bool:
    """Whether a server is a primary now."""
    role = server.call("ROLE")
    assert isinstance(role, list)
    return role[0] == b"master"
