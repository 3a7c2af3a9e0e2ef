"""Tests of drain, unregister and remove calls, and their effect on lookups and plans."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from metadata_harness import NAMESPACE, TIMEOUT_S, Peer, Running, run_of, server_process

from kvproto.v1 import common_pb2
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import DrainOrder, DrainProgress, Tier
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Conflict, InvalidArgument, NotFound, Unavailable, Unsupported
from kvstore.metadata.membership import node_admin
from kvstore.metadata.membership.node_admin import MAX_LOCATED
from kvstore.metadata.server import MetadataServer
from kvstore.rpc.client import call_aio, connect_aio
from support.chains import chain
from support.wait import wait_until_async

ACTIVE, DRAINING = common_pb2.NODE_STATE_ACTIVE, common_pb2.NODE_STATE_DRAINING
DRAINED, BLOCKED = common_pb2.NODE_STATE_DRAINED, common_pb2.NODE_STATE_DRAIN_BLOCKED


def new_id() -> bytes:
    return secrets.token_bytes(16)


async def drain(peer: Peer, node_id: str = "", *, move: bool = False) -> pb.NodeStatus:
    request = pb.DrainNodeRequest(operation_id=new_id(), node_id=node_id or peer.node_id, move=move)
    return (await call_aio(peer.stub.DrainNode, request, TIMEOUT_S)).status


async def undrain(peer: Peer) -> pb.NodeStatus:
    request = pb.UndrainNodeRequest(operation_id=new_id(), node_id=peer.node_id)
    return (await call_aio(peer.stub.UndrainNode, request, TIMEOUT_S)).status


async def remove(peer: Peer, *, force: bool = False) -> bool:
    request = pb.RemoveNodeRequest(operation_id=new_id(), node_id=peer.node_id, force=force)
    return (await call_aio(peer.stub.RemoveNode, request, TIMEOUT_S)).known


async def leave(peer: Peer) -> bool:
    request = pb.UnregisterNodeRequest(operation_id=new_id(), node_id=peer.node_id, boot_id=peer.boot_id)
    return (await call_aio(peer.stub.UnregisterNode, request, TIMEOUT_S)).known


async def status(peer: Peer) -> pb.NodeStatus:
    found = (await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes
    return next(one for one in found if one.node.node_id == peer.node_id)


async def tell(peer: Peer, order: DrainOrder, state: common_pb2.NodeState, **more: int) -> pb.HeartbeatResponse:
    """A heartbeat with drain progress."""
    progress = DrainProgress(operation_id=order.operation_id, state=state, **more)  # type: ignore[arg-type]
    request = pb.HeartbeatRequest(node_id=peer.node_id, boot_id=peer.boot_id, drain=progress)
    return await call_aio(peer.stub.Heartbeat, request, TIMEOUT_S)


async def test_drain_order_reaches_node_and_shows_progress(running: Running) -> None:
    peer = running.peer()
    await peer.register()
    assert (await status(peer)).state == ACTIVE
    assert not (await peer.beat()).HasField("drain")
    ordered = await drain(peer, move=True)
    assert (ordered.state, ordered.order.move, ordered.HasField("drain")) == (DRAINING, True, False)
    told = (await peer.beat()).drain
    assert told == ordered.order
    await tell(peer, told, BLOCKED, not_durable_blocks=3)
    shown = await status(peer)
    assert (shown.state, shown.drain.not_durable_blocks) == (BLOCKED, 3)
    assert (await drain(peer, move=True)).order == told, "ordered again, it is the same order"
    changed = await drain(peer)
    assert (changed.state, changed.order.move) == (DRAINING, False), "another order: what was said of the first is void"
    await tell(peer, changed.order, DRAINED)
    assert (await status(peer)).state == DRAINED
    lifted = await undrain(peer)
    assert (lifted.state, lifted.HasField("order")) == (ACTIVE, False)
    assert not (await peer.beat()).HasField("drain")
    assert (await undrain(peer)).state == ACTIVE


async def test_drain_order_survives_server_and_boot(tmp_path: Path) -> None:
    clock = ManualClock()
    config = MetadataConfig(index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    server = MetadataServer(config, clock=clock)
    async with connect_aio(await server.start()) as channel:
        peer = Peer(channel)
        await peer.register()
        order = (await drain(peer, move=True)).order
        await tell(peer, order, DRAINED)
    await server.stop(0.0)
    server = MetadataServer(config, clock=clock)
    async with connect_aio(await server.start()) as channel:
        again = Peer(channel)
        again.boot_id = peer.boot_id

        async def drained() -> bool:
            return (await status(again)).state == DRAINED

        await wait_until_async(drained)  # heartbeats of before are taken in with the first tick
        again.reboot()
        request = pb.RegisterNodeRequest(operation_id=new_id(), node=again.info())
        answer = await call_aio(again.stub.RegisterNode, request, TIMEOUT_S)
        assert answer.drain == order, "a node that was started anew is told at once"
        assert (await status(again)).state == DRAINING
    await server.stop(0.0)


async def test_draining_node_serves_reads_and_gets_no_plans(running: Running) -> None:
    peers = {}
    for name in ("p", "d"):
        peer = peers[name] = running.peer(name)
        await peer.register()
    keys = chain("a", 8)
    await peers["p"].publish(peers["p"].nvme, run_of(keys), sync_end=True)
    await drain(peers["p"])
    assert await peers["d"].hit(keys) == 8

    async def planned() -> set[str]:
        request = pb.PlanLoadRequest(
            operation_id=new_id(), prefill_node="p", decode_node="d", blocks=100, block_bytes=1 << 20, block_tokens=64
        )
        return {part.node_id for part in (await call_aio(peers["p"].stub.PlanLoad, request, TIMEOUT_S)).parts}

    assert await planned() == {"d"}
    await drain(peers["d"])
    with pytest.raises(Unavailable):
        await planned()
    for peer in peers.values():
        await undrain(peer)
    assert "p" in await planned()


async def test_unregistered_node_is_hidden_and_returns_with_volumes(running: Running) -> None:
    peer, other, keys = running.peer("a"), running.peer("b"), chain("a", 8)
    for one in (peer, other):
        await one.register()
    await peer.publish(peer.nvme, run_of(keys), sync_end=True)
    assert await other.hit(keys) == 8
    stranger = running.peer("a")
    assert not await leave(stranger), "only the boot that is registered can say so"
    assert await other.hit(keys) == 8
    assert await leave(peer)
    assert await other.hit(keys) == 0
    shown = await status(peer)
    assert (shown.stopped, shown.alive) == (True, False)
    await peer.beat()  # a late heartbeat
    assert not (await status(peer)).alive
    await peer.publish(peer.nvme, run_of(chain("b", 2)))  # a block that was written back during the drain
    assert (await other.counters()).get("metadata_nodes_expired_total", 0) == 0
    peer.reboot()
    assert (await peer.register())[peer.nvme], "its inventory is wanted"
    assert await other.hit(keys) == 8, "and until then what is known of it is served"
    assert not (await status(peer)).stopped


async def test_remove_live_node_requires_force(running: Running) -> None:
    peer, other, keys = running.peer("a"), running.peer("b"), chain("a", 8)
    for one in (peer, other):
        await one.register()
        await one.publish(one.nvme, run_of(keys), sync_end=True)
    with pytest.raises(Conflict, match="drain it first"):
        await remove(peer)
    order = (await drain(peer)).order
    for state in (DRAINING, BLOCKED):
        await tell(peer, order, state)
        with pytest.raises(Conflict, match="drain it first"):
            await remove(peer)
    await tell(peer, order, DRAINED)
    assert await remove(peer)
    assert [one.node.node_id for one in (await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes] == ["b"]
    assert not await remove(peer), "a retry finds nothing, and says so"
    assert (await peer.beat()).register_again
    with pytest.raises(Conflict, match="was removed"):
        await peer.register()
    assert await remove(other, force=True)
    assert await other.hit(keys) == 0
    peer.reboot()
    await peer.register()
    assert (await status(peer)).state == ACTIVE, "the order went with the node"
    await leave(peer)
    assert await remove(peer), "one that has ended is as good as dead"


async def test_remove_keeps_the_last_removals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_admin, "KEEP_REMOVED", 3)
    config = MetadataConfig(index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    server = MetadataServer(config)
    async with connect_aio(await server.start()) as channel:
        peers = [Peer(channel, name) for name in "abcde"]
        for peer in peers:
            await peer.register()
        for peer in [*peers[:3], peers[0], *peers[3:]]:
            if not await remove(peer, force=True):
                peer.reboot()  # another boot of this node may register, and is removed, too
                await peer.register()
                assert await remove(peer, force=True)
        for peer in peers[1:3]:
            await peer.register()
        for peer in (peers[0], *peers[3:]):
            with pytest.raises(Conflict, match="was removed"):
                await peer.register()
    await server.stop(0.0)


async def test_remove_silent_node_can_register_again(running: Running) -> None:
    peer, other = running.peer("a"), running.peer("b")
    await peer.register()
    running.clock.advance(0.2)

    async def silent() -> bool:
        await other.register()
        return not (await status(peer)).alive

    await wait_until_async(silent)
    assert await remove(peer)
    await peer.register()


async def test_locate_blocks_returns_holders_per_key(running: Running) -> None:
    peer, other, keys = running.peer("a"), running.peer("b"), chain("a", 5)
    for one in (peer, other):
        await one.register()
    await peer.publish(peer.nvme, run_of(keys))
    await peer.publish(peer.dram, run_of(keys, 0, 1))
    await other.publish(other.nvme, run_of(keys, 2, 4))
    await drain(other)
    asked = [keys[3], keys[0], chain("b", 1)[0]]
    request = pb.LocateBlocksRequest(namespace_id=NAMESPACE, keys=b"".join(asked))
    answer = await call_aio(peer.stub.LocateBlocks, request, TIMEOUT_S)
    found = {(one.key, answer.volumes[one.volume].volume_id) for one in answer.replicas}
    assert found == {(0, peer.nvme), (0, other.nvme), (1, peer.nvme), (1, peer.dram)}
    states = {one.volume_id: (one.node_id, one.tier, one.alive, one.state) for one in answer.volumes}
    assert states[other.nvme] == ("b", Tier.TIER_NVME, True, DRAINING)
    assert states[peer.dram] == ("a", Tier.TIER_DRAM, True, ACTIVE)


async def test_malformed_calls_are_refused(running: Running) -> None:
    peer = running.peer()
    await peer.register()
    stub = peer.stub
    for method, request in (
        (stub.DrainNode, pb.DrainNodeRequest(operation_id=b"short", node_id="host-1")),
        (stub.DrainNode, pb.DrainNodeRequest(operation_id=new_id())),
        (stub.UndrainNode, pb.UndrainNodeRequest(operation_id=new_id(), node_id="x" * 1000)),
        (stub.RemoveNode, pb.RemoveNodeRequest(node_id="host-1")),
        (stub.UnregisterNode, pb.UnregisterNodeRequest(operation_id=new_id(), node_id="host-1")),
        (stub.LocateBlocks, pb.LocateBlocksRequest(namespace_id=NAMESPACE, keys=bytes(16 * (MAX_LOCATED + 1)))),
        (stub.LocateBlocks, pb.LocateBlocksRequest(namespace_id=NAMESPACE, keys=b"17 bytes are none")),
        (stub.Heartbeat, pb.HeartbeatRequest(node_id="host-1", boot_id=peer.boot_id, drain=DrainProgress())),
        (
            stub.Heartbeat,
            pb.HeartbeatRequest(
                node_id="host-1", boot_id=peer.boot_id, drain=DrainProgress(operation_id=new_id(), why="y" * 1000)
            ),
        ),
    ):
        with pytest.raises(InvalidArgument):
            await call_aio(method, request, TIMEOUT_S)  # type: ignore[arg-type]
    for call in (
        drain(peer, "nobody"),
        call_aio(stub.UndrainNode, pb.UndrainNodeRequest(operation_id=new_id(), node_id="no"), 5),
    ):
        with pytest.raises(NotFound):
            await call
    pool = Peer(running.channel, "pool", {"pool/hbm": Tier.TIER_HBM})
    await pool.register()
    with pytest.raises(Unsupported, match="pool"):
        await drain(pool)


async def test_server_sigterm_ends_publish_streams_and_exits_0(tmp_path: Path) -> None:
    with server_process(tmp_path, stop_grace_ms=60_000) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            stream = peer.stub.Publish(timeout=60)
            await stream.write(peer.batch(peer.dram, [run_of(chain("a", 3))]))
            assert (await stream.read()).sequence == 1
            assert server.stop() == 0, "within a fraction of the minute that calls may take"
            assert "Traceback" not in server.log()
