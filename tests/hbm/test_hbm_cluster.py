"""Pools of real engines with a real store: other engines see and read a pool's blocks until eviction or the engine's death."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvclient import CacheSpec, ClientOptions, InvalidArgument, KVClient, Lookup, Tier
from kvclient.hbm import HbmPool
from kvclient.results import PATH_HBM, PATH_LOCAL, PATH_PREFILL
from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey
from kvstore.embedded import children
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.node_stats import evict
from support.wait import wait_until

SPEC = CacheSpec(model="hbm-cluster", block_tokens=16, layers=4, layer_block_bytes=4096)
OPTIONS = ClientOptions(reopen_pause_s=0.05, breaker_pause_s=0.1, default_deadline_s=20.0)
BLOCKS = 40

Connect = Callable[..., KVClient]


def tokens(blocks: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 1 << 17, blocks * SPEC.block_tokens, dtype=np.uint32)


def content(blocks: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(seed + 1).bytes(blocks * SPEC.block_bytes), np.uint8).reshape(blocks, -1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("prefill", dram_bytes=48 << 20)], metadata_settings=[("node_ttl", "1s")]) as cluster:
        yield cluster


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pool(cluster: LocalCluster, stack: ExitStack) -> HbmPool:
    return stack.enter_context(HbmPool("cpu", capacity_bytes=32 << 20, metadata=cluster.metadata_address))


@pytest.fixture
def connect(cluster: LocalCluster, stack: ExitStack) -> Connect:
    def make(node: str | None = "prefill", pool: HbmPool | None = None, **settings: object) -> KVClient:
        address = cluster.node(node).local_socket if node is not None else None
        options = ClientOptions(**{"reopen_pause_s": 0.05, "default_deadline_s": 20.0, **settings})  # type: ignore[arg-type]
        return stack.enter_context(KVClient.connect(cluster.metadata_address, SPEC, node=address, options=options, hbm=pool))

    return make


def tiers_of(lookup: Lookup) -> set[Tier]:
    return {run.tier for run in lookup.runs}


def test_pool_with_name_in_use_is_rejected(
    cluster: LocalCluster, connect: Connect, pool: HbmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvclient.hbm.pool_node.REGISTER_WAIT_S", 2.0)
    client = connect(pool=pool)
    keys = client.keys(tokens(4, 90))
    client.store(keys, content(4, 90), wait_visible=True)
    for name in (pool.node_id, "prefill"):
        with pytest.raises(Conflict, match="another live node"):
            HbmPool("cpu", capacity_bytes=1 << 20, metadata=cluster.metadata_address, node_id=name)
    assert pool.wait_published()
    assert Tier.HBM in tiers_of(connect().lookup(keys))


def test_store_copy_in_pool_is_indexed_and_loaded(connect: Connect, pool: HbmPool) -> None:
    data = content(BLOCKS, 1)
    client = connect(pool=pool, verify="always")
    keys = client.keys(tokens(BLOCKS, 1))
    assert client.store(keys, data, wait_visible=True).held_blocks == BLOCKS
    assert pool.usage().blocks == BLOCKS
    assert pool.wait_published()
    lookup = connect().lookup(keys)
    assert lookup.hit_blocks == BLOCKS
    assert {run.node_id for run in lookup.runs if run.tier is Tier.HBM} == {pool.node_id}
    out = np.zeros_like(data)
    result = client.load(lookup, out, verify="always")
    assert np.array_equal(out, data)
    assert result.bytes_by_path == {PATH_HBM: data.nbytes}
    assert result.bytes_by_tier == {Tier.HBM: data.nbytes}
    assert result.bytes_by_node == {pool.node_id: data.nbytes}


def test_load_promotes_blocks_to_the_pool(connect: Connect, pool: HbmPool) -> None:
    data = content(BLOCKS, 2)
    writer = connect()
    keys = writer.keys(tokens(BLOCKS, 2))
    writer.store(keys, data, wait_visible=True)
    client = connect(pool=pool)
    for path in (PATH_LOCAL, PATH_HBM):
        out = np.zeros_like(data)
        result = client.load(client.lookup(keys), out)
        assert (result.hit_blocks, set(result.bytes_by_path)) == (BLOCKS, {path})
        assert np.array_equal(out, data)


def test_load_combines_pool_head_and_node_rest(connect: Connect, pool: HbmPool) -> None:
    data = content(BLOCKS, 3)
    client, writer = connect(pool=pool), connect()
    keys = client.keys(tokens(BLOCKS, 3))
    client.store(keys[:15], data[:15])
    writer.store(keys[15:], data[15:], parent=keys[14], depth=15, wait_visible=True)
    handle = client.start_load(client.lookup(keys), out := np.zeros_like(data), layerwise=True)
    for layer in range(SPEC.layers):
        assert handle.wait_layer(layer)
        assert handle.promised_blocks == BLOCKS
        at = layer * SPEC.layer_block_bytes
        assert np.array_equal(out[:, at : at + 4096], data[:, at : at + 4096])
    result = handle.result()
    assert result.bytes_by_path == {PATH_HBM: 15 * SPEC.block_bytes, PATH_LOCAL: 25 * SPEC.block_bytes}
    assert np.array_equal(out, data)


@pytest.mark.parametrize("node", ["prefill", None])
def test_peer_reads_block_held_only_by_a_pool(cluster: LocalCluster, connect: Connect, pool: HbmPool, node: str | None) -> None:
    """Reads use the pool's data plane, directly and through the node of their host."""
    seed = 4 if node else 5
    data = content(BLOCKS, seed)
    client = connect(pool=pool)
    keys = client.keys(tokens(BLOCKS, seed))
    client.store(keys, data, wait_visible=True)
    assert pool.wait_published()
    evict(cluster, "prefill")
    reader = connect(node)
    wait_until(lambda: tiers_of(reader.lookup(keys)) == {Tier.HBM})
    out = np.zeros_like(data)
    result = reader.load(reader.lookup(keys), out, verify="always")
    assert np.array_equal(out, data)
    assert result.bytes_by_path == {PATH_PREFILL: data.nbytes}
    assert result.bytes_by_node == {pool.node_id: data.nbytes}
    assert pool.stats()["transport_bytes_sent_total"] >= data.nbytes


