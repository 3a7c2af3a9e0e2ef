"""Reads ahead in real processes: the load after the wait finds its blocks in DRAM; an ended call holds nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import numpy as np
import pytest

from conftest import Engine, Store
from kvclient import Lookup, Paths, ReadAhead, Tier
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MIB = 1 << 20
BLOCKS = 48
NODE = NodeSpec("n1", dram_bytes=32 * MIB, nvme_bytes=128 * MIB)
OTHER = NodeSpec("n2", dram_bytes=32 * MIB)
THREE = (
    NodeSpec("s", roles=("storage",), dram_bytes=32 * MIB, nvme_bytes=128 * MIB),
    NodeSpec("p", dram_bytes=32 * MIB, write_back_to="s"),
    NodeSpec("d", roles=("decode",), dram_bytes=32 * MIB),
)


def stored(store: Store, node: str = "n1") -> Engine:
    """An engine that has stored a chain durably, and whose node holds nothing in DRAM."""
    engine = store.engine(node)
    assert engine.store("chain", BLOCKS, durable=True, wait_visible=True).durable
    store.empty_dram(node)
    wait_until(lambda: looked_up(engine, Tier.NVME).hit_blocks == BLOCKS)
    return engine


def stored_beyond(store: Store) -> Engine:
    """An engine on the prefill host that has stored a chain, which is now in the storage of a third host only."""
    engine = store.engine("p", layer_bytes=64 << 10)  # so large that a plan divides the load
    assert engine.store("chain", BLOCKS, durable=True, wait_visible=True).durable
    for node in "ps":
        store.empty_dram(node)
    wait_until(lambda: looked_up(engine, Tier.NVME).hit_blocks == BLOCKS)
    return engine


def looked_up(engine: Engine, tier: Tier) -> Lookup:
    """The lookup of the chain, or an empty one while it shows another tier."""
    found = engine.client.lookup(engine.keys("chain", BLOCKS))
    return found if {run.tier for run in found.runs} == {tier} else Lookup([])


def counter(store: Store, name: str, node: str = "n1") -> int:
    return int(store.node_stats(node).counters.get(f"node_read_ahead_{name}_total", 0))


def sent_bytes(store: Store, node: str) -> int:
    return int(store.node_stats(node).counters.get("transport_bytes_sent_total", 0))


def begun(engine: Engine, lookup: Lookup, deadline_s: float = 30.0) -> ReadAhead:
    ahead = engine.client.read_ahead(lookup, deadline_s=deadline_s)
    assert ahead is not None
    return ahead


def test_read_ahead_then_load_comes_from_dram(make_store: Callable[..., Store]) -> None:
    store = make_store(NODE)
    engine = stored(store)
    lookup = engine.client.lookup(engine.keys("chain", BLOCKS))
    size = BLOCKS * engine.spec.block_bytes
    ahead = begun(engine, lookup)
    wait_until(lambda: counter(store, "bytes") == size)
    assert store.evict("n1") == 0, "they are held"
    loaded = engine.load_keys(list(lookup.keys))
    ahead.end()
    assert loaded.bytes_by_tier == {Tier.DRAM: size}
    wait_until(lambda: store.evict("n1") == BLOCKS, "released")
    assert counter(store, "unused_bytes") == 0
    assert engine.client.read_ahead(engine.client.lookup(list(lookup.keys[:0]))) is None


def test_read_ahead_brings_blocks_of_another_node(make_store: Callable[..., Store]) -> None:
    store = make_store(NODE, OTHER)
    writer, reader = stored(store), store.engine("n2")
    ahead = begun(reader, writer.client.lookup(writer.keys("chain", BLOCKS)))
    wait_until(lambda: counter(store, "bytes", "n2") == BLOCKS * reader.spec.block_bytes)
    store.cluster.kill("n1")
    assert reader.load("chain", BLOCKS).hit_blocks == BLOCKS
    ahead.end()


def test_read_ahead_of_resident_blocks_does_nothing(make_store: Callable[..., Store]) -> None:
    store = make_store(NODE)
    engine = store.engine("n1")
    engine.store("chain", BLOCKS, wait_visible=True)
    assert engine.client.read_ahead(engine.client.lookup(engine.keys("chain", BLOCKS))) is None


def test_read_ahead_switched_off_at_node(make_store: Callable[..., Store]) -> None:
    store = make_store(NodeSpec("n1", dram_bytes=32 * MIB, nvme_bytes=128 * MIB, settings=(("read_ahead", 0),)))
    engine = stored(store)
    ahead = begun(engine, looked_up(engine, Tier.NVME))
    wait_until(lambda: ahead.ended)
    assert counter(store, "refused") == 1
    assert counter(store, "bytes") == 0
    assert engine.load("chain", BLOCKS).hit_blocks == BLOCKS


@pytest.mark.parametrize("way", ["ended", "deadline", "engine closed"])
def test_read_ahead_nobody_used_is_released(make_store: Callable[..., Store], way: str) -> None:
    store = make_store(NODE)
    engine = stored(store)
    size = BLOCKS * engine.spec.block_bytes
    ahead = begun(engine, looked_up(engine, Tier.NVME), 0.5 if way == "deadline" else 30.0)
    wait_until(lambda: counter(store, "bytes") == size)
    if way == "ended":
        ahead.end()
    elif way == "engine closed":
        engine.client.close()
    wait_until(lambda: counter(store, "unused_bytes") == size)
    assert store.evict("n1") == BLOCKS


@pytest.mark.parametrize("way", ["in time", "late", "tail alone"])
def test_read_ahead_planned_reads_each_block_once(make_store: Callable[..., Store], way: str) -> None:
    """Blocks in the storage of a third host: two hosts read a part each, and the load takes each part from where it is."""
    store = make_store(*THREE)
    engine = stored_beyond(store)
    size, lookup = BLOCKS * engine.spec.block_bytes, looked_up(engine, Tier.NVME)
    sent_before = sent_bytes(store, "s")
    ahead = engine.client.read_ahead(lookup, deadline_s=30.0, paths=Paths(decode_node="d", policy="split"))
    assert ahead is not None
    if way != "late":
        wait_until(lambda: counter(store, "bytes", "p") + counter(store, "bytes", "d") == size)
    wanted = lookup.part(5, BLOCKS) if way == "tail alone" else lookup  # the engine has the head
    data = engine.allocate(len(wanted.keys))
    loaded = engine.client.load(wanted, data, paths=ahead.paths)
    assert loaded.hit_blocks == len(wanted.keys)
    assert list(engine.payloads.wrong_blocks(list(wanted.keys), data)) == []
    if way != "late":
        assert engine.client.stats()["client_plans_read_ahead_total"] == 1
        assert set(loaded.bytes_by_path) == {"prefill", "decode"}
    assert sent_bytes(store, "s") - sent_before == size, "no block is read twice"
    ahead.end()
    wait_until(lambda: store.evict("p") + store.evict("d") > 0, "released")
    unused = counter(store, "unused_bytes", "p") + counter(store, "unused_bytes", "d")
    assert unused == (5 * engine.spec.block_bytes if way == "tail alone" else 0)


@pytest.mark.parametrize("gone", ["d", "metadata"])
def test_read_ahead_planned_with_host_gone(make_store: Callable[..., Store], gone: str) -> None:
    store = make_store(*THREE)
    engine = stored_beyond(store)
    lookup, paths = looked_up(engine, Tier.NVME), Paths(decode_node="d", policy="split", stall_s=0.5)
    if gone == "metadata":
        store.cluster.kill("metadata")
    ahead = engine.client.read_ahead(lookup, deadline_s=30.0, paths=paths)
    assert ahead is not None
    if gone == "d":
        wait_until(lambda: counter(store, "bytes", "d") > 0)
        store.cluster.kill("d")
    data = engine.allocate(BLOCKS)
    assert engine.client.load(lookup, data, paths=ahead.paths).hit_blocks == BLOCKS
    assert list(engine.payloads.wrong_blocks(list(lookup.keys), data)) == []
    ahead.end()
    wait_until(lambda: ahead.ended)


@pytest.mark.parametrize("seed", range(3))
def test_read_ahead_beside_loads_and_a_kill(make_store: Callable[..., Store], seed: int) -> None:
    """Many calls begin and end at random, the node is killed and started: loads bring no wrong byte, and nothing stays held."""
    store = make_store(NODE)
    engine = stored(store)
    draw = random.Random(seed)
    stop = threading.Event()
    keys = engine.keys("chain", BLOCKS)

    def load() -> None:
        while not stop.is_set():
            engine.load_keys(keys)  # checks the bytes of hits
            with suppress(grpc.RpcError, KeyError):  # the node is killed, or is starting
                store.evict("n1")

    loads = threading.Thread(target=load)
    loads.start()
    calls: list[ReadAhead] = []
    try:
        for turn in range(60):
            found = engine.client.lookup(keys)
            if (ahead := engine.client.read_ahead(found.part(0, draw.randint(0, found.hit_blocks)))) is not None:
                calls.append(ahead)
            if calls and draw.random() < 0.7:
                calls.pop(draw.randrange(len(calls))).end()
            if turn == 30:
                store.cluster.kill("n1")
                store.cluster.start_node("n1")
            time.sleep(draw.uniform(0, 0.02))
    finally:
        stop.set()
        loads.join(60)
    for ahead in calls:
        ahead.end()
    wait_until(lambda: engine.load_keys(keys).hit_blocks == BLOCKS)
    store.empty_dram("n1")
    assert np.array_equal(engine.load_keys(keys).outcomes, np.ones(BLOCKS))
