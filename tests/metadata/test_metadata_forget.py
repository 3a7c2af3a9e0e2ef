"""Tests of forgetting long silent nodes, also while the wall clock changes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from metadata_harness import TIMEOUT_S, EngineCache, Peer, Running, run_of

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo, VolumeInfo
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.core.types import BootId, NodeId
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_mutations import register_node
from kvstore.metadata.membership.node_table import CACHE_FORGET_S, NodeTable
from kvstore.metadata.server import MetadataServer
from kvstore.observe.counters import Counters
from kvstore.rpc.client import call_aio, connect_aio
from support.chains import chain
from support.wait import wait_until_async

TTL_MS, FORGET_MS = 1_000, 60_000


async def nodes(peer: Peer) -> list[pb.NodeStatus]:
    """All nodes that the server knows."""
    return list((await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)).nodes)


@pytest.fixture
async def forgetful(tmp_path: Path) -> AsyncIterator[Running]:
    """A server that forgets after a minute of the test's clock."""
    config = MetadataConfig(
        index_path=tmp_path / "index",
        listen="127.0.0.1:0",
        index_size_bytes=64 << 20,
        heartbeat_interval_ms=200,
        node_ttl_ms=TTL_MS,
        node_forget_ms=FORGET_MS,
    )
    clock = ManualClock()
    server = MetadataServer(config, clock=clock)
    address = await server.start()
    async with connect_aio(address) as channel:
        yield Running(server, clock, channel, address)
    await server.stop(0.0)


async def test_forget_long_silent_node_drops_its_blocks(forgetful: Running) -> None:
    gone, stays, keys = forgetful.peer("gone"), forgetful.peer("stays"), chain("a", 40)
    for peer, stop in ((gone, 40), (stays, 20)):
        await peer.register()
        await peer.publish(peer.nvme, run_of(keys, 0, stop), sync_end=True)
    for _ in range(70):
        forgetful.clock.advance(0.9)
        await stays.beat()

    async def forgotten() -> bool:
        await stays.beat()
        return (await stays.counters()).get("metadata_nodes_forgotten_total", 0) == 1

    await wait_until_async(forgotten)
    assert [status.node.node_id for status in await nodes(stays)] == ["stays"]
    assert await stays.hit(keys) == 20
    assert (await gone.beat()).register_again
    with pytest.raises(NotFound):
        await gone.send(gone.batch(gone.nvme, [run_of(keys)]))
    gone.sequence = 0
    assert await gone.register() == {gone.dram: True, gone.nvme: True}, "nothing of it is left, so all is wanted"
    await gone.publish(gone.nvme, run_of(keys))
    assert await gone.hit(keys) == 40


def test_forget_cache_of_an_engine_soon(tmp_path: Path) -> None:
    """It lacks an address, its engine has ended, and the next start of the engine has another name."""
    clock, day_s = ManualClock(), 86_400.0
    index = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20)
    nodes = NodeTable(index, clock, 1.0, Counters())
    for node_id, address in (("cache", ""), ("node", "127.0.0.1:1")):
        register_node(index, NodeInfo(node_id=node_id, boot_id=b"b" * 16, control_address=address))
        nodes.record_registration(NodeId(node_id), BootId(b"b" * 16))
    for seconds, forgotten in ((CACHE_FORGET_S - 5, []), (10.0, ["cache"]), (day_s, ["cache", "node"])):
        clock.advance(seconds)
        nodes.tick()
        assert sorted(boot.node_id for boot in nodes.forgettable(day_s)) == forgotten
    index.close()


async def test_forget_cache_is_logged_and_no_lost_node(forgetful: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The log and the counters of nodes must not look like a loss of data."""
    caplog.set_level(logging.INFO)
    stays, ended, killed = forgetful.peer("stays"), *(EngineCache(forgetful.channel, name) for name in ("ended", "killed"))
    for peer in (stays, ended, killed):
        await peer.register()
    await ended.unregister()

    async def forgotten() -> bool:
        forgetful.clock.advance(0.9)
        await stays.beat()
        return [status.node.node_id for status in await nodes(stays)] == ["stays"]

    await wait_until_async(forgotten)
    silences = re.findall(r"engine cache forgotten: (\w+) \(silent_for_s=(\d+)\)", caplog.text)
    assert sorted(name for name, _ in silences) == ["ended", "killed"]
    assert all(int(silence_s) >= CACHE_FORGET_S for _, silence_s in silences)
    loggers = [record.name for record in caplog.records if record.levelno > logging.INFO]
    assert not [name for name in loggers if name.startswith("kvstore.metadata.membership")]
    counts = await stays.counters()
    changes = ("appeared", "left", "expired", "forgotten")
    assert [counts.get(f"metadata_nodes_{change}_total", 0) for change in changes] == [1, 0, 0, 0]


async def test_forget_node_waits_for_full_silence(forgetful: Running) -> None:
    peer, keys = forgetful.peer(), chain("a", 10)
    await peer.register()
    await peer.publish(peer.nvme, run_of(keys), sync_end=True)
    forgetful.clock.advance(FORGET_MS / 1000 - 1)

    async def hidden() -> bool:
        return (await peer.counters()).get("metadata_nodes_expired_total", 0) == 1

    await wait_until_async(hidden)
    assert await peer.hit(keys) == 0
    assert not (await peer.beat()).register_again
    assert await peer.hit(keys) == 10


def test_config_forget_below_ttl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        MetadataConfig(index_path=tmp_path, node_ttl_ms=1_000, node_forget_ms=999).check()


@pytest.mark.parametrize("step_s", [-1e9, 1e9])
def test_forget_wall_clock_steps_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Liveness uses the monotonic clock, so a jump of the time of day by thirty years has no effect."""
    index = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20)
    info = NodeInfo(node_id="n", boot_id=b"b" * 16, volumes=[VolumeInfo(volume_id="v", tier="TIER_NVME")])
    register_node(index, info)
    nodes_known = NodeTable(index, MonotonicClock(), 60.0, Counters())
    assert nodes_known.record_heartbeat(pb.HeartbeatRequest(node_id="n", boot_id=info.boot_id))
    nodes_known.take_unshared().write(index)
    real_s = time.time()
    monkeypatch.setattr(time, "time", lambda: real_s + step_s)
    monkeypatch.setattr(time, "time_ns", lambda: int((real_s + step_s) * 1e9))
    another_server = NodeTable(index, MonotonicClock(), 60.0, Counters())
    for table in (nodes_known, another_server):
        table.tick()
        (status,) = table.statuses()
        assert status.alive
        assert status.heartbeat_age_ms < 60_000
        assert len(table.visible) == 1
        assert table.forgettable(60.0) == []
    index.close()
