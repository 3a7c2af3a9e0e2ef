"""Tests of ``kvclient.events`` with a real server process that is killed and restarted, with and without its index."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from metadata_harness import Peer, run_of, server_process

from kvclient.events import BlockMirror, BlockWatcher, Change
from kvclient.events import watcher as watcher_module
from kvstore.core.errors import DeadlineExceeded, Internal, InvalidArgument
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.client import connect_aio
from support.chains import chain
from support.wait import wait_until_async

KEYS = chain("a", 50)
WAIT_S = 30.0


async def mirrors(watcher: BlockWatcher, expected: Sequence[bytes]) -> None:
    """Wait until the watcher's mirror is complete and has exactly these keys."""

    async def so() -> bool:
        found: list[bool] = []
        watcher.read(lambda mirror: found.append(mirror.complete and set(mirror) == set(expected)))
        return found[0]

    await wait_until_async(so)


async def test_watcher_full_mirror_ignores_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_BEGIN_AGAIN_S", 0.0)
    with server_process(tmp_path) as server, BlockWatcher(server.address, most_blocks=20) as watcher:
        watcher.wait_complete(WAIT_S)
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS, 0, 40), sync_end=True)
            await mirrors(watcher, KEYS[:20])
            assert watcher.counters.snapshot()[client_metrics.EVENTS_IGNORED_BLOCKS] == 20
            await peer.send(peer.batch(peer.nvme, removed=KEYS[:30]))
            await mirrors(watcher, KEYS[30:40])


async def test_watcher_survives_server_and_index_loss(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, BlockWatcher(server.address) as watcher:
        watcher.wait_complete(WAIT_S)
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS, 0, 40), sync_end=True)
            await mirrors(watcher, KEYS[:40])
        server.stop(signal.SIGKILL)
        assert len(watcher.holders(BlockKey(KEYS[0]))) == 1  # a hint, until the next snapshot
        server.start()
        async with connect_aio(server.address) as channel:
            node = Peer(channel)
            node.boot_id, node.sequence = peer.boot_id, peer.sequence
            await node.publish(node.nvme, run_of(KEYS, 40))
            await mirrors(watcher, KEYS)
        server.stop(signal.SIGKILL)
        shutil.rmtree(tmp_path / "index")
        server.start()
        await mirrors(watcher, [])
        async with connect_aio(server.address) as channel:
            node = Peer(channel)
            node.boot_id = peer.boot_id
            await node.register()
            await node.publish(node.nvme, run_of(KEYS, 0, 7), sync_end=True)
            await mirrors(watcher, KEYS[:7])
            with BlockWatcher(server.address) as other:  # a subscriber that was restarted
                other.wait_complete(WAIT_S)
                await mirrors(other, KEYS[:7])
        assert server.stop() == 0  # despite the open subscription
        counted = watcher.counters.snapshot()
        assert counted["client_events_resyncs_total"] == 3
        assert counted["client_events_failures_total"] >= 2


async def test_watcher_reports_each_change(tmp_path: Path) -> None:
    seen: list[tuple[bool, int, int]] = []
    told = threading.Event()

    def on_change(mirror: BlockMirror, change: Change) -> None:
        seen.append((change.whole, sum(len(run.keys) for run in change.runs), len(change.keys)))
        if len(mirror) == 10 and mirror.complete:
            told.set()

    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS, 0, 40))
            with BlockWatcher(server.address, on_change=on_change) as watcher:
                watcher.wait_complete(WAIT_S)
                await peer.publish(peer.dram, run_of(KEYS, 0, 5))
                await peer.send(peer.batch(peer.nvme, removed=KEYS[10:40]))
                await mirrors(watcher, KEYS[:10])
            assert told.is_set()
        assert [entry for entry in seen if entry[0]] == [(True, 0, 0), (True, 0, 0)]
        assert sum(entry[1] for entry in seen) == 5
        assert sum(entry[2] for entry in seen if not entry[0]) >= 70


def test_watcher_without_server_times_out() -> None:
    with BlockWatcher("127.0.0.1:1") as watcher, pytest.raises(DeadlineExceeded):
        watcher.wait_complete(0.05)


async def test_watcher_permanent_error_is_raised(tmp_path: Path) -> None:
    def on_change(mirror: BlockMirror, change: Change) -> None:
        raise LookupError("the caller's own")

    with server_process(tmp_path) as server:
        with BlockWatcher(server.address, on_change=on_change) as watcher, pytest.raises(Internal, match="the caller's own"):
            watcher.wait_complete(WAIT_S)
        with BlockWatcher(server.address, namespaces=[NamespaceId(b"short")]) as watcher, pytest.raises(InvalidArgument):
            watcher.wait_complete(WAIT_S)
