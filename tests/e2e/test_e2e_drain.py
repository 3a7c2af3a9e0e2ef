"""Draining nodes of a running store, with real processes under load: no wrong byte, no error, no durable block lost."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from conftest import Engine, Store
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.types import BlockKey, Outcome, StoreOutcome
from kvstore.embedded.cluster import Daemon, NodeSpec
from kvstore.replay.engine import ReplayTotals, RequestRunner
from nursery import cli
from support.wait import wait_until

ROOM = 64 << 20
DRAM = 32 << 20
CHAINS, LONGEST, TURN = 6, 24, 4
THINK_S = 0.03
"""Pause between the requests of an engine, which shares two cores with the daemons."""

MakeStore = Callable[..., Store]


def nodes(*names: str, **more: object) -> list[NodeSpec]:
    return [NodeSpec(name, dram_bytes=DRAM, nvme_bytes=ROOM, **more) for name in names]  # type: ignore[arg-type]


def command(store: Store, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a ``kvstore`` command with piped output."""
    words = [*cli(), *arguments, "--metadata", store.cluster.metadata_address]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)


def status(store: Store, node: str) -> metadata_pb2.NodeStatus | None:
    with grpc.insecure_channel(store.cluster.metadata_address) as channel:
        found = metadata_pb2_grpc.MetadataStub(channel).ListNodes(metadata_pb2.ListNodesRequest(), timeout=5).nodes
    return next((one for one in found if one.node.node_id == node), None)


def state(store: Store, node: str) -> str:
    found = status(store, node)
    return "gone" if found is None else common_pb2.NodeState.Name(found.state).removeprefix("NODE_STATE_")


def nvme_bytes(store: Store, node: str) -> int:
    """Bytes on the volumes of a node in its last heartbeat."""
    found = status(store, node)
    return 0 if found is None else sum(usage.used_bytes for usage in found.usages if "nvme" in usage.volume_id)


