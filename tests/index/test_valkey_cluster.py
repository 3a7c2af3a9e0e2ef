"""Batches to a real cluster with replicas, while its servers are killed, stopped and moved."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import hiredis
import pytest

from kvstore.core.errors import Unauthenticated, Unavailable, Unsupported
from kvstore.embedded.children import start
from kvstore.embedded.valkey import ServerHost, ValkeyServer, ValkeyServers, find_server
from kvstore.index.valkey.address import Credentials, ValkeyAddress
from kvstore.index.valkey.cluster import UNANSWERED, Command, Lane, ValkeyClient
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.keys import RANGE_SLOTS, TAGS
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics

HEAL_S = 20.0


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=3, replicas=1) as servers:
        yield servers


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
async def cluster(servers: ValkeyServers, counters: Counters) -> AsyncIterator[ValkeyClient]:
    cluster = ValkeyClient(ValkeyAddress(servers.seeds), budget_s=2.0, count=counters.add)
    await cluster.start()
    yield cluster
    await cluster.close()


def sets(value: bytes) -> list[Command]:
    """One write per range."""
    return [(slot, pack("SET", tag, value)) for slot, tag in zip(RANGE_SLOTS, TAGS, strict=True)]


def gets() -> list[Command]:
    return [(slot, pack("GET", tag)) for slot, tag in zip(RANGE_SLOTS, TAGS, strict=True)]


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(HEAL_S):
        while not check():  # noqa: ASYNC110  # the state is another process's
            await asyncio.sleep(0.02)


def primary_of_first_range(cluster: ValkeyClient, servers: ValkeyServers) -> ValkeyServer:
    address = cluster.topology.shards[cluster.topology.of_slot[RANGE_SLOTS[0]]].primary
    return next(server for server in servers.servers if server.address == address)


def is_replica_of(server: ValkeyServer, primary: ValkeyServer) -> bool:
    role = server.call("ROLE")
    return isinstance(role, list) and role[0] == b"slave" and role[2] == primary.port


async def test_batch_reaches_all_shards_in_order(cluster: ValkeyClient) -> None:
    assert set(await cluster.run(sets(b"1"))) == {b"OK"}
    tag = TAGS[7]
    counting = [(RANGE_SLOTS[7], pack("APPEND", tag, str(number))) for number in range(5)]
    assert await cluster.run(counting) == [2, 3, 4, 5, 6]
    assert (await cluster.run(gets()))[7] == b"101234"
    assert await cluster.run([]) == []


async def test_primary_killed_others_answer_and_replica_takes_over(
    cluster: ValkeyClient, servers: ValkeyServers, counters: Counters
) -> None:
    await cluster.run(sets(b"1"))
    await cluster.run([(cluster_slot, pack("WAIT", 1, 1_000)) for cluster_slot in (0, 6_000, 12_000)], lane=Lane.WRITES)
    victim = primary_of_first_range(cluster, servers)
    shard = cluster.topology.of_slot[RANGE_SLOTS[0]]
    lost = [cluster.topology.of_slot[slot] == shard for slot in RANGE_SLOTS]
    victim.end()
    answers = await cluster.run(gets())
    assert {answer for answer, gone in zip(answers, lost, strict=True) if not gone} == {b"1"}
    assert {answer for answer, gone in zip(answers, lost, strict=True) if gone} <= {UNANSWERED}
    replies = await cluster.run_until(gets(), time.monotonic() + HEAL_S)
    assert set(replies) == {b"1"}, "the replica had all of it"
    assert cluster.topology.shards[cluster.topology.of_slot[RANGE_SLOTS[0]]].primary != victim.address
    assert counters.snapshot()[metadata_metrics.TOPOLOGY_CHANGES] >= 1
    assert cluster.away_since_s() == {}


async def test_primary_stopped_costs_one_budget(servers: ValkeyServers, counters: Counters) -> None:
    cluster = ValkeyClient(ValkeyAddress(servers.seeds), budget_s=0.2, count=counters.add)
    await cluster.start()
    try:
        await cluster.run_until(sets(b"1"), time.monotonic() + HEAL_S)
        victim = primary_of_first_range(cluster, servers)
        victim.kill(signal.SIGSTOP)
        answers = await cluster.run(gets())
        assert UNANSWERED in answers
        assert victim.address in cluster.away_since_s()
        waits = counters.snapshot()[metadata_metrics.SHARDS_AWAY]
        for _ in range(20):
            await cluster.run(gets()[:1])
        assert counters.snapshot()[metadata_metrics.SHARDS_AWAY] - waits <= 1, "batches do not wait for it again"
        victim.kill(signal.SIGCONT)
        await eventually(lambda: cluster.away_since_s() == {})
        assert UNANSWERED not in await cluster.run(gets(), budget_s=5.0)
    finally:
        victim.kill(signal.SIGCONT)
        await cluster.close()


async def test_promoted_replica_is_asked_without_a_pause(
    cluster: ValkeyClient, servers: ValkeyServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause between two probes is for servers that do not answer."""
    monkeypatch.setattr("kvstore.index.valkey.cluster.PROBE_S", 10 * HEAL_S)
    primary = primary_of_first_range(cluster, servers)
    (replica,) = (server for server in servers.servers if server.address != primary.address and is_replica_of(server, primary))
    assert replica.call("CLUSTER", "FAILOVER") == b"OK"

    def is_promoted() -> bool:
        shard = cluster.topology.shards[cluster.topology.of_slot[RANGE_SLOTS[0]]]
        return shard.primary == replica.address and cluster.away_since_s() == {}

    async with asyncio.timeout(HEAL_S):
        while not is_promoted():
            await cluster.run(gets())
            await asyncio.sleep(0.02)
    assert UNANSWERED not in await cluster.run(gets())


