"""The store in normal use: real processes, every loaded byte checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import Store
from kvclient.memory.arena import open_arena
from kvstore.core.errors import PermissionDenied
from kvstore.core.types import Outcome, SessionId, StoreOutcome, Tier
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]


def test_store_is_loaded_by_another_engine(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    writer, reader = store.engine("a"), store.engine("a")
    stored = writer.store("c", 40, wait_visible=True)
    assert set(stored.outcomes) == {StoreOutcome.STORED}
    keys = reader.keys("c", 50)
    lookup = reader.client.lookup(keys)
    assert lookup.hit_blocks == 40
    result = reader.load_keys(keys[:40])
    assert result.hit_blocks == 40
    assert result.bytes_by_tier == {Tier.DRAM: 40 * reader.spec.block_bytes}
    assert set(writer.store("c", 40).outcomes) == {StoreOutcome.EXISTS}


def test_refused_arena_connection_is_counted(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    arena = Path(store.cluster.node("a").local_socket.removeprefix("unix:")).with_suffix(".arena")
    with pytest.raises(PermissionDenied):
        open_arena(arena, SessionId(bytes(16)), 10.0)
    assert store.node_stats("a").counters["arena_connections_refused_total"] == 1


def test_layers_arrive_in_order(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    engine = store.engine("a", layers=8)
    engine.store("c", 16, wait_visible=True)
    keys = engine.keys("c", 16)
    data, whole = engine.allocate(16), engine.allocate(16)
    engine.payloads.fill(keys, whole)
    handle = engine.client.start_load(keys, data)
    by_layer = data.reshape(16, 8, -1)
    for layer in range(8):
        assert handle.wait_layer(layer, 5.0)
        assert np.array_equal(by_layer[:, layer], whole.reshape(16, 8, -1)[:, layer])
    assert handle.result(5.0).hit_blocks == 16


def test_engine_without_node_uses_tcp(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    remote = store.engine(None)
    assert set(remote.store("c", 30).outcomes) == {StoreOutcome.STORED}
    wait_until(lambda: remote.client.lookup(remote.keys("c", 30)).hit_blocks == 30, "published")
    result = remote.load("c", 30)
    assert result.hit_blocks == 30
    assert result.bytes_by_node == {"a": 30 * remote.spec.block_bytes}


def test_node_reads_from_peer_and_keeps_replica(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"), NodeSpec("b"))
    a, b = store.engine("a"), store.engine("b")
    a.store("c", 30, wait_visible=True)
    first = b.load("c", 30)
    assert first.hit_blocks == 30
    assert first.bytes_by_node == {"a": 30 * b.spec.block_bytes}
    assert b.load("c", 30).bytes_by_node == {"b": 30 * b.spec.block_bytes}
    keys = b.keys("c", 30)
    wait_until(lambda: {run.node_id for run in b.client.lookup(keys).runs} == {"a", "b"}, "both replicas in the index")
    store.cluster.kill("a")
    wait_until(lambda: {run.node_id for run in b.client.lookup(keys).runs} == {"b"}, "the dead node hidden")
    assert b.load("c", 30).hit_blocks == 30


def test_durable_blocks_survive_kill(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", nvme_bytes=64 * MIB))
    engine = store.engine("a")
    assert engine.store("c", 50, durable=True).durable
    assert store.evict("a") == 50
    cold = engine.load("c", 50)
    assert cold.hit_blocks == 50
    assert cold.bytes_by_tier == {Tier.NVME: 50 * engine.spec.block_bytes}
    store.cluster.kill("a")
    store.cluster.start_node("a")
    again = store.engine("a")
    wait_until(lambda: again.client.lookup(again.keys("c", 50)).hit_blocks == 50, "inventory published")
    assert again.load("c", 50).bytes_by_tier == {Tier.NVME: 50 * again.spec.block_bytes}


def test_write_back_to_a_storage_node(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("s", roles=("storage",), nvme_bytes=64 * MIB), NodeSpec("a", write_back_to="s"))
    engine = store.engine("a")
    engine.store("c", 40, wait_visible=True)
    assert store.flush("a")
    assert store.node_stats("s").tiers[1].blocks == 40
    store.cluster.kill("a")
    other = store.engine(None)
    wait_until(lambda: other.client.lookup(other.keys("c", 40)).hit_blocks == 40, "the storage node's replicas are known")
    assert other.load("c", 40).bytes_by_node == {"s": 40 * other.spec.block_bytes}


def test_load_larger_than_arena_completes(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=8 * MIB, nvme_bytes=128 * MIB))
    engine = store.engine("a", layers=4, layer_bytes=65536)
    for chain in range(4):
        assert engine.store(f"c{chain}", 16, durable=True).durable
    for chain in range(4):
        assert engine.load(f"c{chain}", 16).hit_blocks == 16
    keys = engine.keys("long", 96)
    data = engine.allocate(96)
    engine.payloads.fill(keys, data)
    assert engine.client.store(keys, data, durable=True, deadline_s=30.0).durable
    assert engine.load("long", 96, deadline_s=30.0).hit_blocks == 96


def test_concurrent_stores_write_chain_once(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    engines = [store.engine("a") for _ in range(4)]
    results = [None] * 4
    barrier = threading.Barrier(4)

    def write(number: int) -> None:
        barrier.wait(10)
        results[number] = engines[number].store("same", 64)  # type: ignore[call-overload]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    outcomes = np.stack([result.outcomes for result in results])  # type: ignore[attr-defined]
    assert (np.count_nonzero(outcomes == StoreOutcome.STORED, axis=0) == 1).all(), "each block is written exactly once"
    assert engines[0].load("same", 64).hit_blocks == 64


@pytest.mark.parametrize("field", ["model", "weights_epoch", "tenant", "dtype"])
def test_namespaces_share_no_block(make_store: MakeStore, field: str) -> None:
    store = make_store(NodeSpec("a"))
    mine, other = store.engine("a"), store.engine("a", **{field: "other"})
    mine.store("c", 10, wait_visible=True)
    keys = mine.keys("c", 10)
    assert keys != other.keys("c", 10)
    assert other.client.lookup(keys).hit_blocks == 0, "even with the keys of another namespace"
    stolen = other.client.load(keys, other.allocate(10))
    assert set(stolen.outcomes) == {Outcome.MISS}
    remote = store.engine(None, **{field: "other"})
    assert 1 not in set(remote.client.load(keys, remote.allocate(10)).outcomes)
