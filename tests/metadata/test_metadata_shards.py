"""Findings about a shared index appear and end at real Valkey servers, and the table of metadata servers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc.aio
import pytest
from metadata_harness import Peer
from monitored import alerts, scraped, selectors, targets

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import BootTimeClock, ManualClock
from kvstore.core.errors import Unavailable
from kvstore.core.index_backend import MetadataServerRecord
from kvstore.core.types import BootId, NodeId
from kvstore.embedded.valkey import ValkeyServer, ValkeyServers, find_server
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import SMALL_SLOT
from kvstore.index.valkey.servers import watch
from kvstore.metadata.indexing.index_mutations import forget_node, register_node
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.server_table import FORGET_S, SeenServers
from kvstore.metadata.roles.roles import LeasedRoles
from kvstore.metadata.server import MetadataServer
from kvstore.observe.counters import Counters
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.errors import USE_ANOTHER_SERVER
from support.wait import wait_until, wait_until_async

TIMEOUT_S = 10.0
TTL_S = 2.5
pytestmark = pytest.mark.skipif(find_server() is None, reason="NO VALKEY HERE: THE SHARED INDEX IS NOT TESTED")


class Asked:
    """A metadata server as an operator sees it."""

    def __init__(self, server: MetadataServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self._stub = MetadataAdminStub(channel)

    async def shards(self) -> pb.DescribeShardsResponse:
        return await call_aio(self._stub.DescribeShards, pb.DescribeShardsRequest(), TIMEOUT_S)

    async def findings(self) -> dict[str, str]:
        """The facts of the findings by code, without those that a store without nodes always has."""
        found = await call_aio(self._stub.DescribeServer, pb.DescribeServerRequest(), TIMEOUT_S)
        codes = {one.code for one in found.findings} - {"NO_NODES"}
        return {code: " ".join(one.facts for one in found.findings if one.code == code) for code in codes}

    async def until(self, code: str, *, present: bool = True, names: str = "") -> str:
        """Wait until a finding that names something is present or absent. Returns its facts."""
        facts = ""

        async def seen() -> bool:
            nonlocal facts
            found = await self.findings()
            facts = found.get(code, "")
            return (code in found and names in facts) == present

        await wait_until_async(seen, f"{code} present: {present}")
        return facts


@asynccontextmanager
async def metadata_server(folder: Path, seeds: tuple[str, ...] = ()) -> AsyncIterator[Asked]:
    config = MetadataConfig(
        index_path=folder / "index",
        listen="127.0.0.1:0",
        engine=f"valkey://{','.join(seeds)}" if seeds else "lmdb",
        lookup_shard_ms=1_000,
        metrics_listen="127.0.0.1:0",
    )
    server = MetadataServer(config)
    async with connect_aio(await server.start(), own_connection=True) as channel:
        yield Asked(server, channel)
    await server.stop(0.0)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the shards ten times as often."""
    monkeypatch.setattr(watch, "ROUND_S", watch.ROUND_S / 10)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    """Two shards: while one is stopped, no majority is left. The cluster promotes no replica, and the other shard is away."""
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=2, replicas=1) as cluster:
        yield cluster


@pytest.fixture
async def asked(tmp_path: Path, cluster: ValkeyServers) -> AsyncIterator[Asked]:
    async with metadata_server(tmp_path, cluster.seeds) as asked:

        async def observed() -> bool:
            found = (await asked.shards()).servers
            return len(found) == len(cluster.servers) and all(one.version and not one.HasField("away_ms") for one in found)

        await wait_until_async(observed, "all servers are observed")
        yield asked


def primary_without_small_state(cluster: ValkeyServers) -> ValkeyServer:
    """A primary whose loss leaves the metadata server able to read the small state."""
    return cluster.primaries[0 if SMALL_SLOT >= 8_192 else 1]


