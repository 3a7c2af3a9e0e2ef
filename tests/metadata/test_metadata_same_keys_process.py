"""Nodes publish the same keys at different servers at the same time, over a real Valkey: no replica is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from metadata_harness import NAMESPACE, Peer, ServerProcess, run_of, server_process

from kvstore.core.types import NamespaceId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import VolumeEpoch
from kvstore.index.record import decode
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import TAGS
from kvstore.rpc.client import connect_aio
from samples import sample
from support.chains import chain

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here"),
    pytest.mark.timeout(1_200),
]

BLOCKS = 1_000
CHAINS = [chain(f"same-{number}", BLOCKS) for number in range(sample(20, of=1_000))]
READ_RANGES = 256


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path / "valkey", shards=2) as cluster:
        yield cluster


@pytest.fixture
def servers(tmp_path: Path, cluster: ValkeyServers) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        found = []
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            found.append(stack.enter_context(server_process(tmp_path / name, ttl_ms=60_000, engine=cluster.url)))
        yield found


def holders(cluster: ValkeyServers) -> dict[bytes, dict[VolumeEpoch, int]]:
    """The replicas of all keys, each with the start of its run."""
    found: dict[bytes, dict[VolumeEpoch, int]] = {}
    index = ValkeyIndex.open(ValkeyAddress(cluster.seeds), lookup_budget_s=5.0)
    try:
        assert [namespace for namespace, _ in index.namespaces()] in ([], [NamespaceId(NAMESPACE)])
        for first in range(0, len(TAGS), READ_RANGES):
            for key, value in index.records_in_ranges(first, READ_RANGES):
                flat = decode(value)[2:]
                found[key] = dict(zip(map(VolumeEpoch, flat[::2]), flat[1::2], strict=True))
    finally:
        index.close()
    return found


async def test_same_keys_published_at_once_keep_all_replicas(cluster: ValkeyServers, servers: list[ServerProcess]) -> None:
    async with AsyncExitStack() as stack:
        peers = []
        for number, server in enumerate(servers):
            channel = await stack.enter_async_context(connect_aio(server.address))
            peers.append(Peer(channel, f"host-{number}"))
            await peers[-1].register()

        for keys in CHAINS:  # batch by batch, so that no server runs ahead
            await asyncio.gather(*(peer.publish(peer.nvme, run_of(keys)) for peer in peers))
        counters = [await peer.counters() for peer in peers]
        found = holders(cluster)
        expected = {key for keys in CHAINS for key in keys}
        lacking = sum(len(found.get(key, ())) != len(peers) for key in expected)
        races = [one.get("index_races_total", 0) for one in counters]
        given_up = [one.get("index_races_lost_total", 0) for one in counters]
        print(f"{len(expected)} keys, records changed by both at once {races}, given up {given_up}, lacking a replica {lacking}")
        assert sum(races) > 0, "the servers did race"
        assert found.keys() == expected
        assert lacking == 0
        assert all(starts == dict.fromkeys(starts, 0) for starts in found.values()), "each run begins at the head"
