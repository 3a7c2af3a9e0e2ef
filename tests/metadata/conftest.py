"""Fixtures: a metadata server in this process on a real socket, with a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from metadata_harness import Running, serve


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with serve(tmp_path / "index") as server:
        yield server
