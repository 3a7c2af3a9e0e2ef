"""Prompts larger than the arena: loads and stores, one at a time, layer by layer, and many at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import Engine, Store
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import NodeSpec

MIB = 1 << 20
ARENA = 4 * MIB
LAYERS = 4
SLACK_S = 60.0
"""Deadline of operations that need at most a second: a load that waits for its own leases reaches it."""


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store(NodeSpec("n1", dram_bytes=ARENA, nvme_bytes=128 * MIB))


def filled(store: Store, seed: int, chains: int) -> tuple[Engine, int]:
    """Durable chains of seeded lengths and block sizes, each larger than the arena, with no block in DRAM."""
    draw = random.Random(seed)
    engine = store.engine("n1", layers=LAYERS, layer_bytes=4096 * draw.choice((1, 3, 8, 16)))
    blocks = int(ARENA * draw.uniform(1.3, 3.0)) // engine.spec.block_bytes
    for chain in range(chains):
        stored = engine.store(f"{seed}/{chain}", blocks, durable=True, deadline_s=SLACK_S)
        assert stored.held_blocks == blocks, stored.error
        assert stored.durable
    store.cluster.stop("n1")
    store.cluster.start_node("n1")
    return store.engine("n1", layers=LAYERS, layer_bytes=engine.spec.layer_block_bytes), blocks


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_small_arena_larger_load_completes(store: Store, seed: int) -> None:
    engine, blocks = filled(store, seed, 1)
    for _ in range(3):  # from disk only, then with part of its head in DRAM
        loaded = engine.load(f"{seed}/0", blocks, deadline_s=SLACK_S)
        assert loaded.hit_blocks == blocks, loaded.error
    assert engine.client.stats().get("client_lease_expired_blocks_total", 0) == 0


def test_small_arena_block_above_it_refuses_the_session(store: Store) -> None:
    with pytest.raises(InvalidArgument, match="does not fit the volume: enlarge the volume, or take fewer tokens per block"):
        store.engine("n1", layers=LAYERS, layer_bytes=ARENA // 2)


@pytest.mark.parametrize("seed", [10, 11])
def test_small_arena_concurrent_loads_complete(store: Store, seed: int) -> None:
    engine, blocks = filled(store, seed, 4)
    with ThreadPoolExecutor(8) as pool:  # each chain twice: a load waits for blocks that another one reads
        loads = [pool.submit(engine.load, f"{seed}/{chain}", blocks, deadline_s=SLACK_S) for chain in (0, 1, 2, 3, 3, 2, 1, 0)]
    assert [load.result().hit_blocks for load in loads] == [blocks] * len(loads)


def test_small_arena_layerwise_load_becomes_blockwise(store: Store) -> None:
    engine, blocks = filled(store, 20, 1)
    keys, data, wanted = engine.keys("20/0", blocks), engine.allocate(blocks), engine.allocate(blocks)
    engine.payloads.fill(keys, wanted)
    handle = engine.client.start_load(engine.client.lookup(keys), data, deadline_s=SLACK_S)
    handle.wait_layer(LAYERS - 1)
    assert handle.result().hit_blocks == blocks
    assert np.array_equal(data, wanted)
    assert engine.client.stats()["client_layerwise_too_large_total"] == 1


def test_small_arena_layerwise_tail_after_full_head(store: Store) -> None:
    engine = store.engine("n1", layers=LAYERS, layer_bytes=16384)
    most = ARENA // engine.spec.block_bytes
    blocks = most + most // 4
    assert engine.store("rest", blocks, durable=True, deadline_s=SLACK_S).durable
    keys, wanted = engine.keys("rest", blocks), engine.allocate(blocks)
    engine.payloads.fill(keys, wanted)
    for head in range(most - 12, most):  # it leaves space for a few others, whose ancestors must stay
        store.evict("n1")
        assert engine.load_keys(keys[:head], deadline_s=SLACK_S).hit_blocks == head
        rest = keys[head : head + most // 4]
        data = engine.allocate(len(rest))
        handle = engine.client.start_load(rest, data, parent=keys[head - 1], depth=head, deadline_s=SLACK_S)
        assert handle.result().hit_blocks == len(rest)
        assert np.array_equal(data, wanted[head : head + len(rest)])
    assert "client_layerwise_too_large_total" not in engine.client.stats()