def test_node_is_preferred_to_other_engines_pool(connect: Connect, pool: HbmPool) -> None:
    data = content(BLOCKS, 6)
    client = connect(pool=pool)
    keys = client.keys(tokens(BLOCKS, 6))
    client.store(keys, data, wait_visible=True)
    assert pool.wait_published()
    reader = connect(None)
    wait_until(lambda: tiers_of(reader.lookup(keys)) == {Tier.HBM, Tier.DRAM})
    assert set(reader.load(reader.lookup(keys), np.zeros_like(data)).bytes_by_node) == {"prefill"}


def test_evicted_block_is_unpublished_and_demoted(cluster: LocalCluster, connect: Connect) -> None:
    """Demotion: the node had evicted blocks that were hot in the pool."""
    capacity = 64 * SPEC.block_bytes
    with HbmPool("cpu", capacity_bytes=capacity, metadata=cluster.metadata_address, space_wait_s=5.0) as pool:
        client, reader = connect(pool=pool), connect()
        first = client.keys(tokens(BLOCKS, 7))
        data = content(BLOCKS, 7)
        client.store(first, data, wait_visible=True)
        assert pool.wait_published()
        evict(cluster, "prefill")
        wait_until(lambda: tiers_of(reader.lookup(first)) == {Tier.HBM})
        for seed in (8, 9):
            client.store(client.keys(tokens(BLOCKS, seed)), content(BLOCKS, seed))
        assert pool.wait_published()
        wait_until(lambda: Tier.DRAM in tiers_of(reader.lookup(first)))
        assert reader.lookup(first).hit_blocks == BLOCKS
        out = np.zeros_like(data)
        assert reader.load(reader.lookup(first), out, verify="always").hit_blocks == BLOCKS
        assert np.array_equal(out, data)
        assert pool.stats()["hbm_demoted_blocks_total"] > 0
        client.close()
    wait_until(lambda: Tier.HBM not in tiers_of(reader.lookup(first)))  # closed: all its blocks are withdrawn at once


