"""The client against a cluster of real processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvclient import AsyncKVClient, CacheSpec, ClientOptions, KVClient, Outcome, StoreOutcome, Tier
from kvclient.results import PATH_LOCAL, PATH_PREFILL
from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

SPEC = CacheSpec(model="cluster", block_tokens=16, layers=4, layer_block_bytes=4096)
OPTIONS = ClientOptions(reopen_pause_s=0.05, breaker_pause_s=0.1, default_deadline_s=20.0)


def tokens(blocks: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 1 << 17, blocks * SPEC.block_tokens, dtype=np.uint32)


def content(blocks: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(seed + 1).bytes(blocks * SPEC.block_bytes), np.uint8).reshape(blocks, -1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = [
        NodeSpec("prefill", dram_bytes=48 << 20, nvme_bytes=128 << 20),
        NodeSpec("decode", roles=("decode",), dram_bytes=48 << 20),
    ]
    with LocalCluster(nodes) as cluster:
        yield cluster


def connect(cluster: LocalCluster, node: str | None) -> KVClient:
    address = cluster.node(node).local_socket if node is not None else None
    return KVClient.connect(cluster.metadata_address, SPEC, node=address, options=OPTIONS)


def test_store_is_loaded_by_every_kind_of_client(cluster: LocalCluster) -> None:
    blocks = 120
    data = content(blocks, 1)
    with connect(cluster, "prefill") as writer:
        keys = writer.keys(tokens(blocks, 1))
        stored = writer.store(keys, data, wait_visible=True)
        assert (stored.held_blocks, stored.error) == (blocks, None)
        assert writer.store(keys, data).count(StoreOutcome.EXISTS) == blocks
        for node, path in (("prefill", PATH_LOCAL), (None, PATH_PREFILL), ("decode", PATH_PREFILL)):
            with connect(cluster, node) as reader:
                lookup = reader.lookup([*keys, *reader.keys(tokens(2, 2))])
                assert lookup.hit_blocks == blocks
                out = np.zeros_like(data)
                result = reader.load(lookup, out, verify="always")
                assert (result.hit_blocks, result.error) == (blocks, None)
                assert np.array_equal(out, data)
                assert result.bytes_by_path == {path: data.nbytes}
                assert result.bytes_by_node == {"prefill": data.nbytes}
                layers = np.zeros((SPEC.layers, blocks, SPEC.layer_block_bytes), np.uint8)
                with reader.start_load(lookup.part(20, 100), layers[:, 20:100].transpose(1, 0, 2)) as handle:
                    assert all(handle.wait_layer(layer) for layer in range(SPEC.layers))
                    assert handle.result().hit_blocks == 80
                assert np.array_equal(layers[:, 20:100].transpose(1, 0, 2).reshape(80, -1), data[20:100])
                assert not layers[:, :20].any()


@pytest.mark.parametrize("node", ["prefill", None])
def test_heads_of_chains_are_stored_and_loaded(cluster: LocalCluster, node: str | None) -> None:
    """Each head is found alone, through the local node or over TCP. Stored again, it is held."""
    data = content(5, 40)
    with connect(cluster, node) as client:
        keys = client.keys(tokens(5, 40 if node else 41))
        stored = client.store_heads(keys, data)
        assert (stored.held_blocks, stored.bytes_stored, stored.error) == (5, data.nbytes, None)
        assert client.store_heads(keys, data).count(StoreOutcome.EXISTS) == 5
        end_s = time.monotonic() + 10
        while not all(client.lookup([key]).hit_blocks for key in keys):
            assert time.monotonic() < end_s
        for key, block in zip(keys, data, strict=True):
            out = np.zeros_like(block)
            assert client.load([key], out, verify="always").hit_blocks == 1
            assert np.array_equal(out, block)


@pytest.mark.parametrize("reader", ["prefill", "decode", None])
def test_heads_are_looked_up_together(cluster: LocalCluster, reader: str | None) -> None:
    """Any of them may be missing. A node that brings them from another one keeps them as heads."""
    seed = {"prefill": 160, "decode": 161, None: 162}[reader]
    data = content(6, seed)
    with connect(cluster, "prefill") as writer, connect(cluster, reader) as client:
        keys = client.keys(tokens(6, seed))
        held = [keys[at] for at in (1, 2, 4)]
        assert writer.store_heads(held, data[[1, 2, 4]]).held_blocks == 3
        wait_until(lambda: int(client.lookup_heads(held).held.sum()) == 3, "the index shows the blocks")
        found = client.lookup_heads(keys)
        assert found.held.tolist() == [False, True, True, False, True, False]
        out = np.zeros_like(data)
        result = client.load(found, out, verify="always")
        hit = Outcome.HIT
        assert (result.outcomes == hit).tolist() == found.held.tolist()
        assert np.array_equal(out[[1, 2, 4]], data[[1, 2, 4]])
        assert not out[[0, 3, 5]].any()
        assert client.store_heads(held, data[[1, 2, 4]]).count(StoreOutcome.EXISTS) == 3


def test_layerwise_store_is_loaded(cluster: LocalCluster) -> None:
    blocks = 30
    data = content(blocks, 3)
    layers = data.reshape(blocks, SPEC.layers, -1)
    for seed, node in ((3, "prefill"), (4, None)):
        with connect(cluster, node) as client:
            keys = client.keys(tokens(blocks, seed))
            with client.begin_store(keys) as handle:
                for layer in range(SPEC.layers):
                    handle.put_layer(layer, layers[:, layer])
                assert handle.commit(wait_visible=True).held_blocks == blocks
            out = np.zeros_like(data)
            assert until_hit(client, keys, out) == blocks
            assert np.array_equal(out, data)


def until_hit(client: KVClient, keys: list[BlockKey], out: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> int:
    """Load after the index shows all blocks, because a store over TCP does not wait for that."""
    until_s = time.monotonic() + 10
    while (lookup := client.lookup(keys)).hit_blocks < len(keys):
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)
    return client.load(lookup, out).hit_blocks


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("node", ["prefill", None])
def test_store_other_parent_than_held_is_refused(cluster: LocalCluster, node: str | None, *, durable: bool) -> None:
    blocks, seed = 40, 60 + 2 * durable + (node is None)
    data = content(blocks, seed)
    with connect(cluster, node) as client:
        keys = client.keys(tokens(blocks, seed))
        assert client.store(keys[:10], data[:10], durable=durable).held_blocks == 10
        assert client.store(keys[10:], data[10:], durable=durable).held_blocks == 30
        out = np.zeros_like(data)
        assert until_hit(client, keys[:10], out[:10]) == 10
        assert client.lookup(keys).hit_blocks == 10
        refused = client.store(keys[10:], data[10:], parent=keys[9], depth=10, durable=durable)
        assert isinstance(refused.error, Conflict)
        assert refused.count(StoreOutcome.SKIPPED) == 30
        assert client.lookup(keys).hit_blocks == 10
        assert until_hit(client, keys[:10], out[:10]) == 10
        assert np.array_equal(out[:10], data[:10])


def test_store_key_of_other_namespace_is_refused(cluster: LocalCluster) -> None:
    """A store of keys that ``client.keys`` did not make is refused."""
    other = replace(SPEC, model="another")
    data = content(4, 70)
    for node in ("prefill", None):
        address = cluster.node(node).local_socket if node is not None else None
        with (
            connect(cluster, node) as client,
            KVClient.connect(cluster.metadata_address, other, node=address, options=OPTIONS) as stranger,
        ):
            keys = client.keys(tokens(4, 70))
            assert client.store(keys, data, wait_visible=True).held_blocks == 4
            refused = stranger.store(keys, data)
            assert refused.held_blocks == 0
            assert isinstance(refused.error, Conflict)
            assert "another namespace" in str(refused.error)
            assert stranger.load(keys, np.zeros_like(data)).hit_blocks == 0


def test_load_larger_than_arena_comes_from_nvme(cluster: LocalCluster) -> None:
    """Load 72 MiB through 48 MiB of DRAM."""
    blocks = (24 << 20) // SPEC.block_bytes
    with connect(cluster, "prefill") as client:
        chains = [(client.keys(tokens(blocks, seed)), content(blocks, seed)) for seed in (50, 51, 52)]
        for keys, data in chains:
            stored = client.store(keys, data, wait_visible=True, durable=True)
            assert (stored.held_blocks, stored.durable, stored.error) == (blocks, True, None)
        tiers: set[Tier] = set()
        for keys, data in chains:
            out = np.zeros_like(data)
            result = client.load(client.lookup(keys), out)
            assert (result.hit_blocks, result.error) == (blocks, None)
            assert np.array_equal(out, data)
            tiers.update(result.bytes_by_tier)
            out[:] = 0
            handle = client.start_load(keys, out)  # too large to be held at once: flows through, block by block
            assert handle.result().hit_blocks == blocks
            assert np.array_equal(out, data)
        assert Tier.NVME in tiers


def test_killed_node_returns_with_durable_blocks(cluster: LocalCluster) -> None:
    blocks = 60
    data = content(blocks, 6)
    with connect(cluster, "prefill") as client:
        keys = client.keys(tokens(blocks, 6))
        assert client.store(keys, data, durable=True).durable
        cluster.kill("prefill")
        began_s = time.monotonic()
        result = client.load(keys, np.zeros_like(data), deadline_s=5.0)
        assert result.count(Outcome.HIT) == 0
        assert client.store(keys, data, deadline_s=5.0).held_blocks == 0
        assert time.monotonic() - began_s < 60, "many times both deadlines: it hangs"
        cluster.start_node("prefill")
        until_s = time.monotonic() + 20
        while client.local_node is None:  # until then, loads go straight to the data plane, as soon as that answers
            assert time.monotonic() < until_s
            result = client.load(keys, out := np.zeros_like(data))
            assert np.array_equal(out[: result.hit_blocks], data[: result.hit_blocks])
            threading.Event().wait(0.05)
        result = client.load(keys, out := np.zeros_like(data))
        assert (result.hit_blocks, result.bytes_by_path) == (blocks, {PATH_LOCAL: data.nbytes})
        assert np.array_equal(out, data)
        assert client.stats()["client_session_opened_total"] == 1


def test_restarted_node_head_lookup_opens_the_session(cluster: LocalCluster) -> None:
    """Otherwise the first prompt after an outage is not stored."""
    with connect(cluster, "decode") as client:
        keys = client.keys(tokens(2, 7))
        cluster.kill("decode")
        wait_until(lambda: client.stats()["client_session_open"] == 0)
        cluster.start_node("decode")

        def looked_up() -> bool:
            client.lookup_heads(keys)
            return client.stats()["client_session_open"] == 1

        wait_until(looked_up, "the session is open")
        assert client.store_heads(keys, content(2, 7)).error is None


def test_async_client_serves_many_tasks(cluster: LocalCluster) -> None:
    async def session(client: AsyncKVClient, seed: int) -> bool:
        data = content(20, seed)
        keys = client.keys(tokens(20, seed))
        out = np.zeros_like(data)
        assert (await client.store(keys, data, wait_visible=True)).held_blocks == 20
        result = await client.load(await client.lookup(keys), out)
        return result.hit_blocks == 20 and np.array_equal(out, data)

    async def main() -> list[bool]:
        address = cluster.node("decode").local_socket
        async with await AsyncKVClient.connect(cluster.metadata_address, SPEC, node=address, options=OPTIONS) as client:
            return await asyncio.gather(*(session(client, seed) for seed in range(100, 112)))

    assert asyncio.run(main()) == [True] * 12
