"""Tests of background work if the index rejects changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership import maintenance as upkeep
from kvstore.metadata.membership.maintenance import Maintenance
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog


def no_room() -> None:
    raise CapacityExceeded("no room on disk")


async def test_maintenance_disk_full_logs_rarely_without_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "limited", LimitedLog(logging.getLogger(upkeep.__name__)), raising=False)
    counters, index, thread = Counters(), LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test")
    nodes = NodeTable(index, MonotonicClock(), 0.08, counters)
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, sweeps=False, on_tick=[no_room])
    tasks.start()
    while counters.snapshot().get("metadata_maintenance_failures_total", 0) < 5:  # noqa: ASYNC110  # polling: there is no event
        await asyncio.sleep(0.01)
    await tasks.stop()
    await thread.close()
    index.close()
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    assert "no room on disk" in caplog.text


async def test_maintenance_goes_on_after_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise KeyError("a bug")

    counters, index, thread = Counters(), LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test")
    nodes = NodeTable(index, MonotonicClock(), 0.08, counters)
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, sweeps=True, on_tick=[bug])
    tasks.start()
    while counters.snapshot().get("metadata_background_bugs_total", 0) < 3:  # noqa: ASYNC110  # polling: there is no event
        await asyncio.sleep(0.01)
    await tasks.stop()
    await thread.close()
    index.close()
    assert "node watch failed" in caplog.text