def test_stale_index_costs_only_a_pool_miss(connect: Connect, pool: HbmPool) -> None:
    data = content(BLOCKS, 10)
    client = connect(pool=pool)
    keys = client.keys(tokens(BLOCKS, 10))
    client.store(keys, data, wait_visible=True)
    assert pool.wait_published()
    lookup = client.lookup(keys)
    assert pool.evict() == pool.stats()["hbm_demoted_blocks_total"]
    reader = connect(None)
    for one, path in ((client, PATH_LOCAL), (reader, PATH_PREFILL)):
        out = np.zeros_like(data)
        result = one.load(lookup, out)
        assert (result.hit_blocks, set(result.bytes_by_path)) == (BLOCKS, {path})
        assert np.array_equal(out, data)


ENGINE = """
import sys
import numpy as np
from kvclient import CacheSpec, KVClient
from kvclient.hbm import HbmPool
spec = CacheSpec(model="hbm-cluster", block_tokens=16, layers=4, layer_block_bytes=4096)
pool = HbmPool("cpu", capacity_bytes=32 << 20, metadata=sys.argv[1])
client = KVClient.connect(sys.argv[1], spec, node=sys.argv[2], hbm=pool)
keys = client.keys(np.random.default_rng(11).integers(0, 1 << 17, 40 * 16, dtype=np.uint32))
client.store(keys, np.random.default_rng(12).bytes(40 * spec.block_bytes), wait_visible=True)
assert pool.wait_published()
print(pool.node_id, flush=True)
sys.stdin.read()
"""


