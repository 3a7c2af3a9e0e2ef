"""Loads over several hosts' storage links while the metadata server that plans them is killed: two servers share an index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import Engine, Store
from kvclient import LoadResult, Lookup, Paths
from kvstore.core.types import Outcome, Tier
from kvstore.embedded.cluster import NodeSpec
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.observe.metric_definitions import client as client_metrics
from support.server_pair import server_pair
from support.wait import wait_until

MIB = 1 << 20
BLOCKS = 40
CHAIN = "chain"
SETTINGS = (("cache_loads", "false"), ("lease", "3s"))
NODES = (
    NodeSpec("s", roles=("storage",), dram_bytes=64 * MIB, nvme_bytes=128 * MIB, settings=SETTINGS),
    NodeSpec("p", dram_bytes=64 * MIB, write_back_to="s", settings=SETTINGS[1:]),
    NodeSpec("d", roles=("decode",), dram_bytes=64 * MIB, settings=SETTINGS),
)


def lookup_in_storage(store: Store, engine: Engine) -> Lookup:
    """A lookup of the chain after it left the DRAM of all nodes."""
    found: list[Lookup] = []

    def is_stored() -> bool:
        for node in ("s", "p", "d"):
            store.evict(node)
        found[:] = [engine.client.lookup(engine.keys(CHAIN, BLOCKS))]
        return found[0].hit_blocks == BLOCKS and {run.tier for run in found[0].runs} == {Tier.NVME}

    wait_until(is_stored)
    return found[0]


def load(engine: Engine, found: Lookup) -> LoadResult:
    """Load the whole chain, and check its bytes."""
    data = engine.allocate(BLOCKS)
    result = engine.client.load(found, data, paths=Paths(decode_node="d", policy="round_robin"), deadline_s=20.0)
    assert set(np.asarray(result.outcomes)) == {Outcome.HIT}
    assert list(engine.payloads.wrong_blocks(list(found.keys), data)) == [], "WRONG BYTES"
    return result


def test_loads_go_on_while_planning_moves(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("no valkey-server here")
    with (
        ValkeyServers(tmp_path / "valkey", shards=1) as cluster,
        server_pair(tmp_path / "store", *NODES, engine=f"valkey://{','.join(cluster.seeds)}") as pair,
    ):
        store = Store(pair)
        engine = store.engine("p")
        assert engine.store(CHAIN, BLOCKS, durable=True).durable
        found = lookup_in_storage(store, engine)

        def is_planned() -> bool:
            return load(engine, found).bytes_by_path.get("decode", 0) > 0

        wait_until(is_planned)
        owner, other = pair.NAMES
        assert "role taken: plan" in (pair.base_dir / f"{owner}.log").read_text()
        failed = engine.client.stats().get(client_metrics.PLANS_FAILED, 0)
        pair.kill(owner)
        assert not is_planned()
        assert engine.client.stats()[client_metrics.PLANS_FAILED] > failed
        wait_until(is_planned)
        assert "role taken: plan" in (pair.base_dir / f"{other}.log").read_text()
        engine.close()
