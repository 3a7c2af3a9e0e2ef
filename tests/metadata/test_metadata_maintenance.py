"""Tests of background work if the index rejects changes, or lets them wait."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from metadata_harness import Peer

from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded, KVStoreError
from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata import server as metadata_server
from kvstore.metadata.indexing.index_mutations import register_node
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership import maintenance as upkeep
from kvstore.metadata.membership.maintenance import Maintenance
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.roles.roles import AllRoles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.client import connect_aio
from support.index_writes import writes_held
from support.wait import wait_until_async


def no_space() -> None:
    raise CapacityExceeded("no space on disk")


def bug() -> None:
    raise KeyError("a bug")


async def run_maintenance(tmp_path: Path, tick: Callable[[], None], failures: str) -> None:
    """Run maintenance until a counter of failures has reached five."""
    counters, index, thread = Counters(), LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test")
    nodes = NodeTable(index, MonotonicClock(), 0.08, counters)
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, roles=AllRoles(), on_tick=[tick])
    tasks.start()

    async def failed() -> bool:
        return counters.snapshot().get(failures, 0) >= 5

    await wait_until_async(failed)
    await tasks.stop()
    await thread.close()
    index.close()


async def test_maintenance_disk_full_logs_rarely_without_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "limited", LimitedLog(logging.getLogger(upkeep.__name__)), raising=False)
    await run_maintenance(tmp_path, no_space, "metadata_maintenance_failures_total")
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    assert "no space on disk" in caplog.text


async def test_maintenance_continues_after_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run_maintenance(tmp_path, bug, "metadata_background_bugs_total")
    assert "maintenance step failed" in caplog.text


async def test_maintenance_shares_heartbeats_after_failed_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also removes heartbeats of forgotten nodes, which a server wrote late."""
    index, thread, counters = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), Counters()
    boot_id = BootId(b"b" * 16)
    register_node(index, NodeInfo(node_id="n", boot_id=boot_id))
    index.put_beats({NodeId("forgotten"): Beat(boot_id, 1, 1)})
    nodes = NodeTable(index, MonotonicClock(), 60.0, counters)
    write, failures = index.put_beats, iter(range(3))

    def fail_at_first(beats: Mapping[NodeId, Beat | None]) -> None:
        if next(failures, None) is not None:
            raise CapacityExceeded("no space on disk")
        write(beats)

    monkeypatch.setattr(index, "put_beats", fail_at_first)
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, roles=AllRoles(), on_tick=[])
    tasks.start()

    async def shared() -> bool:
        assert nodes.record_heartbeat(HeartbeatRequest(node_id="n", boot_id=boot_id, sequence=7))
        return index.beats() == {"n": Beat(boot_id, 7, 7)}

    await wait_until_async(shared)
    assert counters.snapshot()["metadata_maintenance_failures_total"] == 3
    await tasks.stop()
    await thread.close()
    index.close()


async def test_maintenance_write_that_waited_hides_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tick sees that the index is away while the heartbeats wait to be written to it."""
    ttl_s, boot_id = 0.2, BootId(b"b" * 16)
    index, thread, counters = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), Counters()
    register_node(index, NodeInfo(node_id="n", boot_id=boot_id))
    nodes = NodeTable(index, MonotonicClock(), ttl_s, counters)
    nodes.view()
    monkeypatch.setattr(index, "put_beats", lambda _beats: time.sleep(3 * ttl_s))
    nodes.record_heartbeat(HeartbeatRequest(node_id="n", boot_id=boot_id), "host")
    alive: list[bool] = []
    note = [lambda: alive.append(nodes.is_alive(NodeId("n")))]
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=ttl_s, forget_s=60.0, roles=AllRoles(), on_tick=note)
    tasks.start()

    async def silent() -> bool:
        return False in alive

    await wait_until_async(silent)
    assert alive[0], "the first tick is late, and the node gets another time to live"
    await tasks.stop()
    await thread.close()
    index.close()


async def test_maintenance_write_held_hides_silent_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is stopped inside a write. Heartbeats that arrive here are still counted, and shared afterwards."""
    monkeypatch.setattr(upkeep, "WRITE_LIMIT_S", 0.3)
    index, thread, counters = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), Counters()
    boot_id = BootId(b"b" * 16)
    for name in ("silent", "beating"):
        register_node(index, NodeInfo(node_id=name, boot_id=boot_id))
    nodes = NodeTable(index, MonotonicClock(), 0.2, counters)
    nodes.record_heartbeat(HeartbeatRequest(node_id="silent", boot_id=boot_id))
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.2, forget_s=60.0, roles=AllRoles(), on_tick=[])

    def beat() -> None:
        assert nodes.record_heartbeat(HeartbeatRequest(node_id="beating", boot_id=boot_id))

    async def hidden() -> bool:
        beat()
        return not nodes.is_alive(NodeId("silent"))

    async def shared() -> bool:
        beat()
        return "beating" in index.beats()

    with writes_held(tmp_path / "index"):
        tasks.start()
        await wait_until_async(hidden)
        assert nodes.is_alive(NodeId("beating"))
        assert index.beats() == {}
    await wait_until_async(shared)
    await tasks.stop()
    await thread.close()
    index.close()


async def test_server_stop_ends_while_write_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_server, "_STOP_S", 0.2)
    config = MetadataConfig(index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    server = metadata_server.MetadataServer(config)
    async with connect_aio(await server.start()) as channel:
        with writes_held(tmp_path / "index"):
            registration = asyncio.create_task(Peer(channel).register())
            await wait_until_async(lambda: "metadata-writes_0" in {thread.name for thread in threading.enumerate()})
            await server.stop(0.0)
            with pytest.raises(KVStoreError):
                await registration
    await asyncio.get_running_loop().shutdown_default_executor()  # waits for threads that still run
    LmdbIndex.open(tmp_path / "index").close()  # the server has closed it


async def test_maintenance_shares_heartbeats_beside_slow_changes(tmp_path: Path) -> None:
    """A publish waits for a lost shard for seconds. The heartbeats must not wait until it ends."""
    index, thread, counters = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), Counters()
    boot_id = BootId(b"b" * 16)
    register_node(index, NodeInfo(node_id="n", boot_id=boot_id))
    nodes = NodeTable(index, MonotonicClock(), 60.0, counters)
    ended = threading.Event()
    change = asyncio.create_task(thread.run(ended.wait))
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, roles=AllRoles(), on_tick=[])
    tasks.start()
    assert nodes.record_heartbeat(HeartbeatRequest(node_id="n", boot_id=boot_id, sequence=7))

    async def shared() -> bool:
        return index.beats() == {"n": Beat(boot_id, 7, 7)}

    try:
        await wait_until_async(shared)
        assert not change.done()
    finally:
        ended.set()
    await change
    await tasks.stop()
    await thread.close()
    index.close()
