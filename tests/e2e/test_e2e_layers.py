"""Layer-wise loads by every kind of client, of blocks that were removed after their lookup.

At each announcement, every promised block must have its own bytes up to that layer. The test checks this before the loading
thread continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from conftest import Engine, Store
from kvclient import LoadResult, Lookup, Paths
from kvclient.load.layerwise import LayerBarrier
from kvstore.core.types import Outcome
from kvstore.embedded.cluster import NodeSpec

MIB = 1 << 20
LAYERS = 4
BLOCKS = 100
FILLER = 0xEE
MakeStore = Callable[..., Store]
CLIENTS = [(node, paths) for node in (None, "n1", "n2") for paths in (None, Paths(decode_node="n2"), Paths(decode_node="n1"))]


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store(NodeSpec("n1", dram_bytes=32 * MIB), NodeSpec("n2", dram_bytes=32 * MIB))


@contextmanager
def looked_at(data: np.ndarray, wanted: np.ndarray) -> Iterator[list[tuple[int, int, bool]]]:  # type: ignore[type-arg]
    """Each announcement as (layers, promised blocks, whether their bytes are correct)."""
    seen: list[tuple[int, int, bool]] = []
    advance = LayerBarrier.advance

    def look(gate: LayerBarrier, layers: int) -> None:
        blocks = gate.promised_blocks
        upto = layers * (data.shape[1] // LAYERS)
        seen.append((layers, blocks, np.array_equal(data[:blocks, :upto], wanted[:blocks, :upto])))
        advance(gate, layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerBarrier, "advance", look)
        yield seen


def load(
    engine: Engine, found: Lookup, paths: Paths | None, verify: str = "auto"
) -> tuple[LoadResult, list[tuple[int, int, bool]]]:
    wanted, data = engine.allocate(len(found.keys)), engine.allocate(len(found.keys))
    engine.payloads.fill(found.keys, wanted)
    data[:] = FILLER
    size = data.shape[1] // LAYERS
    with looked_at(data, wanted) as seen:
        handle = engine.client.start_load(found, data, paths=paths, verify=verify)  # type: ignore[arg-type]
        for layer in range(LAYERS):
            assert handle.wait_layer(layer)
            blocks, upto = handle.promised_blocks, (layer + 1) * size
            assert np.array_equal(data[:blocks, :upto], wanted[:blocks, :upto])
        result = handle.result()
    assert all(good for _, _, good in seen), seen
    assert handle.promised_blocks == result.hit_blocks
    hits = result.outcomes == Outcome.HIT
    assert np.array_equal(data[hits], wanted[hits])
    return result, seen


def test_layers_removed_blocks_are_not_promised(store: Store) -> None:
    writer = store.engine("n1", layers=LAYERS)
    for number, (node, paths) in enumerate(CLIENTS):
        chain = f"gone {number}"
        reader = store.engine(node, layers=LAYERS)
        assert writer.store(chain, BLOCKS, wait_visible=True).held_blocks == BLOCKS
        found = reader.client.lookup(reader.keys(chain, BLOCKS))
        assert found.hit_blocks == BLOCKS
        store.empty_dram("n1")
        assert writer.store(chain, 10).held_blocks == 10
        result, seen = load(reader, found, paths)
        assert result.hit_blocks == 10, (node, paths)
        assert [layers for layers, _, _ in seen][-1] == LAYERS
        assert {blocks for _, blocks, _ in seen} == {10}


def test_layers_missing_block_ends_the_promise(store: Store) -> None:
    writer = store.engine("n1", layers=LAYERS)
    for number, (node, paths) in enumerate(CLIENTS):
        chain = f"hole {number}"
        reader = store.engine(node, layers=LAYERS)
        keys = writer.keys(chain, BLOCKS)
        assert writer.store(chain, BLOCKS, wait_visible=True).held_blocks == BLOCKS
        found = reader.client.lookup(keys)
        assert found.hit_blocks == BLOCKS
        store.empty_dram("n1")
        assert writer.store(chain, 10).held_blocks == 10
        rest = writer.allocate(BLOCKS - 20)
        writer.payloads.fill(keys[20:], rest)
        assert writer.client.store(keys[20:], rest, parent=keys[19], depth=20).error is None
        result, seen = load(reader, found, paths, verify="always")
        assert result.hit_blocks == 10, (node, paths)
        assert {blocks for _, blocks, _ in seen} == {10}


def test_layers_blocks_of_other_nodes_are_awaited(store: Store) -> None:
    writers = [store.engine(node, layers=LAYERS) for node in ("n1", "n2")]
    for number, (node, paths) in enumerate(CLIENTS):
        chain = f"twice {number}"
        reader = store.engine(node, layers=LAYERS)
        for writer, blocks in zip(writers, (BLOCKS, 60), strict=True):
            assert writer.store(chain, blocks, wait_visible=True).held_blocks == blocks
        found = reader.client.lookup(reader.keys(chain, BLOCKS))
        assert found.hit_blocks == BLOCKS
        store.empty_dram("n1")
        assert writers[0].store(chain, 10).held_blocks == 10
        result, seen = load(reader, found, paths)
        assert result.hit_blocks == 60, (node, paths)
        assert {blocks for _, blocks, _ in seen} == {60}
        store.empty_dram("n2")


def test_layers_continue_without_a_dead_node(store: Store) -> None:
    writers = [store.engine(node, layers=LAYERS) for node in ("n1", "n2")]
    found = {}
    for number in range(2):
        keys = writers[0].keys(f"dead {number}", BLOCKS)
        data = writers[0].allocate(BLOCKS)
        writers[0].payloads.fill(keys, data)
        assert writers[0].client.store(keys[:40], data[:40], wait_visible=True).held_blocks == 40
        part = {"parent": keys[39], "depth": 40, "wait_visible": True}
        assert writers[1].client.store(keys[40:], data[40:], **part).held_blocks == BLOCKS - 40  # type: ignore[arg-type]
        for node in (None, "n1"):
            reader = store.engine(node, layers=LAYERS)
            found[node, number] = reader, reader.client.lookup(keys)
            assert found[node, number][1].hit_blocks == BLOCKS
    store.cluster.kill("n2")
    for (_, number), (reader, lookup) in found.items():
        result, seen = load(reader, lookup, Paths(decode_node="n2") if number else None)
        assert result.hit_blocks == 40
        assert {blocks for _, blocks, _ in seen} == {40}
