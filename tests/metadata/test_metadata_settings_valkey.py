"""Tests of operators' settings in a real Valkey: the suite, and servers that outlive Valkey or each other."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from metadata_harness import TIMEOUT_S
from settings_suite import SettingsSuite

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import Conflict, Unavailable
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import SETTINGS
from kvstore.metadata.retention.settings_store import FileSettings, SettingsStore
from kvstore.metadata.retention.shared_settings import SharedSettings
from kvstore.metadata.server import MetadataServer
from kvstore.observe.counters import Counters
from kvstore.rpc.client import RetryPolicy, call_aio, connect_aio
from support.wait import wait_until_async


@pytest.fixture(scope="module", params=["valkey-server", "redis-server"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    program = find_server(request.param)
    if program is None:
        pytest.skip(f"no {request.param} here")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1, replicas=1, program=program) as cluster:
        yield cluster


class TestValkeySettings(SettingsSuite):
    other_file = "other-host.json"

    @pytest.fixture(autouse=True)
    async def index(self, cluster: ValkeyServers) -> AsyncIterator[None]:
        cluster.primaries[0].call("FLUSHALL")
        self.opened = await ValkeyIndex.start(ValkeyAddress(cluster.seeds), lookup_budget_s=5.0)
        yield
        await self.opened.close_async()

    async def make(self, path: Path) -> SettingsStore:
        return SharedSettings(FileSettings(path), self.opened.shared_value(SETTINGS), Counters())


class Host:
    """A metadata server on a separate host."""

    def __init__(self, folder: Path, cluster: ValkeyServers) -> None:
        self.config = MetadataConfig(
            index_path=folder / "index", listen="127.0.0.1:0", engine=f"valkey://{','.join(cluster.seeds)}", lookup_shard_ms=1_000
        )
        self.server = MetadataServer(self.config)

    async def start(self) -> None:
        self.server = MetadataServer(self.config)
        self.address = await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0.0)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[MetadataAdminStub]:
        async with connect_aio(self.address) as channel:
            yield MetadataAdminStub(channel)

    async def set_quota(self, tenant: str, dram: int, expected: int | None = None) -> None:
        request = pb.SetTenantQuotaRequest(
            operation_id=bytes(16),
            tenant=tenant,
            quota=pb.TenantQuota(dram_bytes=dram),
            expected=None if expected is None else pb.TenantQuota(dram_bytes=expected),
        )
        async with self.admin() as stub:
            await call_aio(stub.SetTenantQuota, request, TIMEOUT_S, RetryPolicy(attempts=1))

    async def findings(self) -> set[tuple[str, str]]:
        async with self.admin() as stub:
            found = await call_aio(stub.DescribeServer, pb.DescribeServerRequest(), TIMEOUT_S)
        return {(one.code, one.subject) for one in found.findings}

    async def has(self, quotas: dict[str, int], policy: str = "split") -> None:
        """Wait until the server hands out these quotas and this path policy."""

        async def so() -> bool:
            async with self.admin() as stub:
                try:
                    found = await call_aio(stub.DescribeTenants, pb.DescribeTenantsRequest(), TIMEOUT_S)
                    plans = await call_aio(stub.DescribePlanning, pb.DescribePlanningRequest(), TIMEOUT_S)
                except Unavailable:
                    return False
            return ({one.tenant: one.quota.dram_bytes for one in found.tenants}, plans.path_policy) == (quotas, policy)

        await wait_until_async(so, poll_s=0.1)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ValkeyServers]:
    """A cluster that a test may end."""
    if find_server() is None:
        pytest.skip("no valkey-server or redis-server here")
    with ValkeyServers(tmp_path / "valkey", shards=1, replicas=1) as cluster:
        yield cluster


@pytest.fixture
async def hosts(own_cluster: ValkeyServers, tmp_path: Path) -> AsyncIterator[list[Host]]:
    hosts = [Host(tmp_path / name, own_cluster) for name in ("a", "b")]
    for host in hosts:
        await host.start()
    yield hosts
    for host in hosts:
        await host.stop()


async def test_orders_hold_over_servers_and_survive_all_but_one(own_cluster: ValkeyServers, hosts: list[Host]) -> None:
    first, second = hosts
    await first.set_quota("acme", 5)
    with pytest.raises(Conflict):
        await second.set_quota("acme", 7, expected=6)  # though its copy may lack the quota
    await second.set_quota("acme", 7, expected=5)
    with pytest.raises(Conflict):
        await first.set_quota("acme", 8, expected=5)
    async with second.admin() as stub:
        await call_aio(stub.SetPathPolicy, pb.SetPathPolicyRequest(policy="round_robin", expected="split"), TIMEOUT_S)
    for host in hosts:
        await host.has({"acme": 7}, "round_robin")

    await first.stop()
    shutil.rmtree(first.config.index_path.parent)  # the host is lost
    for server in own_cluster.servers:
        server.end()
    await second.has({"acme": 7}, "round_robin")
    with pytest.raises(Unavailable):
        await second.set_quota("acme", 9)
    await second.has({"acme": 7}, "round_robin")
    await asyncio.gather(*(asyncio.to_thread(own_cluster.restart, server) for server in own_cluster.servers))
    await wait_until_async(functools.partial(starts, first), "Valkey is back", poll_s=0.5)
    for host in hosts:
        await host.has({"acme": 7}, "round_robin")
    await first.set_quota("acme", 10, expected=7)
    await second.has({"acme": 10}, "round_robin")


async def test_copy_that_cannot_be_written_is_a_finding(hosts: list[Host]) -> None:
    config = hosts[0].config
    finding = "FILE_NOT_WRITTEN", str(config.settings_path)
    obstacle = config.settings_path.with_name(config.settings_path.name + ".lock")
    obstacle.unlink(missing_ok=True)
    obstacle.mkdir()
    await hosts[1].set_quota("acme", 5)

    async def present() -> bool:
        return finding in await hosts[0].findings()

    async def absent() -> bool:
        return not await present()

    await wait_until_async(present, poll_s=0.1)
    obstacle.rmdir()
    await wait_until_async(absent, poll_s=0.1)
    assert "acme" in config.settings_path.read_text()


async def starts(host: Host) -> bool:
    """Whether a server starts now."""
    try:
        await host.start()
    except Unavailable:
        return False
    return True


async def test_orders_reach_the_replica_before_they_are_acknowledged(own_cluster: ValkeyServers, hosts: list[Host]) -> None:
    await hosts[0].set_quota("acme", 5)
    (replica,) = own_cluster.replicas
    replica.call("CLUSTER", "FAILOVER", "TAKEOVER")
    own_cluster.primaries[0].end()
    await hosts[1].has({"acme": 5})
    await hosts[1].set_quota("acme", 6, expected=5)
