"""Fixtures of end-to-end tests: a store of real processes, and an engine that checks every byte it loads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvclient import CacheSpec, ClientOptions, KVClient, LoadResult, Paths, StoreResult
from kvproto.v1 import node_pb2
from kvstore.core.types import BlockKey, Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.accounting_check import check_accounts
from kvstore.workload.payload import Payloads
from support.node_stats import empty_dram, evict, flush, node_stats

WAIT_S = 30.0
HANG_S = 60.0
"""A call that has not returned by then hangs. Many times the deadlines of these tests."""


class Engine:
    """A client that generates its blocks and checks loaded blocks byte for byte."""

    def __init__(
        self,
        cluster: LocalCluster,
        node: str | None,
        *,
        layers: int = 4,
        layer_bytes: int = 4096,
        paths: Paths | None = None,
        hint_nodes: int = 4,
        **spec: object,
    ) -> None:
        fields = {"model": "test", "block_tokens": 16, "layers": layers, "layer_block_bytes": layer_bytes, **spec}
        self.spec = CacheSpec(**fields)  # type: ignore[arg-type]
        local = cluster.node(node).local_socket if node is not None else None
        options = ClientOptions(client_name="e2e", paths=paths, hint_nodes=hint_nodes)
        self.client = KVClient.connect(cluster.metadata_address, self.spec, node=local, options=options)
        self.payloads = Payloads(self.spec.block_bytes)

    def keys(self, chain: str, blocks: int) -> list[BlockKey]:
        seed = int.from_bytes(hashlib.sha256(chain.encode()).digest()[:4], "little")
        tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * self.spec.block_tokens, dtype=np.uint32)
        return self.client.keys(tokens)

    def allocate(self, blocks: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.zeros((blocks, self.spec.block_bytes), np.uint8)

    def store(self, chain: str, blocks: int, **how: Any) -> StoreResult:
        keys = self.keys(chain, blocks)
        data = self.allocate(blocks)
        self.payloads.fill(keys, data)
        return self.client.store(keys, data, **how)

    def load(self, chain: str, blocks: int, **how: object) -> LoadResult:
        """Load, and check the bytes of every hit."""
        return self.load_keys(self.keys(chain, blocks), **how)

    def load_keys(self, keys: list[BlockKey], **how: object) -> LoadResult:
        data = self.allocate(len(keys))
        result = self.client.load(keys, data, **how)  # type: ignore[arg-type]
        hits = np.flatnonzero(result.outcomes == 1)
        wrong = self.payloads.wrong_blocks([keys[position] for position in hits], data[hits])
        assert list(wrong) == [], "WRONG BYTES"
        return result

    def close(self) -> None:
        self.client.close()
        check_accounts(self.client.stats(), self.spec.block_tokens)


class Store:
    """A cluster with its engines, closed together."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._engines: list[Engine] = []

    def engine(self, node: str | None, **spec: object) -> Engine:
        made = Engine(self.cluster, node, **spec)  # type: ignore[arg-type]
        self._engines.append(made)
        return made

    def node_stats(self, node: str) -> node_pb2.GetNodeStatsResponse:
        return node_stats(self.cluster, node)

    def evict(self, node: str, tier: int = Tier.DRAM) -> int:
        return evict(self.cluster, node, tier)

    def empty_dram(self, node: str) -> None:
        empty_dram(self.cluster, node)

    def flush(self, node: str) -> bool:
        return flush(self.cluster, node)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self.cluster.close()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Start stores. At the end of the test all are stopped, and the ends of their logs are printed."""
    made: list[Store] = []

    def make(*nodes: NodeSpec, **how: Any) -> Store:
        store = Store(LocalCluster(nodes, tmp_path / str(len(made)), **how).__enter__())
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()
        for log in store.cluster.base_dir.glob("*.log"):
            print(f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
