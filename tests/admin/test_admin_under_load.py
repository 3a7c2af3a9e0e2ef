"""Operators change quotas, rules and volumes at random while engines work and daemons die.

No load brings a wrong byte. Afterwards nothing is stuck: all blocks can be dropped, no slot is leaked, and new blocks are stored
durably. (A daemon that logs a traceback fails the test, too: see ``support.unexpected_errors``.)
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp

from kvclient import CacheSpec, KVClient, LoadResult
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.workload.payload import Payloads
from support.node_stats import node_stats
from support.wait import wait_until

MIB = 1 << 20
TENANTS = ("acme", "beta", "")
NODES = ("a", "b")
VOLUMES = [f"{node}/{volume}" for node in NODES for volume in ("dram", "nvme0")]
CHAINS, LONGEST = 12, 40
WORK_S = 5.0
QUIET_S = 60.0
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 40))]


class Worker:
    """One engine, which loads and stores prefixes of random chains, and checks every byte that it loads."""

    def __init__(self, cluster: LocalCluster, tenant: str, node: str, seed: int) -> None:
        self.spec = CacheSpec(model="m", block_tokens=16, layers=4, layer_block_bytes=16 << 10, tenant=tenant)
        self.client = KVClient.connect(cluster.metadata_address, self.spec, node=cluster.node(node).local_socket)
        self.figures: Counter[str] = Counter()
        self._payloads = Payloads(self.spec.block_bytes)
        self._draw = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine of {tenant}")

    def chain(self, number: int) -> list[BlockKey]:
        tokens = np.random.default_rng(number).integers(0, 50_000, LONGEST * 16, dtype=np.uint32)
        return list(self.client.keys(tokens))

    def load(self, keys: list[BlockKey]) -> LoadResult:
        data = np.zeros((len(keys), self.spec.block_bytes), np.uint8)
        found = self.client.load(keys, data, deadline_s=5.0)
        wrong = self._payloads.wrong_blocks(keys[: found.hit_blocks], data[: found.hit_blocks])
        self.figures.update(hits=found.hit_blocks, wrong=len(list(wrong)))
        return found

    def store(self, keys: list[BlockKey], *, durable: bool) -> Any:
        data = np.zeros((len(keys), self.spec.block_bytes), np.uint8)
        self._payloads.fill(keys, data)
        return self.client.store(keys, data, durable=durable, deadline_s=5.0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the engine is blocked"

    def _run(self) -> None:
        draw = self._draw
        while not self._stop.is_set():
            chain = self.chain(draw.randrange(CHAINS))
            keys = chain[: draw.randint(1, LONGEST)]
            ahead = self.client.read_ahead(self.client.lookup(keys), deadline_s=1.0) if draw.random() < 0.3 else None
            self.load(keys)
            if ahead is not None:
                ahead.end()
            if draw.random() < 0.3:
                self.client.hints.keep(f"session {draw.randrange(4)}", keys, keep_for_s=draw.uniform(0.1, 5.0))
            elif draw.random() < 0.1:
                self.client.hints.end(f"session {draw.randrange(4)}", keys)
            self.store(chain[: draw.randint(len(keys), LONGEST)], durable=draw.random() < 0.5)
            self.figures["turns"] += 1


class Operator:
    """Changes settings at random. Answers are not checked: nodes are down, tags are old, namespaces are kept."""

    def __init__(self, cluster: LocalCluster, namespaces: list[str], seed: int) -> None:
        self.http = AdminHttp(cluster.start_admin().address)
        self.figures: Counter[str] = Counter()
        self._cluster = cluster
        self._namespaces = namespaces
        self._draw = random.Random(seed)

    def ask(self, method: str, path: str, body: Any = None) -> int:
        try:
            return self.http.ask(method, path, body, if_match="*").status
        except (OSError, HTTPException):
            return 0

    def quota(self) -> None:
        tenant, draw = self._draw.choice(TENANTS), self._draw
        blocks = {f"{tier}_bytes": draw.randint(0, 200) * 64 << 10 for tier in ("dram", "nvme") if draw.random() < 0.7}
        self.ask("PUT" if blocks else "DELETE", f"/v1/tenants/quota?tenant={tenant}", blocks or None)

    def rule(self) -> None:
        draw = self._draw
        rule = {"ttl_s": draw.choice([None, 1.0, 2.0]), "kept": draw.random() < 0.2, "copies": draw.choice([1, 1, 2])}
        self.ask("PUT", f"/v1/namespaces/{draw.choice(self._namespaces)}/rule", rule)

    def evict(self) -> None:
        self.ask("POST", f"/v1/volumes/{self._draw.choice(VOLUMES)}/evict", {"to_percent": self._draw.choice([0, 30])})

    def invalidate(self) -> None:
        self.ask("POST", f"/v1/namespaces/{self._draw.choice(self._namespaces)}/invalidate")

    def check(self) -> None:
        self.ask("POST", f"/v1/volumes/{self._draw.choice(NODES)}/nvme0/check")

    def kill_node(self) -> None:
        node = self._draw.choice(NODES)
        self._cluster.kill(node)
        self._cluster.start_node(node)

    def hang_node(self) -> None:
        process = self._cluster.node(self._draw.choice(NODES)).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0, 1))
        process.send_signal(signal.SIGCONT)

    def kill_metadata(self) -> None:
        self._cluster.kill("metadata")
        self._cluster.start_metadata()

    def invalidate_all(self) -> None:
        for namespace in self._namespaces:
            self.ask("POST", f"/v1/namespaces/{namespace}/invalidate")

    def work(self, seconds: float) -> None:
        """Act for some time. Mild actions are more frequent than those that restart a daemon."""
        mild, hard = (self.quota, self.rule, self.evict, self.check), (self.kill_node, self.kill_metadata, self.hang_node)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            kind = self._draw.random()
            action: Callable[[], None] = self._draw.choice(hard if kind < 0.1 else (self.invalidate,) if kind < 0.13 else mild)
            action()
            self.figures[action.__name__] += 1
            time.sleep(self._draw.uniform(0, 0.1))

    def reset(self) -> None:
        """Take all settings back."""
        for tenant in TENANTS:
            wait_until(lambda tenant=tenant: self.ask("DELETE", f"/v1/tenants/quota?tenant={tenant}") in {200, 404})  # type: ignore[misc]
        rule = {"ttl_s": None, "kept": False, "copies": 1}
        for namespace in self._namespaces:
            wait_until(lambda path=f"/v1/namespaces/{namespace}/rule": self.ask("PUT", path, rule) == 200)  # type: ignore[misc]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    nodes = [NodeSpec(name, dram_bytes=16 * MIB, nvme_bytes=24 * MIB) for name in NODES]
    with LocalCluster(nodes, tmp_path) as cluster:
        yield cluster


def bugs(cluster: LocalCluster) -> dict[str, int]:
    """Unexpected errors that nodes counted since they started."""
    return {
        f"{node} {name}": count
        for node in NODES
        for name, count in node_stats(cluster, node).counters.items()
        if name.endswith("bugs_total") and count
    }


def wait_emptied(cluster: LocalCluster, operator: Operator) -> None:
    """Invalidate all namespaces until no volume holds a block or a slot. (Eviction leaves blocks that are in DRAM only.)"""
    held: list[str] = []

    def is_empty() -> bool:
        operator.invalidate_all()
        tiers = [tier for node in NODES for tier in node_stats(cluster, node).tiers if tier.blocks or tier.used_bytes]
        held[:] = [f"{tier.volume_id}: {tier.blocks} blocks, {tier.used_bytes} bytes" for tier in tiers]
        return not held

    wait_until(is_empty, lambda: f"nothing is held for ever; still held: {held}", QUIET_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_settings_and_faults_at_random_leave_nothing_stuck(cluster: LocalCluster, seed: int) -> None:
    workers = [Worker(cluster, tenant, node, seed) for tenant in TENANTS for node in NODES]
    operator = Operator(cluster, sorted({worker.spec.namespace.hex() for worker in workers}), seed)
    for worker in workers:
        worker.start()
    operator.work(WORK_S)
    for worker in workers:
        worker.stop()
    figures = sum((worker.figures for worker in workers), Counter[str]())
    print(f"seed {seed}: {dict(figures)} {dict(operator.figures)}")
    assert figures["wrong"] == 0
    assert all(worker.figures["turns"] for worker in workers)
    assert figures["hits"] > 0
    operator.reset()
    wait_emptied(cluster, operator)
    for worker in workers:
        keys = worker.chain(CHAINS)
        wait_until(lambda worker=worker, keys=keys: worker.store(keys, durable=True).durable, "a store becomes durable", QUIET_S)  # type: ignore[misc]
        assert worker.load(keys).hit_blocks == LONGEST
        worker.client.close()
    assert bugs(cluster) == {}
