"""A mirror of the store follows real servers over a real Valkey while those, and shards of Valkey, are killed."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from metadata_harness import Peer, ServerProcess, run_of, server_process

from kvclient.events import BlockWatcher
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import Conflict, KVStoreError, NotFound
from kvstore.embedded.valkey import ValkeyServer, ValkeyServers, find_server
from kvstore.rpc.client import connect_aio
from samples import sample
from support.chains import chain
from support.wait import wait_until, wait_until_async

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")
CHAINS = [chain(f"chain-{number}", 30) for number in range(6)]
WAIT_S = 60.0


class Node:
    """A node that stores and evicts blocks, and publishes to any server that answers."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self.servers = servers
        self.random = random.Random(7)
        self.held = [0] * len(CHAINS)
        self.boot_id = secrets.token_bytes(16)
        self.sequence = 0
        self.batches = 0

    @property
    def keys(self) -> set[bytes]:
        """Keys that the node holds."""
        return {key for keys, count in zip(CHAINS, self.held, strict=True) for key in keys[:count]}

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Peer]:
        async with connect_aio(self.random.choice(self.servers).address) as channel:
            peer = Peer(channel)
            peer.boot_id = self.boot_id
            yield peer

    async def register(self) -> None:
        """Register, and publish everything that the node holds."""
        async with self.peer() as peer:
            await peer.register()
            peer.sequence = self.sequence
            runs = [run_of(keys, 0, count) for keys, count in zip(CHAINS, self.held, strict=True) if count]
            await peer.publish(peer.nvme, *runs, sync_end=True)
            self.sequence = peer.sequence

    async def send(self, message: pb.PublishRequest) -> None:
        """Send a batch until a server has acknowledged it."""
        while True:
            try:
                async with self.peer() as peer:
                    assert await peer.send(message) == [message.sequence]
                    return
            except (Conflict, NotFound):
                await self.settle()
                return  # the inventory has the batch
            except KVStoreError:
                await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Register until a server answers."""
        while True:
            try:
                return await self.register()
            except KVStoreError:
                await asyncio.sleep(0.05)

    async def work(self) -> None:
        """Store and evict until cancelled, between two batches."""
        while True:
            number = self.random.randrange(len(CHAINS))
            keys, before = CHAINS[number], self.held[number]
            after = self.held[number] = self.random.randint(0, len(keys))
            self.sequence += 1
            message = pb.PublishRequest(
                node_id="host-1",
                boot_id=self.boot_id,
                sequence=self.sequence,
                volume_id="host-1/nvme0",
                stored=[run_of(keys, before, after)] if after > before else [],
                removed=b"".join(keys[after:before]),
            )
            await asyncio.shield(asyncio.ensure_future(self.send(message)))
            self.batches += 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path / "valkey", shards=2, replicas=1) as cluster:
        yield cluster


@pytest.fixture
def servers(tmp_path: Path, cluster: ValkeyServers) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            engine = f"valkey://{','.join(cluster.seeds)}"
            found.append(stack.enter_context(server_process(tmp_path / name, engine=engine, lookup_shard_ms=500)))
        yield found


class Following:
    """A mirror that follows a working node."""

    def __init__(self, node: Node, watcher: BlockWatcher) -> None:
        self.node = node
        self.watcher = watcher
        self.task = asyncio.create_task(node.work())

    async def progress(self, batches: int = 20) -> None:
        goal = self.node.batches + batches

        async def so() -> bool:
            assert not self.task.done(), self.task.exception()
            return self.node.batches >= goal

        await wait_until_async(so, "the node publishes", WAIT_S)

    async def ends_equal(self) -> int:
        """End the work; the mirror then equals the truth. Returns the number of its snapshots."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.node.settle()

        async def equal() -> bool:
            return difference() == (0, 0, True)

        def difference() -> tuple[int, int, bool]:
            found: list[set[bytes]] = []
            complete: list[bool] = []
            self.watcher.read(lambda mirror: (found.append(set(mirror)), complete.append(mirror.complete)))
            return len(found[0] - self.node.keys), len(self.node.keys - found[0]), complete[0]

        await wait_until_async(equal, lambda: f"difference: {difference()}", WAIT_S)
        return self.watcher.counters.snapshot()["client_events_resyncs_total"]


@asynccontextmanager
async def following(servers: list[ServerProcess]) -> AsyncIterator[Following]:
    node = Node(servers)
    await node.register()
    with BlockWatcher(",".join(server.address for server in servers)) as watcher:
        await asyncio.to_thread(watcher.wait_complete, WAIT_S)
        yield Following(node, watcher)


@pytest.mark.timeout(600)  # 100 kills take five minutes
async def test_mirror_server_killed_resumes_at_another(servers: list[ServerProcess]) -> None:
    async with following(servers) as follower:
        for number in range(sample(4, of=100)):
            await follower.progress()
            await asyncio.to_thread(servers[number % 2].stop, signal.SIGKILL)
            await follower.progress()
            await asyncio.to_thread(servers[number % 2].start)
        assert await follower.ends_equal() == 1, "the first; then each server goes on where the other one ended"
        assert follower.watcher.counters.snapshot()["client_events_failures_total"] >= 2


async def test_mirror_shard_failover_is_followed(servers: list[ServerProcess], cluster: ValkeyServers) -> None:
    async with following(servers) as follower:
        for _ in range(sample(2, of=20)):
            await follower.progress()
            primary = next(one for one in cluster.servers if is_primary(one))
            replica = next(one for one in cluster.servers if follows(one, primary))
            await asyncio.to_thread(primary.end)
            replica.call("CLUSTER", "FAILOVER", "TAKEOVER")  # two shards lack a majority without one of them
            await follower.progress()
            await asyncio.to_thread(cluster.restart, primary)
            await asyncio.to_thread(wait_until, lambda: has_replica(cluster), "it is a replica", WAIT_S)
        print(f"snapshots: {await follower.ends_equal()}")


def is_primary(server: ValkeyServer) -> bool:
    """Whether a server is a primary."""
    role = server.call("ROLE")
    return isinstance(role, list) and role[0] == b"master"


def follows(server: ValkeyServer, primary: ValkeyServer) -> bool:
    """Whether a server is the replica of a primary."""
    role = server.call("ROLE")
    return isinstance(role, list) and role[0] == b"slave" and role[2] == primary.port


def has_replica(cluster: ValkeyServers) -> bool:
    """Whether each shard has a replica that follows it."""
    found = 0
    for server in cluster.servers:
        try:
            info = server.call("INFO", "replication")
        except OSError:
            return False
        found += b"master_link_status:up" in bytes(info)  # type: ignore[arg-type]
    return found == len(cluster.servers) // 2
