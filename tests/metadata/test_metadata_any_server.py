"""Two servers over one index in Valkey: each knows the registrations, orders and figures of the other one.

In most tests the servers do not poll the index, so they read each other's changes only because a caller named them.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from metadata_harness import NAMESPACE, TIMEOUT_S, Peer, run_of

from kvproto.v1 import admin_pb2
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvstore.config.metadata import MetadataConfig
from kvstore.core.checksum import digest_keys, key_range
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict, NotFound
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, VolumeId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import PrefixIndex
from kvstore.index.valkey import index as valkey_index
from kvstore.metadata.indexing import publish_stream
from kvstore.metadata.indexing.index_mutations import PublishOutcome, apply_batches
from kvstore.metadata.retention import tenants
from kvstore.metadata.server import MetadataServer
from kvstore.node.publish import batch_stream
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.observe.counters import Counters
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.codec import spec_to_proto
from kvstore.rpc.failover.connect import connect_metadata_aio
from kvstore.tiers.contract import VolumeUsage
from support.chains import chain
from support.wait import wait_until_async

KEYS = chain("any server", 40)
NEVER_S = 3_600.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    if find_server() is None:
        pytest.skip("no valkey-server here")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1) as cluster:
        yield cluster


class Pair:
    """Two servers, a channel to each, and node ``host-1`` as each of them sees it."""

    def __init__(self, servers: list[MetadataServer], addresses: list[str], channels: list[grpc.aio.Channel]) -> None:
        self.servers, self.addresses, self.channels = servers, addresses, channels
        self.one, self.two = (Peer(channel) for channel in channels)
        self.two.boot_id = self.one.boot_id
        self.admins = [MetadataAdminStub(channel) for channel in channels]


@asynccontextmanager
async def two_servers(folder: Path, cluster: ValkeyServers) -> AsyncIterator[Pair]:
    for server in cluster.primaries:
        server.call("FLUSHALL")
    async with AsyncExitStack() as stack:
        servers, addresses, channels = [], [], []
        for name in ("one", "two"):
            config = MetadataConfig(
                index_path=folder / name / "index",
                listen="127.0.0.1:0",
                engine=f"valkey://{','.join(cluster.seeds)}",
                heartbeat_interval_ms=500,
                node_ttl_ms=5_000,
            )
            (folder / name).mkdir()
            server = MetadataServer(config)
            addresses.append(await server.start())
            stack.push_async_callback(server.stop, 0.0)
            channels.append(await stack.enter_async_context(connect_aio(addresses[-1])))
            servers.append(server)
        yield Pair(servers, addresses, channels)


@pytest.fixture
async def pair(tmp_path: Path, cluster: ValkeyServers) -> AsyncIterator[Pair]:
    async with two_servers(tmp_path, cluster) as pair:
        yield pair


@pytest.fixture
async def unpolled(tmp_path: Path, cluster: ValkeyServers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Servers whose copies of the small state are never refreshed by time."""
    monkeypatch.setattr(valkey_index, "POLL_S", NEVER_S)
    async with two_servers(tmp_path, cluster) as pair:
        yield pair


# ---- nodes ----
async def test_node_registered_elsewhere_beats_here(unpolled: Pair) -> None:
    await unpolled.one.register()
    assert not (await unpolled.two.beat()).register_again
    unpolled.two.reboot()
    assert (await unpolled.two.beat()).register_again


async def test_node_registered_elsewhere_publishes_and_repairs_here(unpolled: Pair) -> None:
    await unpolled.one.register()
    await unpolled.two.publish(unpolled.two.nvme, run_of(KEYS), sync_end=True)
    assert await unpolled.two.hit(KEYS) == len(KEYS)
    unpolled.one.reboot()
    unpolled.two.boot_id = unpolled.one.boot_id
    await unpolled.one.register()
    digests, counts = [0] * DIGEST_RANGES, [0] * DIGEST_RANGES
    ranged: dict[int, list[BlockKey]] = {}
    for key in map(BlockKey, KEYS):
        ranged.setdefault(key_range(key), []).append(key)
    for number, keys in ranged.items():
        digests[number], counts[number] = digest_keys(sorted(keys)), len(keys)
    assert set(await unpolled.two.compare(unpolled.two.nvme, 0, digests, counts)) == set(ranged)
    number = key_range(BlockKey(KEYS[0]))
    added, removed = await unpolled.two.repair(unpolled.two.nvme, number, [run_of(KEYS, 0, 1)])
    assert (added, removed) == (1, 0)


async def test_node_id_taken_elsewhere_is_refused_here(unpolled: Pair) -> None:
    await unpolled.one.register()
    taken = unpolled.two.info()
    taken.boot_id, taken.control_address = secrets.token_bytes(16), "127.0.0.2:1"
    request = pb.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=taken)
    with pytest.raises(Conflict):
        await call_aio(unpolled.two.stub.RegisterNode, request, TIMEOUT_S)