@pytest.mark.skipif(find_server("valkey-server") is None, reason="no valkey-server here")
async def test_primary_without_majority_replica_is_asked(tmp_path: Path, counters: Counters) -> None:
    """The client reaches the former primary, which still names itself as the primary, and is the first of the topology."""

    def start_with_debug(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([*argv, "--enable-debug-command", "yes"], **options)

    hosts, program = [ServerHost(start=start_with_debug)], find_server("valkey-server")
    with ValkeyServers(tmp_path, shards=3, replicas=1, program=program, hosts=hosts) as servers:
        cluster = ValkeyClient(ValkeyAddress(servers.seeds), budget_s=2.0, count=counters.add)
        await cluster.start()
        try:
            await cluster.run(sets(b"1"))
            slot, tag = next(one for one in zip(RANGE_SLOTS, TAGS, strict=True) if cluster.topology.of_slot[one[0]] == 0)
            await cluster.run([(slot, pack("WAIT", 1, 1_000))], lane=Lane.WRITES)
            former = next(server for server in servers.servers if server.address == cluster.primary_of(slot))
            assert former.call("DEBUG", "DROP-CLUSTER-PACKET-FILTER", -2) == b"OK"
            async with asyncio.timeout(HEAL_S):
                while cluster.primary_of(slot) == former.address:
                    await cluster.run([(slot, pack("GET", tag))])
                    await asyncio.sleep(0.02)
            assert set(await cluster.run_until(gets(), time.monotonic() + HEAL_S)) == {b"1"}
            slots = former.call("CLUSTER", "SLOTS")
            assert isinstance(slots, list)
            assert former.port in {entry[2][1] for entry in slots}
        finally:
            await cluster.close()


async def test_slot_moved_is_followed(cluster: ValkeyClient, servers: ValkeyServers, counters: Counters) -> None:
    slot, tag = RANGE_SLOTS[0], TAGS[0]
    await cluster.run(sets(b"1"))
    source = primary_of_first_range(cluster, servers)
    target = next(server for server in servers.primaries if server is not source)
    ids = {server: server.call("CLUSTER", "MYID") for server in (source, target)}
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    assert await cluster.run([(slot, pack("GET", tag))]) == [b"1"], "the key is still at its source"
    source.call("MIGRATE", "127.0.0.1", target.port, tag, 0, 5_000)
    assert await cluster.run([(slot, pack("GET", tag))]) == [b"1"], "an ASK is followed"
    for server in (target, source):
        server.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    assert await cluster.run([(slot, pack("GET", tag))]) == [b"1"], "a MOVED is followed"
    await eventually(lambda: cluster.topology.shards[cluster.topology.of_slot[slot]].primary == target.address)
    assert counters.snapshot()[metadata_metrics.SHARD_REDIRECTIONS] >= 2


async def test_shard_without_servers_stays_unanswered(cluster: ValkeyClient, servers: ValkeyServers) -> None:
    await cluster.run(sets(b"1"))
    victim = primary_of_first_range(cluster, servers)
    shard = cluster.topology.shards[cluster.topology.of_slot[RANGE_SLOTS[0]]]
    for server in servers.servers:
        if server.address in {shard.primary, *shard.replicas}:
            server.end()
    assert victim.address == shard.primary
    for _ in range(3):
        answers = await cluster.run(gets())
        assert answers.count(b"1") > len(answers) // 2
        assert answers[0] is UNANSWERED
    with pytest.raises(Unavailable, match="does not answer"):
        await cluster.run_until(gets()[:1], time.monotonic() + 0.3)


async def test_cluster_requires_the_password(servers: ValkeyServers, counters: Counters) -> None:
    for server in servers.servers:
        server.call("CONFIG", "SET", "requirepass", "right")
    for credentials, words in ((Credentials(), "requires a password"), (Credentials(password="wrong"), "rejects the user")):
        with pytest.raises(Unauthenticated, match=words):
            await ValkeyClient(ValkeyAddress(servers.seeds, credentials), budget_s=1.0, count=counters.add).start()
    right = Credentials(password="right")
    assert "right" not in repr(right)
    cluster = ValkeyClient(ValkeyAddress(servers.seeds, right), budget_s=1.0, count=counters.add)
    await cluster.start()
    assert set(await cluster.run(sets(b"1"), budget_s=5.0)) == {b"OK"}
    await cluster.close()


@asynccontextmanager
async def serving(answers: Callable[[bytes], bytes], host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server that answers each part that it receives. Yields its address."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with suppress(ConnectionError):
            while data := await reader.read(4_096):
                writer.write(answers(data))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, host, 0)
    async with server:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*handlers)