class Load:
    """An engine that replays growing prompts until it is stopped: look up, load, check every byte, store the rest."""

    def __init__(self, engine: Engine, chains: Sequence[Sequence[BlockKey]], seed: int) -> None:
        self.tally = ReplayTotals()
        self.turns = 0
        self._engine, self._chains, self._random = engine, chains, random.Random(seed)
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            runner = RequestRunner(self._engine.client, self.tally, LONGEST)
            while not self._stop.is_set():
                chain = self._random.choice(self._chains)
                runner.serve(chain[: TURN * self._random.randint(1, LONGEST // TURN)])
                self.turns += 1
                self._stop.wait(THINK_S)
        except BaseException as error:  # noqa: BLE001  # raised by the test, in its own thread
            self._failed.append(error)

    def goes_on(self, turns: int = 5) -> None:
        """Wait for a number of further requests."""
        wanted = self.turns + turns
        wait_until(lambda: self.turns >= wanted or bool(self._failed), "requests are served")

    def stop(self) -> None:
        """Begin no further request."""
        self._stop.set()

    def end(self) -> ReplayTotals:
        self.stop()
        self._thread.join(60)
        assert self._failed == []
        assert not self._thread.is_alive()
        assert (self.tally.wrong_bytes, self.tally.wrong_blocks) == (0, 0)
        return self.tally


@contextmanager
def load(engines: Sequence[Engine]) -> Iterator[list[Load]]:
    """Engines that all replay the same prompts."""
    chains = [engines[0].keys(f"load {number}", LONGEST) for number in range(CHAINS)]
    running = [Load(engine, chains, seed) for seed, engine in enumerate(engines)]
    try:
        yield running
    finally:
        for one in running:
            one.stop()


def store_durably(engine: Engine, name: str, blocks: int = 40) -> list[BlockKey]:
    """A chain that the store reported durable."""
    result = engine.store(name, blocks, durable=True)
    assert result.durable, result.error
    return engine.keys(name, blocks)


def all_there(engine: Engine, chains: Sequence[Sequence[BlockKey]]) -> bool:
    """Whether every block of some chains is found and loaded with its own bytes."""
    for keys in chains:
        if engine.client.lookup(list(keys)).hit_blocks < len(keys):
            return False
        if engine.load_keys(list(keys)).hit_blocks < len(keys):
            return False
    return True


@pytest.mark.parametrize("move", [True, False])
def test_drain_under_load_loses_nothing(make_store: MakeStore, move: bool) -> None:
    names = "abc" if move else "ab"
    store = make_store(*nodes(*names))
    engines = {name: store.engine(name) for name in names}
    durable = [store_durably(engines["a"], f"durable {number}") for number in range(3)]
    with load(list(engines.values())) as running:
        for one in running:
            one.goes_on()
        done = command(store, "nodes", "drain", "a", "--wait", *(["--move"] if move else []))
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert "\x1b" not in done.stdout, "plain output in a pipe"
        assert done.stdout.splitlines()[-1].startswith("a: drained"), done.stdout
        for one in running:
            one.goes_on()
        assert all_there(engines["b"], durable), "reads go on"
        refused = engines["a"].store("new on a", 4)
        assert refused.draining
        assert refused.error is None
        assert set(refused.outcomes) == {StoreOutcome.SKIPPED}
        assert engines["b"].store("new on b", 4).count(StoreOutcome.STORED) == 4
        for one in running:
            assert not one.end().errors, "no engine saw an error"
    found = status(store, "a")
    assert found is not None
    assert (found.drain.not_durable_blocks, found.drain.left_blocks) == (0, 0)
    assert (found.drain.moved_blocks > 0) == move
    loaded = engines["a"].load_keys(durable[0])
    assert loaded.hit_blocks == len(durable[0])
    store.cluster.stop("a")
    assert "a" not in {run.node_id for run in engines["b"].client.lookup(durable[0]).runs}, "lookups stop naming it"
    for name in names[1:]:
        store.empty_dram(name)  # replicas of blocks from other nodes
    if move:
        assert all_there(engines["b"], durable), "at once, from the nodes that took them over"
        removed = command(store, "nodes", "remove", "a")
        assert (removed.returncode, removed.stdout) == (0, "a: removed\n"), removed.stderr
        assert state(store, "a") == "gone"
        assert all_there(engines["c"], durable)
    else:
        wait_until(lambda: engines["b"].client.lookup(durable[0]).hit_blocks == 0, "it took its blocks along")
        store.cluster.start_node("a")
        assert state(store, "a") in ("DRAINING", "DRAINED"), "the order holds until it is lifted"
        wait_until(lambda: all_there(engines["b"], durable), "what lay there is found again")
        assert command(store, "nodes", "undrain", "a").stdout == "a: active\n"


def test_drain_tenant_near_quota_moves_all(make_store: MakeStore) -> None:
    """Before the drain, the other node's share is the part of the quota that the drained node leaves."""
    store = make_store(*nodes("a", "b"))
    here, there = store.engine("a", tenant="acme"), store.engine("b", tenant="acme")
    durable = [store_durably(here, f"near {number}", 30) for number in range(3)]
    held = sum(map(len, durable)) * here.spec.block_bytes
    wait_until(lambda: nvme_bytes(store, "a") >= held, "the server knows what the tenant holds")
    limited = command(store, "tenants", "set", "acme", "--nvme", str(held * 9 // 8), "--yes")
    assert limited.returncode == 0, limited.stderr
    store.empty_dram("a")
    done = command(store, "nodes", "drain", "a", "--move", "--wait")
    assert done.returncode == 0, (done.stdout, done.stderr)
    for name in "ab":
        assert dict(store.node_stats(name).counters).get("evicted_quota_blocks_total", 0) == 0, "nothing was evicted"
    store.cluster.stop("a")
    assert command(store, "nodes", "remove", "a").returncode == 0
    store.empty_dram("b")  # DRAM-only blocks do not count
    assert all_there(there, durable)


def test_drain_client_reads_from_other_nodes(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b"))
    here, there = store.engine("a"), store.engine("b")
    keys = store_durably(there, "elsewhere")
    assert command(store, "nodes", "drain", "a", "--wait").returncode == 0
    loaded = here.load_keys(keys)
    assert loaded.hit_blocks == len(keys)
    assert set(loaded.bytes_by_path) == {"prefill"}
    assert loaded.error is None
    layerwise = here.allocate(len(keys))
    started = here.client.start_load(here.client.lookup(keys), layerwise)
    assert started.result().hit_blocks == len(keys)
    assert list(here.payloads.wrong_blocks(keys, layerwise)) == []
    counters = store.node_stats("a").counters
    assert counters["load_deferred_to_peers_blocks_total"] >= len(keys)
    assert counters.get("peer_fetched_blocks_total", 0) == 0, "a draining node promotes nothing"
    # stores without a local node avoid it
    assert store.engine(None).store("x", 8).count(StoreOutcome.STORED) == 8
    assert store.node_stats("b").counters["transport_writes_total"] >= 1
    assert "transport_writes_total" not in store.node_stats("a").counters
    # the order survives the index: the node repeats it
    store.cluster.stop("metadata")
    shutil.rmtree(store.cluster.index_path)
    store.cluster.start_metadata()
    wait_until(lambda: state(store, "a") == "DRAINED", "the order is known again")


def test_drain_not_durable_blocks_are_reported(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("memory", dram_bytes=DRAM), *nodes("disk"))
    engine, other = store.engine("memory"), store.engine("disk")
    assert engine.store("x", 10, wait_visible=True).count(StoreOutcome.STORED) == 10
    blocked = command(store, "nodes", "drain", "memory", "--wait")
    assert blocked.returncode == 3
    assert "10 not durable" in blocked.stdout
    assert "in DRAM only" in blocked.stdout
    refused = command(store, "nodes", "remove", "memory")
    assert refused.returncode == 3
    assert "drain it first" in refused.stderr
    assert command(store, "nodes", "drain", "memory", "--move", "--wait").returncode == 0, "others may take it"
    keys = engine.keys("x", 10)
    store.cluster.kill("memory")
    wait_until(lambda: not _alive(store, "memory"), "it is silent")
    assert all_there(other, [keys])


def test_drain_commands_report_errors(make_store: MakeStore) -> None:
    store = make_store(*nodes("a"))
    for arguments in (("nodes", "drain", "nobody"), ("nodes", "undrain", "nobody"), ("nodes", "remove", "nobody")):
        done = command(store, *arguments)
        assert done.returncode == 3
        assert "no such node" in done.stderr
    assert command(store, "nodes", "drain", "a", "--timeout", "soon").returncode == 2
    store_durably(store.engine("a"), "x", 5)
    alone = command(store, "nodes", "drain", "a", "--move", "--wait")
    assert alone.returncode == 3
    assert "5 to move, no other active node has free space on a volume" in alone.stdout.splitlines()[-1]
    assert command(store, "nodes", "drain", "a", "--wait").returncode == 0, "they are durable where they are"
    assert command(store, "nodes", "undrain", "a").stdout == "a: active\n"
    store.cluster.stop("a")
    silent = command(store, "nodes", "drain", "a", "--wait")
    assert silent.returncode == 1
    assert "once it is back" in silent.stderr
    store.cluster.stop("metadata")
    done = command(store, "nodes", "drain", "a", "--set", "client.deadline=500ms")
    assert done.returncode == 1
    assert "cannot reach the metadata server" in done.stderr


def test_rolling_restart_keeps_durable_blocks(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", "b", "c"))
    engines = {name: store.engine(name) for name in "abc"}
    durable: list[list[BlockKey]] = []
    with load(list(engines.values())) as running:
        for number, name in enumerate("abc"):
            durable.append(store_durably(engines[name], f"before {name}"))
            # just stored without waiting for durability: the orderly stop writes them back
            assert engines[name].store(f"just {name}", 40).count(StoreOutcome.STORED) == 40
            durable.append(engines[name].keys(f"just {name}", 40))
            assert stop_in_order(store.cluster.node(name)) == 0
            found = status(store, name)
            assert found is not None
            assert (found.stopped, found.alive) == (True, False), "hidden at once, since it unregistered"
            store.cluster.stop(name)
            store.cluster.start_node(name)
            running[number].goes_on()
        assert stop_in_order(store.cluster.node("metadata")) == 0
        store.cluster.stop("metadata")
        store.cluster.start_metadata()
        for one in running:
            one.goes_on()
            one.end()
    wait_until(lambda: all_there(engines["a"], durable), "every durable block is there")
    wait_until(lambda: all_there(engines["b"], durable), "for everybody")


def stop_in_order(daemon: Daemon) -> int:
    """Send SIGTERM. Returns the exit code."""
    daemon.process.terminate()
    return daemon.process.wait(20)


def given_up(store: Store, storage: str, node: str, blocks: int) -> list[BlockKey]:
    """Blocks that a node without a volume stored while its storage node was away."""
    engine = store.engine(node)
    store.cluster.stop(storage)
    assert engine.store("given up", blocks).count(StoreOutcome.STORED) == blocks
    wait_until(lambda: store.node_stats(node).counters.get("write_back_dropped_blocks_total", 0) == blocks, "nobody took them")
    return engine.keys("given up", blocks)


@pytest.mark.parametrize("back", ["before", "meanwhile"])
def test_stop_sends_blocks_that_storage_node_missed(make_store: MakeStore, back: str) -> None:
    """A rolling restart: the storage node first, then the nodes that write back to it."""
    memory = NodeSpec("memory", dram_bytes=DRAM, write_back_to="disk", settings=(("stop_grace", "60s"),))
    store = make_store(*nodes("disk"), memory)
    keys = given_up(store, "disk", "memory", 100)
    process = store.cluster.node("memory").process
    if back == "before":
        store.cluster.start_node("disk")
    process.terminate()
    if back == "meanwhile":
        wait_until(lambda: (found := status(store, "memory")) is not None and found.stopped, "it has begun to end")
        store.cluster.start_node("disk")
    assert process.wait(50) == 0
    log = store.cluster.node("memory").log_tail()
    assert "DRAM-only blocks written back on stop (blocks=100)" in log
    assert "blocks lost on stop" not in log
    other = store.engine(None)
    wait_until(lambda: all_there(other, [keys]), "they are found where they are durable")


def test_stop_storage_node_away_ends_in_time(make_store: MakeStore) -> None:
    memory = NodeSpec("memory", dram_bytes=DRAM, write_back_to="disk", settings=(("stop_grace", "1s"),))
    store = make_store(*nodes("disk"), memory)
    given_up(store, "disk", "memory", 20)
    assert stop_in_order(store.cluster.node("memory")) == 0
    assert "blocks lost on stop: not durable (blocks=20" in store.cluster.node("memory").log_tail()


def test_stop_full_volume_keeps_what_it_holds(make_store: MakeStore) -> None:
    """Blocks that are hot in DRAM and left a full volume end with the node: nothing is evicted for them."""
    store = make_store(NodeSpec("a", dram_bytes=DRAM, nvme_bytes=DRAM, settings=(("stop_grace", "60s"),)))
    engine = store.engine("a", layer_bytes=16384)
    engine.store("used", 100, durable=True)  # of 469 that the volume holds
    used = engine.keys("used", 100)
    for number in range(10):
        assert engine.store(f"passing {number}", 100, durable=True).durable
        assert engine.load_keys(used).hit_blocks == len(used)
    assert store.node_stats("a").counters.get("evicted_nvme_blocks_total", 0) > 0
    assert stop_in_order(store.cluster.node("a")) == 0
    store.cluster.start_node("a")
    wait_until(lambda: all_there(engine, [engine.keys("passing 9", 100)]), "the blocks of the volume are found")


def test_second_signal_ends_node_at_once(make_store: MakeStore) -> None:
    store = make_store(*nodes("a", settings=(("stop_grace", "60s"), ("prepare_ttl", "60s"))))
    engine = store.engine("a")
    process = store.cluster.node("a").process
    held = engine.client.begin_store(engine.keys("held", 4))  # granted slots that are not written
    assert len(held.blocks_wanted) == 4
    process.terminate()
    wait_until(lambda: (found := status(store, "a")) is not None and found.stopped, "it has begun to end")
    assert process.poll() is None, "it waits for a started store"

    def again() -> bool:
        process.send_signal(signal.SIGTERM)  # within a second of the first, it counts as the same signal
        time.sleep(0.2)
        return process.poll() is not None

    wait_until(again, "it ends at once")
    assert process.returncode == 128 + signal.SIGTERM
    held.abort()


def _alive(store: Store, node: str) -> bool:
    found = status(store, node)
    return found is not None and found.alive


def test_drain_bad_block_is_not_moved(make_store: MakeStore) -> None:
    """A bit flips on the draining node's disk: that block is not taken over, and the blocks after it have their own bytes."""
    store = make_store(*nodes("a", "b"))
    engine, other = store.engine("a"), store.engine("b")
    keys = store_durably(engine, "x", 8)
    store.empty_dram("a")
    payload = np.zeros((1, engine.spec.block_bytes), np.uint8)
    engine.payloads.fill(keys[3:4], payload)
    slab = max(store.cluster.volume_path("a").iterdir(), key=lambda path: path.stat().st_size)
    data = slab.read_bytes()
    at = data.find(payload.tobytes()[:512])
    assert at > 0
    with slab.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([data[at + 100] ^ 1]))
    done = command(store, "nodes", "drain", "a", "--move", "--wait")
    assert done.returncode in (0, 3), done.stderr
    store.cluster.stop("a")
    loaded = other.load_keys(keys)
    assert loaded.hit_blocks == 3
    assert Outcome.CORRUPT not in set(loaded.outcomes)