async def test_node_registered_elsewhere_takes_orders_here(unpolled: Pair) -> None:
    await unpolled.one.register()
    order = pb.DrainNodeRequest(operation_id=secrets.token_bytes(16), node_id="host-1")
    status = (await call_aio(unpolled.two.stub.DrainNode, order, TIMEOUT_S)).status
    assert status.order.operation_id == order.operation_id
    removal = pb.RemoveNodeRequest(operation_id=secrets.token_bytes(16), node_id="host-1", force=True)
    assert (await call_aio(unpolled.two.stub.RemoveNode, removal, TIMEOUT_S)).known
    with pytest.raises(Conflict):
        await unpolled.one.register()


async def test_drain_ordered_elsewhere_reaches_node_here(pair: Pair) -> None:
    await pair.one.register()
    order = pb.DrainNodeRequest(operation_id=secrets.token_bytes(16), node_id="host-1")
    await call_aio(pair.one.stub.DrainNode, order, TIMEOUT_S)

    async def ordered() -> bool:
        return (await pair.two.beat()).drain.operation_id == order.operation_id

    await wait_until_async(ordered)


async def test_stream_moves_to_other_server_and_back_without_gap(pair: Pair) -> None:
    """The first server acknowledges its last batches late, after the other one has acknowledged later batches."""
    await pair.one.register()
    node = pair.one
    await node.publish(node.nvme, run_of(KEYS, 0, 10), sync_end=True)
    pair.two.sequence = node.sequence
    late = [node.batch(node.nvme, [run_of(KEYS, 10, 20)]), node.batch(node.nvme, [run_of(KEYS, 20, 30)])]
    assert (await pair.two.send(*late))[-1] == late[-1].sequence
    pair.two.sequence = node.sequence
    await pair.two.publish(node.nvme, run_of(KEYS, 30, 40))
    assert (await node.send(*late))[-1] == late[-1].sequence
    node.sequence = pair.two.sequence
    message = node.batch(node.nvme, removed=[KEYS[-1]])
    assert (await node.send(message))[-1] == message.sequence
    for peer in (pair.one, pair.two):
        assert await peer.hit(KEYS) == len(KEYS) - 1
        assert (await peer.counters()).get("metadata_publish_gaps_total", 0) == 0