async def test_server_outside_of_a_cluster_is_refused(counters: Counters) -> None:
    def answer(data: bytes) -> bytes:
        return b"+PONG\r\n" if b"PING" in data else b"-ERR This instance has cluster support disabled\r\n"

    async with serving(answer) as address:
        with pytest.raises(Unsupported, match="--cluster-enabled yes"):
            await ValkeyClient(ValkeyAddress((address,)), budget_s=1.0, count=counters.add).start()


@pytest.mark.parametrize("garbage", [b"\x00\x01\x02", b"$99999999999999999999\r\n", b"*-5\r\n?"])
async def test_garbage_from_a_server_is_unavailable(garbage: bytes, counters: Counters) -> None:
    async with serving(lambda _: garbage) as address:
        with pytest.raises(Unavailable):
            await ValkeyClient(ValkeyAddress((address,)), budget_s=1.0, count=counters.add).start()


def replies_to(data: bytes, replies: dict[bytes, bytes]) -> bytes:
    reader = hiredis.Reader()
    reader.feed(data)
    commands = []
    while (command := reader.gets()) is not False:
        commands.append(replies.get(command[0], b"+OK\r\n"))
    return b"".join(commands)


async def test_moved_without_host_is_followed_at_the_same_host(counters: Counters) -> None:
    with_key = {b"GET": b"$1\r\n1\r\n"}
    async with serving(lambda data: replies_to(data, with_key), "127.0.0.2") as target:
        port = target.rpartition(":")[2].encode()
        asked: dict[bytes, bytes] = {b"GET": b"-MOVED 0 :%s\r\n" % port}
        async with serving(lambda data: replies_to(data, asked), "127.0.0.2") as address:
            own = address.rpartition(":")[2].encode()
            asked[b"CLUSTER"] = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%s\r\n" % own
            client = ValkeyClient(ValkeyAddress((address,)), budget_s=5.0, count=counters.add)
            await client.start()
            assert await client.run([(0, pack("GET", "key"))]) == [b"1"]
            await client.close()