def test_pool_of_dead_engine_is_hidden(cluster: LocalCluster, connect: Connect) -> None:
    arguments = [sys.executable, "-c", ENGINE, cluster.metadata_address, cluster.node("prefill").local_socket]
    with children.start(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            node_id = engine.stdout.readline().decode().strip()
            reader = connect(None)
            keys = reader.keys(tokens(BLOCKS, 11))
            evict(cluster, "prefill")
            wait_until(lambda: {run.node_id for run in reader.lookup(keys).runs} == {node_id})
            lookup = reader.lookup(keys)
            out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
            assert reader.load(lookup, out, verify="always").hit_blocks == BLOCKS  # another process reads it
            assert np.array_equal(out, content(BLOCKS, 11))
        finally:
            engine.kill()
        engine.wait(10)
    assert reader.load(lookup, out, deadline_s=5.0).hit_blocks == 0  # bounded, and no byte of it counts
    wait_until(lambda: reader.lookup(keys).hit_blocks == 0)


def test_pool_receives_no_stores_of_other_clients(connect: Connect, pool: HbmPool) -> None:
    """A client without a local node chooses a node, never a pool."""
    writer = connect(None)
    keys: list[BlockKey] = writer.keys(tokens(4, 13))
    assert writer.store(keys, content(4, 13)).held_blocks == 4
    assert pool.usage().blocks == 0


def test_pool_registers_when_metadata_server_starts(connect: Connect, cluster: LocalCluster) -> None:
    """No server listens at that address; the engine still starts."""
    with HbmPool("cpu", capacity_bytes=1 << 20, metadata="127.0.0.1:9") as pool:
        assert pool.stats()["hbm_not_registered_at_start_total"] == 1
        client = connect(pool=pool)
        keys = client.keys(tokens(4, 14))
        client.store(keys, content(4, 14))
        assert client.load(keys, np.zeros((4, SPEC.block_bytes), np.uint8)).bytes_by_path == {PATH_HBM: 4 * SPEC.block_bytes}


def test_layerwise_store_leaves_a_pool_copy(connect: Connect, pool: HbmPool) -> None:
    """With a node the bytes are only in its arena; without one the client gathers them."""
    for node, seed in (("prefill", 15), (None, 16)):
        data = content(BLOCKS, seed).reshape(BLOCKS, SPEC.layers, -1)
        client = connect(node, pool=pool, verify="always")
        keys = client.keys(tokens(BLOCKS, seed))
        if node is not None:  # the head is there already and is not written again
            client.store(keys[:9], data[:9])
        pool.evict()
        with client.begin_store(keys) as store:
            for layer in range(SPEC.layers):
                store.put_layer(layer, np.ascontiguousarray(data[:, layer]))
            assert store.commit().held_blocks == BLOCKS
        assert pool.usage().blocks == (BLOCKS if node is None else BLOCKS - 9)
        out = np.zeros_like(data)
        assert client.load(keys, out).hit_blocks == BLOCKS
        assert np.array_equal(out, data)
        assert set(client.load(keys, out).bytes_by_path) == {PATH_HBM}


def test_two_pools_read_from_each_other(cluster: LocalCluster, connect: Connect, pool: HbmPool) -> None:
    with HbmPool("cpu", capacity_bytes=16 << 20, metadata=cluster.metadata_address) as other:
        data = content(BLOCKS, 17)
        one, two = connect(pool=pool), connect(None, pool=other)
        keys = one.keys(tokens(BLOCKS, 17))
        one.store(keys, data)
        assert pool.wait_published()
        evict(cluster, "prefill")
        wait_until(lambda: tiers_of(two.lookup(keys)) == {Tier.HBM})
        for source in (pool.node_id, other.node_id):
            out = np.zeros_like(data)
            assert set(two.load(two.lookup(keys), out, verify="always" if source == pool.node_id else "auto").bytes_by_node) == {
                source
            }
            assert np.array_equal(out, data)


def test_connect_with_invalid_pool_is_rejected(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidArgument, match="argument"):
        KVClient.connect(cluster.metadata_address, SPEC, node=None, hbm="cuda:0")  # type: ignore[arg-type]
    huge = CacheSpec(model="huge", block_tokens=16, layers=4, layer_block_bytes=1 << 20)
    with HbmPool("cpu", capacity_bytes=1 << 20) as pool, pytest.raises(InvalidArgument, match="fit"):
        KVClient.connect(cluster.metadata_address, huge, node=None, hbm=pool)


def test_restarted_metadata_server_relearns_pool() -> None:
    with LocalCluster([], metadata_settings=[("node_ttl", "1s")]) as cluster, ExitStack() as stack:
        pool = stack.enter_context(HbmPool("cpu", capacity_bytes=16 << 20, metadata=cluster.metadata_address))
        client = stack.enter_context(KVClient.connect(cluster.metadata_address, SPEC, node=None, options=OPTIONS, hbm=pool))
        data = content(BLOCKS, 18)
        keys = client.keys(tokens(BLOCKS, 18))
        assert client.store(keys[:20], data[:20]).held_blocks == 0  # without a node the pool still keeps the blocks
        assert pool.usage().blocks == 20
        assert pool.wait_published()
        cluster.kill("metadata")
        assert client.load(keys[:20], np.zeros_like(data[:20])).bytes_by_path == {PATH_HBM: 20 * SPEC.block_bytes}
        client.store(keys[20:], data[20:], parent=keys[19], depth=20)
        cluster.start_metadata()
        wait_until(lambda: client.lookup(keys).hit_blocks == BLOCKS, timeout_s=30.0)
        assert {run.node_id for run in client.lookup(keys).runs} == {pool.node_id}