async def test_shards_described_with_roles_and_settings(asked: Asked, cluster: ValkeyServers) -> None:
    found = await asked.shards()
    assert [(one.shard, one.primary, one.slots, one.replicas) for one in found.servers] == [
        (0, True, 8_192, 1),
        (0, False, 0, 0),
        (1, True, 8_192, 1),
        (1, False, 0, 0),
    ]
    assert {one.address for one in found.servers} == set(cluster.seeds)
    primary, replica = found.servers[:2]
    assert (primary.eviction_policy, primary.limit_bytes, primary.snapshots, primary.append_only) == (
        "noeviction",
        0,
        False,
        False,
    )
    assert primary.used_bytes > 0
    assert primary.node_timeout_ms > 0
    assert not primary.HasField("lag_bytes")
    assert replica.HasField("lag_bytes")
    assert [one.answers_here for one in found.metadata_servers] == [True]
    await asked.until("ONE_METADATA_SERVER")
    assert await asked.findings() == {
        "ONE_METADATA_SERVER": "Only this metadata server serves the index, which several could share."
    }


async def test_stopped_primary_is_a_finding_until_it_answers(asked: Asked, cluster: ValkeyServers) -> None:
    stopped = primary_without_small_state(cluster)
    stopped.kill(signal.SIGSTOP)
    try:
        await asked.until("SHARD_AWAY", names=stopped.address)
    finally:
        stopped.kill(signal.SIGCONT)
    await asked.until("SHARD_AWAY", present=False)
    await asked.until("SHARD_WITHOUT_REPLICA", present=False)


async def test_server_starts_while_a_shard_is_away(tmp_path: Path) -> None:
    with ValkeyServers(tmp_path / "valkey", shards=3) as cluster:
        async with metadata_server(tmp_path / "first", cluster.seeds) as asked:
            await asked.shards()
        away = next(server for server in cluster.primaries if server.call("EXISTS", "{kv}meta") != 1)
        away.end()
        async with metadata_server(tmp_path / "second", cluster.seeds) as asked:
            assert away.address in await asked.until("SHARD_AWAY")
            cluster.restart(away)
            await asked.until("SHARD_AWAY", present=False)


async def test_small_state_away_heartbeats_are_refused(tmp_path: Path) -> None:
    """The other shards answer, but without this one no other server would learn of a heartbeat."""
    with ValkeyServers(tmp_path / "valkey", shards=3) as cluster:
        async with metadata_server(tmp_path / "server", cluster.seeds) as asked:
            node = Peer(asked.channel)
            await node.register()

            async def refused() -> bool:
                try:
                    await node.beat()
                except Unavailable as error:
                    return USE_ANOTHER_SERVER in error.fields
                return False

            async def accepted() -> bool:
                return not await refused()

            assert await accepted()
            small = next(server for server in cluster.primaries if server.call("EXISTS", "{kv}meta") == 1)
            small.kill(signal.SIGSTOP)
            await wait_until_async(refused, "nodes are sent to another server")
            small.kill(signal.SIGCONT)
            await wait_until_async(accepted, "heartbeats can be shared again")
            assert not (await node.beat()).register_again


async def test_stopped_replica_is_a_finding_until_it_answers(asked: Asked, cluster: ValkeyServers) -> None:
    cluster.replicas[0].kill(signal.SIGSTOP)
    try:
        assert "shard 0 has no replica that answers" in await asked.until("SHARD_WITHOUT_REPLICA")
    finally:
        cluster.replicas[0].kill(signal.SIGCONT)
    await asked.until("SHARD_WITHOUT_REPLICA", present=False)


async def test_slots_without_server_are_a_finding_until_assigned(asked: Asked, cluster: ValkeyServers) -> None:
    owner = primary_without_small_state(cluster)
    first = 0 if owner is cluster.primaries[0] else 8_192

    async def unserved() -> bool:
        for server in (owner, *cluster.servers):
            server.call("CLUSTER", "DELSLOTSRANGE", first, first + 99)
        return "SLOTS_WITHOUT_SERVER" in await asked.findings()

    await wait_until_async(unserved, "slots have no server")
    assert "100 of 16,384 hash slots" in await asked.until("SLOTS_WITHOUT_SERVER")
    owner.call("CLUSTER", "ADDSLOTSRANGE", first, first + 99)
    await asked.until("SLOTS_WITHOUT_SERVER", present=False)


