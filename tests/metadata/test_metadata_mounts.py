"""Tests of mounted volumes: visible and served while one mounting node is alive."""

from __future__ import annotations

import pytest
from metadata_harness import TIMEOUT_S, Peer, Running, run_of

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.rpc.client import call_aio
from support.chains import chain
from support.wait import wait_until_async


class Mounting(Peer):
    """A node that mounts volumes of other nodes."""

    mounts: tuple[str, ...] = ()

    def info(self) -> NodeInfo:
        info = super().info()
        info.mounts.extend(self.mounts)
        return info


def mounting(running: Running, node_id: str, *mounts: str) -> Mounting:
    peer = Mounting(running.channel, node_id)
    peer.mounts = mounts
    return peer


def servers(answer: pb.LookupResponse) -> set[tuple[str, str]]:
    """(node, volume) of every run."""
    found = set()
    for run in answer.runs:
        node = answer.nodes[run.node]
        own = [volume.volume_id for volume in node.volumes]
        found.add((node.node_id, [*own, *node.mounts][run.volume]))
    return found


async def silence(running: Running, owner: Peer, *living: Peer) -> None:
    """The owner misses its heartbeats; the others do not."""
    expired = (await owner.counters()).get("metadata_nodes_expired_total", 0)
    for _ in range(3):
        running.clock.advance(0.06)
        for peer in living:
            await peer.beat()

    async def gone() -> bool:
        return (await owner.counters()).get("metadata_nodes_expired_total", 0) > expired

    await wait_until_async(gone)


async def test_mounted_volume_survives_its_owner(running: Running) -> None:
    owner, keys = running.peer("owner"), chain("a", 10)
    first = mounting(running, "m1", "else/nvme0", owner.nvme)
    second = mounting(running, "m2", owner.nvme)
    for peer in (owner, first, second):
        await peer.register()
    await owner.publish(owner.nvme, run_of(keys))
    await owner.publish(owner.dram, run_of(keys))
    assert servers(await owner.lookup(keys)) == {("owner", owner.dram), ("owner", owner.nvme)}
    await silence(running, owner, first, second)
    seen = set()
    for _ in range(4):
        answer = await owner.lookup(keys)
        assert answer.hit_blocks == 10
        seen |= servers(answer)
    assert seen == {("m1", owner.nvme), ("m2", owner.nvme)}  # alternately, and none for its DRAM blocks
    await silence(running, second, first)
    assert servers(await owner.lookup(keys)) == {("m1", owner.nvme)}
    await owner.beat()
    assert servers(await owner.lookup(keys)) == {("owner", owner.dram), ("owner", owner.nvme)}


async def test_mounted_volume_hidden_after_last_mount_ends(running: Running) -> None:
    owner, keys = running.peer("owner"), chain("a", 10)
    mount, witness = mounting(running, "m1", owner.nvme), running.peer("w")
    for peer in (owner, mount, witness):
        await peer.register()
    await owner.publish(owner.nvme, run_of(keys))
    await silence(running, owner, mount, witness)
    assert await witness.hit(keys) == 10
    await silence(running, mount, witness)
    assert await witness.hit(keys) == 0
    await mount.beat()
    assert await witness.hit(keys) == 10


async def test_mount_of_dram_volume_is_refused(running: Running) -> None:
    owner, keys = running.peer("owner"), chain("a", 10)
    mount = mounting(running, "m1", owner.dram)
    await owner.register()
    await mount.register()
    await owner.publish(owner.dram, run_of(keys))
    await silence(running, owner, mount)
    assert await mount.hit(keys) == 0


@pytest.mark.parametrize("mounts", [["v"] * (limits.MAX_VOLUMES_PER_NODE + 1), [""], ["v" * 1000], ["a\nb"]])
async def test_mounts_malformed_are_refused(running: Running, mounts: list[str]) -> None:
    peer = mounting(running, "m1", *mounts)
    request = pb.RegisterNodeRequest(operation_id=b"o" * 16, node=peer.info())
    with pytest.raises(InvalidArgument):
        await call_aio(peer.stub.RegisterNode, request, TIMEOUT_S)
