"""The index in a real cluster of three shards passes the suite of every index: in Valkey, and in Redis 7 by a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import PrefixIndex
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.testing.index.suite import IndexSuite


def open_at(seeds: Path) -> ValkeyIndex:
    """Open the index whose seeds a file names."""
    return ValkeyIndex.open(ValkeyAddress(tuple(seeds.read_text().split())), lookup_budget_s=5.0)


@pytest.fixture(scope="module", params=["valkey-server", "redis-server"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    program = find_server(request.param)
    if program is None:
        pytest.skip(f"no {request.param} here")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=3, program=program) as cluster:
        yield cluster


class TestValkeyIndex(IndexSuite):
    process_opener: ClassVar[str | None] = "tests.index.test_index_valkey:open_at"
    whole_batches: ClassVar[bool] = False

    @pytest.fixture
    def place(self, tmp_path: Path, cluster: ValkeyServers) -> Path:
        for server in cluster.servers:
            server.call("FLUSHALL")
        place = tmp_path / "seeds"
        place.write_text(" ".join(cluster.seeds))
        return place

    def open_index(self, place: Path) -> PrefixIndex:
        return open_at(place)