@pytest.mark.parametrize(
    ("code", "setting", "bad", "good"),
    [
        ("SHARD_EVICTS_RECORDS", "maxmemory-policy", "allkeys-lru", "noeviction"),
        ("SHARD_PERSISTS", "save", "3600 1000000", ""),
        ("SHARD_PERSISTS", "appendonly", "yes", "no"),
        ("SHARD_MEMORY_NEARLY_FULL", "maxmemory", "nearly", "0"),
    ],
)
async def test_setting_is_a_finding_until_it_is_corrected(
    asked: Asked, cluster: ValkeyServers, code: str, setting: str, bad: str, good: str
) -> None:
    server = primary_without_small_state(cluster)
    used = next(one.used_bytes for one in (await asked.shards()).servers if one.address == server.address)
    server.call("CONFIG", "SET", setting, bad if bad != "nearly" else int(used * 1.05))
    try:
        assert server.address in await asked.until(code)
    finally:
        assert server.call("CONFIG", "SET", setting, good) == b"OK"
    await asked.until(code, present=False)


async def test_second_metadata_server_ends_the_finding(asked: Asked, cluster: ValkeyServers, tmp_path: Path) -> None:
    await asked.until("ONE_METADATA_SERVER")
    async with metadata_server(tmp_path / "second", cluster.seeds) as second:
        await asked.until("ONE_METADATA_SERVER", present=False)
        await second.until("ONE_METADATA_SERVER", present=False)
        found = (await second.shards()).metadata_servers
        assert len({one.server_id for one in found}) == len({one.address for one in found}) == 2
        assert sum(one.answers_here for one in found) == 1
        assert sorted(list(one.roles) for one in found) == [[], ["plan", "quota", "sweep"]]
    await asked.until("ONE_METADATA_SERVER")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ValkeyServers]:
    """A cluster of one server of Redis 7.0, which lacks the commands of compare-and-set."""
    program = find_server("redis-server")
    if program is None:
        pytest.skip("no redis-server here")
    with ValkeyServers(tmp_path / "redis", shards=1, program=program) as redis:
        yield redis


async def test_old_servers_are_an_information(tmp_path: Path, redis: ValkeyServers) -> None:
    async with metadata_server(tmp_path / "server", redis.seeds) as asked:
        assert "1 of 1 servers" in await asked.until("SHARD_WITHOUT_COMPARE_AND_SET")


async def test_server_of_another_version_is_a_finding_until_it_leaves(
    asked: Asked, cluster: ValkeyServers, redis: ValkeyServers
) -> None:
    (other,) = redis.servers
    other.call("CLUSTER", "FLUSHSLOTS")
    other_id, first = other.call("CLUSTER", "MYID"), cluster.servers[0]
    bus = next(node.split(b"@")[1].split(b",")[0].split()[0] for node in _nodes(first) if b"myself" in node)
    other.call("CLUSTER", "MEET", "127.0.0.1", first.port, int(bus))
    facts = await asked.until("SHARD_VERSIONS_DIFFER")
    assert "redis 7." in facts
    assert "valkey " in facts
    await asked.until("SHARD_WITHOUT_COMPARE_AND_SET")
    other.end()
    for server in cluster.servers:
        server.call("CLUSTER", "FORGET", other_id)
    await asked.until("SHARD_VERSIONS_DIFFER", present=False)
    await asked.until("SHARD_WITHOUT_COMPARE_AND_SET", present=False)


def _nodes(server: ValkeyServer) -> list[bytes]:
    nodes = server.call("CLUSTER", "NODES")
    assert isinstance(nodes, bytes)
    return nodes.splitlines()


async def test_row_of_dashboard_has_series_in_a_scrape(asked: Asked, cluster: ValkeyServers) -> None:
    for server in cluster.servers:
        server.call("CONFIG", "SET", "maxmemory", 64 << 20)
    try:
        rows = [one for row, _, target in targets() if row.startswith("Index in a Valkey") for one in selectors(target["expr"])]
        rules = [one for rule in alerts() for one in selectors(str(rule["expr"])) if one.name.startswith("kvstore_index_shard")]
        assert len(rows) > 10
        assert len(rules) == 4

        async def complete() -> bool:
            shown = await asyncio.to_thread(scraped, asked.server.metrics_address)
            return all(any(one.takes(series.name, series.labels) for series in shown) for one in (*rows, *rules))

        await wait_until_async(complete, "every panel and rule has series")
    finally:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "maxmemory", 0)


