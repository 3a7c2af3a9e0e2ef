"""A pool with loads over several hosts' storage links: blocks in the pool need no link, and loaded blocks stay in the pool."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvclient import CacheSpec, ClientOptions, KVClient, Lookup, Paths, Tier
from kvclient.hbm import HbmPool
from kvclient.results import PATH_HBM
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.node_stats import evict

SPEC = CacheSpec(model="hbm-planned", block_tokens=16, layers=4, layer_block_bytes=4096)
BLOCKS = 40
MIB = 1 << 20
SETTINGS = (("cache_loads", "false"),)
PATHS = Paths(decode_node="d", policy="split")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = (
        NodeSpec("s", roles=("storage",), dram_bytes=32 * MIB, nvme_bytes=64 * MIB, settings=SETTINGS),
        NodeSpec("p", dram_bytes=32 * MIB, write_back_to="s"),
        NodeSpec("d", roles=("decode",), dram_bytes=32 * MIB, settings=SETTINGS),
    )
    with LocalCluster(nodes) as cluster:
        yield cluster


def stored(cluster: LocalCluster, client: KVClient, pool: HbmPool, seed: int) -> tuple[list[BlockKey], np.ndarray, Lookup]:  # type: ignore[type-arg]
    """A chain only on the storage node's disk."""
    random = np.random.default_rng(seed)
    keys = client.keys(random.integers(0, 1 << 17, BLOCKS * SPEC.block_tokens, dtype=np.uint32))
    data = np.frombuffer(random.bytes(BLOCKS * SPEC.block_bytes), np.uint8).reshape(BLOCKS, SPEC.layers, -1)
    assert client.store(keys, data, durable=True).durable
    pool.evict(demote=False)
    end = time.monotonic() + 20
    while True:
        for node in ("s", "p", "d"):
            evict(cluster, node)
        lookup = client.lookup(keys)
        if lookup.hit_blocks == BLOCKS and {run.tier for run in lookup.runs} == {Tier.NVME}:
            return keys, data, lookup
        assert time.monotonic() < end, "it does not lie in storage alone"
        time.sleep(0.05)


def test_planned_load_combines_pool_and_nodes(cluster: LocalCluster) -> None:
    options = ClientOptions(default_deadline_s=20.0, verify="always")
    with HbmPool("cpu", capacity_bytes=32 * MIB, metadata=cluster.metadata_address) as pool:
        address = cluster.node("p").local_socket
        with KVClient.connect(cluster.metadata_address, SPEC, node=address, options=options, hbm=pool) as client:
            keys, data, lookup = stored(cluster, client, pool, 1)
            for had in (0, 15, BLOCKS):
                if had == 15:
                    assert pool.evict(demote=False) == BLOCKS
                    head = pool.blocks(SPEC)
                    assert head.insert(keys[:15], None, 0, DenseBlocks(data[:15]), None, checksums=True) == 15
                out = np.zeros_like(data)
                handle = client.start_load(lookup, out, paths=PATHS)
                for layer in range(SPEC.layers):
                    assert handle.wait_layer(layer)
                    assert handle.promised_blocks == BLOCKS
                    assert np.array_equal(out[:, layer], data[:, layer])
                result = handle.result()
                assert result.hit_blocks == BLOCKS
                assert np.array_equal(out, data)
                assert result.bytes_by_path.get(PATH_HBM, 0) == had * SPEC.block_bytes
                assert pool.usage().blocks == BLOCKS
