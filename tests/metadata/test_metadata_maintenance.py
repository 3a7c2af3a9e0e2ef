"""Tests of background work if the index rejects changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership import maintenance as upkeep
from kvstore.metadata.membership.maintenance import Maintenance
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.roles.roles import FixedRoles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from support.wait import wait_until_async


def no_space() -> None:
    raise CapacityExceeded("no space on disk")


def bug() -> None:
    raise KeyError("a bug")


async def run_maintenance(tmp_path: Path, tick: Callable[[], None], failures: str) -> None:
    """Run maintenance until a counter of failures has reached five."""
    counters, index, thread = Counters(), LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test")
    nodes = NodeTable(index, MonotonicClock(), 0.08, counters)
    tasks = Maintenance(index, nodes, thread, counters, ttl_s=0.08, forget_s=60.0, roles=FixedRoles(), on_tick=[tick])
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
    assert "node watch failed" in caplog.text