async def test_embedded_index_has_no_shards_and_no_findings(tmp_path: Path) -> None:
    async with metadata_server(tmp_path) as asked:
        found = await asked.shards()
        assert (list(found.servers), found.unserved_slots, len(found.metadata_servers)) == ([], 0, 1)
        assert await asked.findings() == {}


async def test_shard_rejecting_changes_hides_no_node(cluster: ValkeyServers) -> None:
    """No server can write heartbeats, but this one reads on. It has none of its own to write."""
    server = next(one for one in cluster.primaries if one is not primary_without_small_state(cluster))
    index, clock, counters = await ValkeyIndex.start(ValkeyAddress(cluster.seeds)), ManualClock(), Counters()
    nodes = NodeTable(index, clock, TTL_S, counters)
    await asyncio.to_thread(register_node, index, NodeInfo(node_id="n", boot_id=b"b" * 16))
    nodes.view()
    roles = LeasedRoles(index, BootTimeClock(), counters, lambda _role, _change: None, nodes.index_was_away)
    await roles.start("127.0.0.1:1")
    async with snapshots_failing(server):

        async def failed() -> bool:
            return "metadata_lease_failures_total" in counters.snapshot()

        await wait_until_async(failed)
        clock.advance(2 * TTL_S)
        await tick(nodes)
        assert nodes.is_alive(NodeId("n"))
    await roles.stop()
    await tick(nodes)
    clock.advance(2 * TTL_S)
    await tick(nodes)
    assert not nodes.is_alive(NodeId("n"))
    await asyncio.to_thread(forget_node, index, NodeId("n"), BootId(b"b" * 16))
    await index.close_async()


async def tick(nodes: NodeTable) -> None:
    """Call ``tick`` until this process's copy of the heartbeats is new enough: a busy machine reads it late."""

    async def ticked() -> bool:
        try:
            nodes.tick()
        except Unavailable:
            return False
        return True

    await wait_until_async(ticked)


@asynccontextmanager
async def snapshots_failing(server: ValkeyServer) -> AsyncIterator[None]:
    """Valkey rejects changes if it cannot write its snapshots: here, a folder has their name."""
    directory = server.call("CONFIG", "GET", "dir")
    assert isinstance(directory, list)
    blocked = Path(directory[1].decode()) / "dump.rdb"
    blocked.unlink(missing_ok=True)  # from the start of a replica
    blocked.mkdir()
    server.call("CONFIG", "SET", "save", "3600 1")
    await asyncio.to_thread(save_until, server, "err")
    try:
        yield
    finally:
        blocked.rmdir()
        await asyncio.to_thread(save_until, server, "ok")
        server.call("CONFIG", "SET", "save", "")
        blocked.unlink()


def save_until(server: ValkeyServer, status: str) -> None:
    server.call("BGSAVE")
    wait_until(lambda: f"rdb_last_bgsave_status:{status}\r".encode() in cast("bytes", server.call("INFO", "persistence")))


def record(server_id: str, counter: int) -> MetadataServerRecord:
    return MetadataServerRecord(server_id, f"{server_id}:7400", "1", 0.0, counter)


def test_seen_servers_are_those_whose_counters_move() -> None:
    servers = SeenServers(ttl_s=3.0)
    servers.read([record("a", 1), record("b", 7)], 100.0)
    servers.read([record("a", 2), record("b", 7)], 102.0)
    assert [one.server_id for one in servers.seen] == ["a", "b"]
    servers.read([record("a", 3), record("b", 7)], 104.0)
    assert [one.server_id for one in servers.seen] == ["a"]
    assert servers.ended == []
    servers.read([record("a", 4), record("b", 7)], 104.0 + FORGET_S)
    assert servers.ended == ["b"]
    servers.read([record("a", 5), record("b", 8)], 105.0 + FORGET_S)
    assert [one.server_id for one in servers.seen] == ["a", "b"]


def test_seen_servers_stay_over_an_outage_of_the_index() -> None:
    """While the index was away, no server could write its counter."""
    servers = SeenServers(ttl_s=3.0)
    servers.read([record("a", 1), record("b", 7)], 100.0)
    servers.failed()
    servers.read([record("a", 1), record("b", 7)], 200.0)
    assert [one.server_id for one in servers.seen] == ["a", "b"]
    servers.read([record("a", 2), record("b", 7)], 204.0)
    assert [one.server_id for one in servers.seen] == ["a"]
