"""The number by which nodes notice that the list of nodes has changed."""

from __future__ import annotations

from metadata_harness import TIMEOUT_S, EngineCache, Peer, Running

from kvproto.v1 import metadata_pb2 as pb
from kvstore.control_api.serializers import is_arriving
from kvstore.rpc.client import call_aio
from support.wait import wait_until_async


async def test_members_change_with_nodes_volumes_and_zones(running: Running) -> None:
    a, b = running.peer("a"), running.peer("b")
    await a.register()
    alone = (await a.beat()).membership_version
    assert (await a.beat()).membership_version == alone, "heartbeats change nothing"
    await b.register()
    both = (await a.beat()).membership_version
    assert both != alone
    assert (await b.beat()).membership_version == both
    b.reboot()
    await b.register()
    assert (await a.beat()).membership_version == both, "a restart changes nothing"
    b.zone = "rack-1"
    b.reboot()
    await b.register()
    zoned = (await a.beat()).membership_version
    assert zoned != both
    b.uid = bytes(15) + b"x"
    b.reboot()
    await b.register()
    recreated = (await a.beat()).membership_version
    assert recreated not in {both, zoned}

    running.clock.advance(1.0)
    await a.beat()

    async def silent() -> bool:
        return (await a.beat()).membership_version != recreated

    await wait_until_async(silent)


async def test_members_do_not_change_with_caches_of_engines(running: Running) -> None:
    """Otherwise the start of an engine makes every node list all nodes."""
    node, cache = running.peer("a"), EngineCache(running.channel, "cache")
    await node.register()
    alone = (await node.beat()).membership_version
    await cache.register()
    assert (await cache.beat()).membership_version == (await node.beat()).membership_version == alone
    await cache.unregister()
    assert (await node.beat()).membership_version == alone


async def arriving(peer: Peer) -> list[str]:
    """The volumes of a node that the commands show as arriving."""
    listed = await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)
    (status,) = listed.nodes
    return [volume.volume_id for volume in status.node.volumes if is_arriving(status, volume.volume_id)]


async def test_volumes_arrive_until_inventory_is_whole(running: Running) -> None:
    node = running.peer("a")
    await node.register()
    assert await arriving(node) == list(node.volumes)
    for volume in node.volumes:
        await node.publish(volume, sync_end=True)
    await node.beat()
    assert await arriving(node) == []
    node.reboot()
    assert set((await node.register()).values()) == {True}
    await node.publish(next(iter(node.volumes)), sync_end=True)
    await node.beat()
    assert await arriving(node) == list(node.volumes)[1:]
