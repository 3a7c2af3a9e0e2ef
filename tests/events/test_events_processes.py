"""Tests of ``kvstore events`` with a store of real processes that are killed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import termios
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvclient import CacheSpec, KVClient
from kvclient.events.block_groups import GroupBlockId, xor
from kvclient.events.label_writer import LabelWriter
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import cli
from support.dynamo_indexer import dynamo_indexer
from support.events_command import Publisher, publishing
from support.kv_event_subscriber import ZmqSubscriber
from support.llmd_rules import LlmdIndex, LlmdSubscriber
from support.node_stats import evict
from support.wait import wait_until

BLOCKS = 20
WAIT_S = 30.0
SPEC = CacheSpec(model="told", block_tokens=16, layers=4, layer_block_bytes=4096)


class Engine:
    """Store and load chains of a name."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.client = KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket)

    def keys(self, seed: int) -> list[BlockKey]:
        return list(self.client.keys(np.random.default_rng(seed).integers(0, 50_000, BLOCKS * 16, dtype=np.uint32)))

    def store(self, seed: int) -> list[BlockKey]:
        keys = self.keys(seed)
        data = np.full((BLOCKS, SPEC.block_bytes), seed, np.uint8)
        assert self.client.store(keys, data, durable=True).durable
        return keys

    def load(self, seed: int) -> None:
        """Wait until the store answers again with all blocks."""
        keys, out = self.keys(seed), np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        wait_until(lambda: self.client.load(keys, out).hit_blocks == BLOCKS, lambda: "the blocks are back")

    def evict(self) -> None:
        evict(self.cluster, "a")


@contextmanager
def engine_of(cluster: LocalCluster) -> Iterator[Engine]:
    engine = Engine(cluster)
    try:
        yield engine
    finally:
        engine.client.close()


def told(keys: Sequence[BlockKey], *media: str) -> set[tuple[object, str | None]]:
    return {(int.from_bytes(key[8:], "big"), medium) for key in keys for medium in media}


def test_subscriber_state_equals_store(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path / "store") as cluster, engine_of(cluster) as engine:
        first = engine.store(1)
        with publishing(tmp_path, cluster.metadata_address) as publisher:
            router = ZmqSubscriber(publisher.endpoint, publisher.replay, "kv@store")
            try:
                follow(cluster, engine, publisher, router, first)
            finally:
                router.close()
            assert publisher.stop() == 0


def follow(cluster: LocalCluster, engine: Engine, publisher: Publisher, router: ZmqSubscriber, first: list[BlockKey]) -> None:
    router.catch_up()
    router.until(told(first, "CPU", "STORAGE"))
    assert router.sizes == {16}
    second = engine.store(2)
    router.until(told([*first, *second], "CPU", "STORAGE"))
    engine.evict()
    router.until(told([*first, *second], "STORAGE"))
    # the node dies: no block is readable; it returns with its durable blocks
    cluster.kill("a")
    router.until(set())
    cluster.start_node("a")
    router.until(told([*first, *second], "STORAGE"))
    # the publisher dies while things happen
    publisher.kill()
    engine.load(1)
    publisher.start()
    router.until(told(first, "CPU", "STORAGE") | told(second, "STORAGE"))
    # the metadata server dies, and loses its index
    cluster.kill("metadata")
    shutil.rmtree(cluster.index_path)
    cluster.start_metadata()
    engine.load(2)
    router.until(told([*first, *second], "CPU", "STORAGE"))
    late = ZmqSubscriber(publisher.endpoint, publisher.replay, "kv@store")
    late.catch_up()
    assert late.believed == router.believed
    late.close()
    shown = publisher.metrics()
    assert f"kvstore_events_told_blocks {2 * BLOCKS}.0" in shown
    assert "kvstore_client_events_resyncs_total 2.0" in shown


class Blocks:
    """The blocks of one chain, as an engine labels them."""

    def __init__(self, keys: Sequence[BlockKey], seed: int) -> None:
        self.hashes = [hashlib.sha256(key).digest() for key in keys]
        self.ids = [GroupBlockId(xor(key, SPEC.namespace)) for key in keys]
        self.tokens = np.random.default_rng(seed).integers(0, 50_000, BLOCKS * 16, dtype="<u4").reshape(BLOCKS, 16)

    def labels(self) -> Iterator[tuple[GroupBlockId, BlockLabel]]:
        for at, (block, own) in enumerate(zip(self.ids, self.hashes, strict=True)):
            yield block, BlockLabel(at, (own,), self.hashes[at - 1] if at else b"", self.tokens[at].tobytes())

    @property
    def memory_bytes(self) -> int:
        return BLOCKS * 256

    def told(self, *media: str) -> set[tuple[object, str | None]]:
        return {(int.from_bytes(one[-8:], "big"), medium) for one in self.hashes for medium in media}


def test_events_of_a_model_have_tokens_and_engine_hashes(tmp_path: Path) -> None:
    settings = {"model": SPEC.model, "topic": ""}
    topic = f"kv@pool:kvstore@{SPEC.model}"
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path / "store") as cluster, engine_of(cluster) as engine:
        connect = partial(KVClient.connect, cluster.metadata_address, node=cluster.node("a").local_socket)
        writer = LabelWriter(LabelNamespace.make([SPEC], engine_hash="sha256"), lambda space: connect(space.spec))
        with publishing(tmp_path, cluster.metadata_address, **settings) as publisher:
            router = ZmqSubscriber(publisher.endpoint, publisher.replay, topic)
            try:
                first = Blocks(engine.store(1), 1)
                engine.store(2)  # without labels
                writer.put(first)
                router.until(first.told("CPU", "STORAGE"))
                assert router.tokens == {
                    int.from_bytes(one[-8:], "big"): row.tolist() for one, row in zip(first.hashes, first.tokens, strict=True)
                }
                wait_until(lambda: f"kvstore_events_unlabelled_blocks {BLOCKS}.0" in publisher.metrics(), publisher.metrics)
                assert writer.flush(10)
                engine.evict()
                router.until(first.told("STORAGE"))
                publisher.kill()  # labels are read again
                publisher.start()
                wait_until(lambda: router.read() and router.begun_again == 1, lambda: "the router sees lower numbers")
                router.until(first.told("STORAGE"))
                cluster.kill("a")
                router.until(set())
                cluster.start_node("a")
                router.until(first.told("STORAGE"))
            finally:
                router.close()
                writer.close()
            assert publisher.stop() == 0