async def test_heartbeat_elsewhere_is_shown_here(pair: Pair) -> None:
    await pair.one.register()
    ahead = pb.HeartbeatRequest(
        node_id="host-1",
        boot_id=pair.one.boot_id,
        usages=[pb.VolumeUsage(volume_id=pair.one.nvme, used_bytes=77)],
        tenants=[pb.TenantUsage(tenant="acme", nvme_bytes=77)],
        unix_ms=round((time.time() + 60) * 1000),
    )
    await call_aio(pair.one.stub.Heartbeat, ahead, TIMEOUT_S)

    async def shown() -> bool:
        nodes = (await call_aio(pair.two.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes
        used = await call_aio(pair.admins[1].DescribeTenants, admin_pb2.DescribeTenantsRequest(), TIMEOUT_S)
        return (
            [one.used_bytes for status in nodes for one in status.usages] == [77]
            and 59_000 < nodes[0].clock_offset_ms < 61_000
            and [(one.tenant, one.nvme_bytes) for one in used.tenants if one.nvme_bytes] == [("acme", 77)]
        )

    await wait_until_async(shown)


# ---- namespaces ----
async def register_namespace(peer: Peer) -> bytes:
    spec = CacheSpec(model="m", block_tokens=16, layers=1, layer_block_bytes=64, tenant="acme")
    request = pb.RegisterNamespaceRequest(operation_id=secrets.token_bytes(16), spec=spec_to_proto(spec))
    return (await call_aio(peer.stub.RegisterNamespace, request, TIMEOUT_S)).namespace_id


async def test_namespace_registered_elsewhere_is_known_here(unpolled: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = await register_namespace(unpolled.one)
    monkeypatch.setattr(tenants, "tenant", lambda: "acme")
    assert await unpolled.two.hit(KEYS, namespace) == 0
    with pytest.raises(NotFound):
        await unpolled.two.hit(KEYS, b"unknown namespace"[:16])


# ---- figures ----
async def know_each_other(pair: Pair) -> bool:
    answers = [await call_aio(admin.DescribeShards, admin_pb2.DescribeShardsRequest(), TIMEOUT_S) for admin in pair.admins]
    return all(len(answer.metadata_servers) == 2 for answer in answers)


async def test_figures_are_those_of_all_servers(pair: Pair) -> None:
    namespace = await register_namespace(pair.one)
    await pair.one.register()
    await pair.one.publish(pair.one.nvme, run_of(KEYS, namespace=namespace), sync_end=True)
    await wait_until_async(lambda: know_each_other(pair))
    await wait_until_async(lambda: pair.two.hit(KEYS, namespace))
    before = await described(pair, namespace)
    for peer, count in ((pair.one, 3), (pair.two, 5)):
        for _ in range(count):
            assert await peer.hit(KEYS, namespace) == len(KEYS)
    for admin, peer in zip(pair.admins, (pair.one, pair.two), strict=True):
        answer = await call_aio(admin.DescribeNamespaces, admin_pb2.DescribeNamespacesRequest(), TIMEOUT_S)
        (found,) = answer.namespaces
        assert (found.lookups - before.lookups, found.hit_blocks - before.hit_blocks) == (8, 8 * len(KEYS))
        own = (await peer.counters())["metadata_lookups_total"]
        stats = await call_aio(peer.stub.GetStats, pb.GetStatsRequest(all_servers=True), TIMEOUT_S)
        assert own < stats.counters["metadata_lookups_total"] == found.lookups


async def described(pair: Pair, namespace: bytes) -> admin_pb2.NamespaceDescription:
    request = admin_pb2.DescribeNamespacesRequest(namespace_id=namespace)
    return (await call_aio(pair.admins[0].DescribeNamespaces, request, TIMEOUT_S)).namespaces[0]


async def test_events_and_orders_of_all_servers_are_listed(pair: Pair) -> None:
    await pair.one.register()
    await wait_until_async(lambda: know_each_other(pair))
    policy = admin_pb2.SetPathPolicyRequest(policy="round_robin")
    await call_aio(pair.admins[0].SetPathPolicy, policy, TIMEOUT_S)
    for admin in pair.admins:
        listed = await call_aio(admin.ListClusterEvents, admin_pb2.ListClusterEventsRequest(), TIMEOUT_S)
        kinds = [one.kind for one in listed.events]
        assert (kinds.count("metadata_started"), kinds.count("order")) == (2, 1)


# ---- plans ----
async def test_plans_go_straight_to_the_planning_server(pair: Pair) -> None:
    await pair.one.register()
    async with connect_metadata_aio(",".join(pair.addresses), caller="engine") as channel:
        stub = Peer(channel).stub
        made = set()
        for _ in range(20):
            plan = pb.PlanLoadRequest(
                operation_id=secrets.token_bytes(16),
                prefill_node="host-1",
                blocks=10,
                block_bytes=1_000,
                block_tokens=10,
                budget_ms=60_000,
            )
            made.add((await call_aio(stub.PlanLoad, plan, TIMEOUT_S)).plan_id)
    assert len(made) == 20
    counted = [await peer.counters() for peer in (pair.one, pair.two)]
    assert sum(one.get("metadata_forwarded_calls_total", 0) for one in counted) <= 1
    assert sorted(one.get("metadata_plans_total", 0) for one in counted) == [0, 20]


async def test_publisher_leaves_server_with_blocked_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers heartbeats all the time, and registrations of the node are repeated at the other one."""
    monkeypatch.setattr(batch_stream, "ACK_TIMEOUT_S", 0.5)
    released = threading.Event()
    indexes: list[PrefixIndex] = []

    def block_first_server(index: PrefixIndex, *more: Any) -> PublishOutcome:
        indexes.append(index)
        if index is indexes[0]:
            released.wait()
        return apply_batches(index, *more)

    monkeypatch.setattr(publish_stream, "apply_batches", block_first_server)
    counters, block = Counters(), SimpleNamespace(key=KEYS[0], parent=None, depth=0, namespace_id=NAMESPACE)
    dram = SimpleNamespace(volume_id=pair.one.dram, usage=lambda: VolumeUsage(0, 0, 0))
    publisher = IndexPublisher(
        ",".join(pair.addresses),
        pair.one.info(),
        cast("PublishedBlocks", SimpleNamespace(memory_volume=dram, node_volumes=[], held_by=lambda _: [block])),
        ReplicaChangeLog([VolumeId(pair.one.dram), VolumeId(pair.one.nvme)], counters, MonotonicClock()),
        counters,
        tls=None,
        anti_entropy_interval_s=NEVER_S,
    )
    publisher.start()

    async def found() -> bool:
        return await pair.two.hit(KEYS) == 1

    try:
        await wait_until_async(found)
    finally:
        released.set()
        await asyncio.to_thread(publisher.stop, TIMEOUT_S)
    assert counters.get("publish_interrupted_total") == 1
    assert len({id(index) for index in indexes}) == 2
