"""Reads ahead of planned loads under seeded faults, in real processes: no wrong byte, and no node holds a block afterwards."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from conftest import Engine, Store
from kvclient import Lookup, Paths, ReadAhead, Tier
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MIB = 1 << 20
BLOCKS = 48
TURNS = 8
HELD_S = 600.0
"""How long nodes may hold blocks whose read ahead nobody ends: much longer than the tests wait until all are free."""
NODES = (
    NodeSpec("s", roles=("storage",), dram_bytes=32 * MIB, nvme_bytes=128 * MIB),
    NodeSpec("p", dram_bytes=32 * MIB, write_back_to="s"),
    NodeSpec("q", dram_bytes=32 * MIB, write_back_to="s"),
    NodeSpec("d", roles=("decode",), dram_bytes=32 * MIB),
)
NODE_NAMES = "spqd"
PATHS = Paths(decode_node="d", policy="split", stall_s=0.5)
FATES = (
    *("loaded", "cancelled", "deadline", "moved"),
    *(f"{node} {fault}" for node in NODE_NAMES for fault in ("killed", "hung")),
)
SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(3, 200))]


def free_dram(store: Store) -> float:
    """Evict until no node holds a block in DRAM. Returns the seconds that it took.

    A block that is held cannot be evicted: one that is still held after the end of its read ahead fails the test.
    """
    began_s = time.monotonic()
    for node in NODE_NAMES:
        store.empty_dram(node)
    return time.monotonic() - began_s


class Trial:
    """Two engines on hosts that share a storage node and a decode host, and one chain that only the storage node holds."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.draw = random.Random(seed)
        self.engines = {node: store.engine(node, layer_bytes=64 << 10) for node in "pq"}  # so large that a plan divides the load
        first = self.engines["p"]
        assert first.store("chain", BLOCKS, durable=True, wait_visible=True).durable
        self.keys = first.keys("chain", BLOCKS)
        free_dram(store)
        self.slowest_free_s = 0.0

    def wait_nothing_cached(self) -> None:
        """Wait until the index shows the chain in the storage node's volume, and nowhere else."""
        client = self.engines["p"].client

        def shown() -> tuple[int, set[Tier | None]]:
            lookup = client.lookup(self.keys)
            return lookup.hit_blocks, {run.tier for run in lookup.runs}

        wait_until(lambda: shown() == (BLOCKS, {Tier.NVME}), lambda: f"the chain is on the volume alone: {shown()}")

    def begun(self, engine: Engine, deadline_s: float = HELD_S) -> tuple[Lookup, ReadAhead]:
        """A read ahead that has had up to 50 ms."""
        begun: list[tuple[Lookup, ReadAhead]] = []

        def begin() -> bool:  # not before the session with a node that was killed is open again
            lookup = engine.client.lookup(self.keys)
            ahead = engine.client.read_ahead(lookup, deadline_s=deadline_s, paths=PATHS)
            begun.extend([] if ahead is None else [(lookup, ahead)])
            return bool(begun)

        wait_until(begin, "a read ahead begins")
        time.sleep(self.draw.uniform(0, 0.05))
        return begun[0]

    def load(self, engine: Engine, lookup: Lookup, ahead: ReadAhead) -> int:
        """Load by the plan of a read ahead, check the bytes of all hits, and return how many there are."""
        data = engine.allocate(BLOCKS)
        hits = engine.client.load(lookup, data, paths=ahead.paths, deadline_s=10.0).hit_blocks
        assert list(engine.payloads.wrong_blocks(self.keys[:hits], data[:hits])) == [], "WRONG BYTES"
        return hits

    def harm(self, host: str, fault: str) -> Callable[[], object]:
        """Kill a node, or stop its process for a while. Returns what brings it back, at the latest."""
        if fault == "killed":
            self.store.cluster.kill(host)
            return lambda: self.store.cluster.start_node(host)
        process = self.store.cluster.node(host).process
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(self.draw.uniform(0.1, 1.5), process.send_signal, (signal.SIGCONT,))
        timer.start()
        return timer.join

    def turn(self) -> str:
        """One request with a random fate. Returns the fate."""
        self.wait_nothing_cached()
        fate, (node, other) = self.draw.choice(FATES), self.draw.sample("pq", 2)
        engine, (host, _, fault) = self.engines[node], fate.partition(" ")
        lookup, ahead = self.begun(engine, self.draw.uniform(0.05, 0.3) if fate == "deadline" else HELD_S)
        if fault:
            recovers = self.harm(host, fault)
            assert self.load(engine, lookup, ahead) == BLOCKS or host in {"s", node}, "these two a load cannot do without"
        elif fate == "moved":
            ahead.end()
            found, moved = self.begun(self.engines[other])
            assert self.load(self.engines[other], found, moved) == BLOCKS
            moved.end()
        elif fate == "loaded":
            assert self.load(engine, lookup, ahead) == BLOCKS
        if fate != "deadline":
            ahead.end()
        wait_until(lambda: ahead.ended, f"the read ahead is over: {fate}")
        if fault:
            recovers()
            wait_until(lambda: engine.load_keys(self.keys).hit_blocks == BLOCKS, f"{host} serves again")
        self.slowest_free_s = max(self.slowest_free_s, free_dram(self.store))
        return fate


@pytest.mark.parametrize("seed", SEEDS)
def test_read_ahead_planned_under_faults(
    make_store: Callable[..., Store], seed: int, record_property: Callable[[str, object], None]
) -> None:
    trial = Trial(make_store(*NODES), seed)
    fates = [trial.turn() for _ in range(TURNS)]
    record_property("fates", fates)
    record_property("slowest_free_s", trial.slowest_free_s)
    print(f"seed {seed}: {', '.join(fates)}; DRAM free again within {trial.slowest_free_s:.2f} s")
    assert not any(engine.client.stats().get("client_bugs_total") for engine in trial.engines.values())