@contextmanager
def labelled_store(folder: Path) -> Iterator[tuple[LocalCluster, Engine, Blocks, Publisher]]:
    """A store with one labelled chain, and the publisher of its model."""
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], folder / "store") as cluster, engine_of(cluster) as engine:
        connect = partial(KVClient.connect, cluster.metadata_address, node=cluster.node("a").local_socket)
        writer = LabelWriter(
            LabelNamespace.make([SPEC], engine_hash="sha256", kind="full_attention"), lambda space: connect(space.spec)
        )
        try:
            blocks = Blocks(engine.store(1), 1)
            writer.put(blocks)
            with publishing(folder, cluster.metadata_address, model=SPEC.model, topic="") as publisher:
                yield cluster, engine, blocks, publisher
        finally:
            writer.close()


def test_llmd_rules_find_prefix_in_the_pool_and_lose_it(tmp_path: Path) -> None:
    with labelled_store(tmp_path) as (_, engine, blocks, publisher):
        index = LlmdIndex(block_size=32)  # not the engine's 16
        router = LlmdSubscriber(index, publisher.endpoint, publisher.replay)
        prompt = [*blocks.tokens.flatten().tolist()[: 16 * 11], *range(64)]

        def found() -> dict[tuple[str, str], int]:
            router.read()
            return index.prefix(SPEC.model, prompt)

        try:
            pool = "pool:kvstore"
            wait_until(lambda: found() == {(pool, "cpu"): 160, (pool, "storage"): 160}, lambda: str((found(), index.dropped)))
            assert index.prefix("another model", prompt) == {}
            engine.evict()
            wait_until(lambda: found() == {(pool, "storage"): 160}, lambda: str(found()))
            wait_until(lambda: found() and (router.last_live or 0) >= 8)  # so that a lower number shows that it began again
            publisher.kill()
            publisher.start()
            wait_until(lambda: found() == {(pool, "storage"): 160} and router.resets, lambda: str(found()))
            assert not +index.dropped
        finally:
            router.close()


def test_dynamo_indexer_finds_prefix_and_loses_it(tmp_path: Path) -> None:
    with dynamo_indexer(tmp_path) as router, labelled_store(tmp_path) as (cluster, engine, blocks, publisher):
        router.register(7, SPEC.model, SPEC.block_tokens, publisher.endpoint, publisher.replay)
        prompt = [*blocks.tokens.flatten().tolist()[: 16 * 11], *range(64)]

        def found(tier: str) -> int:
            return int(router.prefix(SPEC.model, prompt).get("7", {}).get(tier, 0))

        wait_until(lambda: found("cpu") == 176, lambda: str(router.prefix(SPEC.model, prompt)))
        engine.evict()
        wait_until(lambda: (found("cpu"), found("disk")) == (0, 176), lambda: str(router.prefix(SPEC.model, prompt)))
        cluster.kill("a")
        wait_until(lambda: found("disk") == 0, lambda: str(router.prefix(SPEC.model, prompt)))


def test_events_command_prints_a_line_per_change(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path) as cluster, engine_of(cluster) as engine:
        keys = engine.store(1)
        command = [*cli(), "events", "--metadata", cluster.metadata_address, "--tier", "dram", "-o", "json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(BLOCKS + 2)]
            assert lines[0] == {"snapshot": "begins"}
            assert lines[-1] == {"snapshot": "complete"}
            assert {line["key"] for line in lines[1:-1]} == {key.hex() for key in keys}
            assert {line["namespace"] for line in lines[1:-1]} == {SPEC.namespace.hex()}
            assert [(one["node"], one["tier"]) for one in lines[1]["held_by"]] == [("a", "dram")]
            process.terminate()
            assert process.wait(20) == 0


def test_events_prints_a_block_of_two_tiers_once(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path) as cluster, engine_of(cluster) as engine:
        keys = engine.store(1)
        command = [*cli(), "events", "--metadata", cluster.metadata_address, "-o", "json"]

        def snapshot() -> list[dict[str, list[object]]]:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                assert process.stdout is not None
                lines = [json.loads(process.stdout.readline())]
                while lines[-1] != {"snapshot": "complete"}:
                    lines.append(json.loads(process.stdout.readline()))
                process.terminate()
                assert process.wait(20) == 0
            return lines[1:-1]

        wait_until(lambda: all(len(line["held_by"]) == 2 for line in snapshot()), lambda: "both tiers are published")
        assert sorted(str(line["key"]) for line in snapshot()) == sorted(key.hex() for key in keys)


def test_events_stops_on_signal_without_readers(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path) as cluster, engine_of(cluster) as engine:
        command = [*cli(), "events", "--metadata", cluster.metadata_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4_096)
            assert process.stdout.readline()
            for number in range(4):  # more lines than the pipe holds
                engine.store(number)
            waiting = array("i", [0])

            def full() -> bool:
                fcntl.ioctl(process.stdout, termios.FIONREAD, waiting)
                return waiting[0] > 3_500

            wait_until(full, lambda: "nothing more goes into the pipe")
            process.terminate()
            assert process.wait(30) == 0
