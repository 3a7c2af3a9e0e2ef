"""Tests of the end of a publish stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from kvproto.v1.metadata_pb2 import PublishRequest
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Internal
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.publish_stream import PublishStream
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[PublishStream]:
    index, thread, counters = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), Counters()
    yield PublishStream(index, thread, NodeTable(index, MonotonicClock(), 60.0, counters), counters)
    await thread.close()
    index.close()


async def broken(error: Exception) -> AsyncIterator[PublishRequest]:
    raise error
    yield PublishRequest()


async def test_publish_stream_server_stopped_ends_quietly(stream: PublishStream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stopped = grpc.aio.UsageError("Server already stopped.")
    assert [sequence async for sequence in stream.run(broken(stopped))] == []
    assert [record.levelname for record in caplog.records] == ["INFO"]


async def test_publish_stream_unexpected_error_is_internal(stream: PublishStream, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Internal, match="cannot be read"):
        [sequence async for sequence in stream.run(broken(OSError("what is this")))]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
