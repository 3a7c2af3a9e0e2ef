"""Tests of membership with real processes: pauses, killed nodes, and orders that both servers of an index see."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from metadata_harness import TIMEOUT_S, Peer, ServerProcess, run_of, two_servers

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NODE_STATE_DRAINING
from kvstore.core.errors import Conflict
from kvstore.rpc.client import call_aio, connect_aio
from support.chains import chain
from support.wait import wait_until_async

KEYS = chain("a", 50)
TTL_MS = 1_000
PAUSE_S = 5.0


@asynccontextmanager
async def askers(servers: Sequence[ServerProcess]) -> AsyncIterator[list[Peer]]:
    """A client of each server. The first one is the node."""
    channels = [connect_aio(server.address) for server in servers]
    peers = [Peer(channel) for channel in channels]
    try:
        yield peers
    finally:
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def beating(peer: Peer) -> AsyncIterator[None]:
    """The node sends heartbeats to its server."""

    async def beats() -> None:
        while True:
            await peer.beat()
            await asyncio.sleep(TTL_MS / 5_000)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def hits(peers: list[Peer]) -> set[int]:
    return {await peer.hit(KEYS) for peer in peers}


async def counts(peers: list[Peer], name: str) -> set[int]:
    return {(await peer.counters()).get(name, 0) for peer in peers}


async def statuses(peers: list[Peer]) -> list[list[pb.NodeStatus]]:
    """The nodes that each server lists."""
    return [list((await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes) for peer in peers]


async def test_servers_paused_hide_no_node_on_waking(tmp_path: Path) -> None:
    with two_servers(tmp_path, ttl_ms=TTL_MS) as servers:
        async with askers(servers) as peers:
            await peers[0].register()
            await peers[0].publish(peers[0].nvme, run_of(KEYS), sync_end=True)

            async def all_see() -> bool:
                return await hits(peers) == {50}

            async with beating(peers[0]):
                await wait_until_async(all_see)
            for server in servers:
                server.send_signal(signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            for server in servers:
                server.send_signal(signal.SIGCONT)
            assert await all_see()
            async with beating(peers[0]):
                for _ in range(20):
                    assert await all_see()
                    await asyncio.sleep(TTL_MS / 10_000)
            assert await counts(peers, "metadata_nodes_expired_total") == {0}
        assert all("server paused" in server.log() for server in servers)


async def test_server_killed_node_is_hidden_by_both_servers(tmp_path: Path) -> None:
    with two_servers(tmp_path, ttl_ms=TTL_MS) as servers:
        async with askers(servers) as peers:
            await peers[0].register()
            await peers[0].publish(peers[0].nvme, run_of(KEYS), sync_end=True)
            async with beating(peers[0]):
                for _ in range(20):
                    await wait_until_async(lambda: sees(peers, 50))
                    await asyncio.sleep(TTL_MS / 10_000)
                assert await counts(peers, "metadata_nodes_expired_total") == {0}
            await wait_until_async(lambda: sees(peers, 0))
            assert [[node.alive for node in nodes] for nodes in await statuses(peers)] == [[False]] * len(peers)
            async with beating(peers[0]):
                await wait_until_async(lambda: sees(peers, 50))


async def sees(peers: list[Peer], blocks: int) -> bool:
    return await hits(peers) == {blocks}


async def test_servers_share_reports_orders_and_removals(tmp_path: Path) -> None:
    with two_servers(tmp_path, ttl_ms=TTL_MS) as servers:
        async with askers(servers) as peers:
            node = peers[0]
            await node.register()
            await node.publish(node.nvme, run_of(KEYS), sync_end=True)

            async def usage_is(used: int) -> bool:
                await node.beat(used)
                return {nodes[0].usages[1].used_bytes if nodes[0].usages else 0 for nodes in await statuses(peers)} == {used}

            for used in (4096, 8192):
                await wait_until_async(lambda used=used: usage_is(used))  # type: ignore[misc]
            async with beating(node):
                drain = pb.DrainNodeRequest(operation_id=secrets.token_bytes(16), node_id=node.node_id)
                await call_aio(peers[-1].stub.DrainNode, drain, TIMEOUT_S)
                assert {nodes[0].state for nodes in await statuses(peers)} == {NODE_STATE_DRAINING}
                remove = pb.RemoveNodeRequest(operation_id=secrets.token_bytes(16), node_id=node.node_id, force=True)
                await call_aio(peers[1].stub.RemoveNode, remove, TIMEOUT_S)
                assert await hits(peers) == {0}
                assert await statuses(peers) == [[]] * len(peers)
                for peer in peers:
                    peer.boot_id = node.boot_id
                    with pytest.raises(Conflict, match="was removed"):
                        await peer.register()
            node.reboot()
            await node.register()
            await node.publish(node.nvme, run_of(KEYS), sync_end=True)
            assert await hits(peers) == {50}
            leave = pb.UnregisterNodeRequest(operation_id=secrets.token_bytes(16), node_id=node.node_id, boot_id=node.boot_id)
            await call_aio(peers[1].stub.UnregisterNode, leave, TIMEOUT_S)
            assert await hits(peers) == {0}
            assert [[status.stopped for status in nodes] for nodes in await statuses(peers)] == [[True]] * len(peers)
