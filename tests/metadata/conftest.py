"""Fixtures: a metadata server in this process on a real socket, with a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from metadata_harness import Running

from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import ManualClock
from kvstore.metadata.server import MetadataServer
from kvstore.rpc.client import connect_aio


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    clock = ManualClock()
    config = MetadataConfig(
        index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=64 << 20, heartbeat_interval_ms=20, node_ttl_ms=100
    )
    server = MetadataServer(config, clock=clock)
    address = await server.start()
    async with connect_aio(address) as channel:
        yield Running(server, clock, channel, address)
    await server.stop(0.0)
