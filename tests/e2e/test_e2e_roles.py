"""Planning and scheduling go on at another metadata server after their owner is killed: two servers share an index."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import Engine, Store
from kvclient import EngineFigures, EngineRequest, KVStoreError, LoadResult, Lookup, Paths, SchedulerClient
from kvclient.scheduling.types import EngineRole
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


class ReportedGroup(threading.Thread):
    """The leader of an engine group. Its engines keep all work that they get."""

    def __init__(self, metadata: str, name: str, role: EngineRole, tokens: dict[str, int]) -> None:
        super().__init__(name=f"leader of {name}", daemon=True)
        self.tokens = Counter(tokens)
        self.served: Counter[str] = Counter()
        self._name, self._role = name, role
        self._metadata = metadata
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        with SchedulerClient(self._metadata) as client:
            leader = client.leader(self._name, self._role)
            while not self._ended.wait(0.05):
                decode_tokens = 1 << 20 if self._role == "decode" else 0
                figures = [
                    EngineFigures(engine, "p", sequences=1, tokens=tokens, hbm_tokens=decode_tokens)
                    for engine, tokens in self.tokens.items()
                ]
                try:
                    work = leader.report(figures)
                except KVStoreError:
                    continue  # no server plans at the moment
                for one in work.assigned:
                    if one.request_id not in self.served:
                        self.tokens[one.engine] += one.prompt_tokens
                    self.served[one.request_id] = one.generation

    def close(self) -> None:
        self._ended.set()
        self.join(10)


def test_queues_are_known_after_scheduling_moved(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("no valkey-server here")
    with (
        ValkeyServers(tmp_path / "valkey", shards=1) as cluster,
        server_pair(tmp_path / "store", NodeSpec("p"), engine=f"valkey://{','.join(cluster.seeds)}") as pair,
        SchedulerClient(pair.setting) as router,
    ):
        prefill = ReportedGroup(pair.setting, "prefill", "prefill", {"busy": 10_000, "idle": 0})
        decode = ReportedGroup(pair.setting, "decode", "decode", {"d": 0})
        router.assign(EngineRequest("first", prompt_tokens=500), deadline_s=20.0)
        pair.kill(pair.NAMES[0])
        wait_until(lambda: "role taken: plan" in (pair.base_dir / f"{pair.NAMES[1]}.log").read_text(), "it plans")
        served = [router.assign(EngineRequest(f"r{number}", prompt_tokens=500), deadline_s=20.0) for number in range(19)]
        wait_until(lambda: sum(prefill.tokens.values()) == 20_000, "all work has arrived")
        assert {one.decode.engine for one in served} == {"d"}
        assert abs(prefill.tokens["busy"] - prefill.tokens["idle"]) <= 0.1 * 10_000
        prefill.close()
        decode.close()
