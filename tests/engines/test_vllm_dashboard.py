"""The shipped dashboard and alert rules, held against scrapes of a running store with a served vLLM engine.

The tests scrape the processes that ``deploy``'s Prometheus scrapes: metadata server and node. vLLM's own ``/metrics`` counts only
for the optional row and for the optional branches of rules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.wait import wait_until

pytest.importorskip("vllm")

import yaml
from monitored import SCRAPES, VLLM_PREFIX, Prometheus, Selector, alerts, scraped, selectors, targets

from kvclient.engines.vllm.counters import COUNTERS
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import EngineBed, ServedEngine, ServeSpec, store_transfer
from kvstore.testing.tiny_models import make_model

MIB = 1 << 20
WAIT_S = 120.0
PROMPT_TOKENS = 500
BLOCK_TOKENS = 32
ELSEWHERE = {"Router (if one runs)", "Index in a Valkey Cluster (if metadata.engine names one)"}
"""Rows of the dashboard that ``tests/router`` and ``tests/metadata/test_metadata_shards.py`` hold against running servers."""
OF_VERDICTS = "Error of predictions"
"""A panel without values here: the engine always loads, so nothing is predicted."""
OF_DISK = {"KVStoreVolumeDiskFilling", "KVStoreIndexDiskFilling"}
"""Rules about the disk, which other tests fill and empty."""
OF_SHARDS = "kvstore_index_shard_"
"""Prefix of the metrics of a Valkey Cluster, which ``tests/metadata/test_metadata_shards.py`` scrapes."""


@dataclass
class Bed:
    """The processes, and how many prompts they have served."""

    cluster: LocalCluster
    engine: ServedEngine
    prometheus: Prometheus | None
    rounds: int = 0

    @property
    def servers(self) -> dict[str, list[str]]:
        """Addresses that the shipped configuration scrapes, by job."""
        return {
            "kvstore-metadata": [self.cluster.node("metadata").metrics_address],
            "kvstore-node": [self.cluster.node("n").metrics_address],
        }

    def round(self) -> None:
        """A new prompt, computed and stored; then the same, loaded."""
        prompt = random.Random(self.rounds).choices(range(32, 127), k=PROMPT_TOKENS)
        self.rounds += 1
        self.engine.complete(prompt, max_tokens=1)
        self.engine.reset_prefix_cache()
        before = self.engine.metrics()[f"{VLLM_PREFIX}load_blocks_total"]
        wait_until(lambda: self._loads(prompt, before), "a stored prompt is loaded", timeout_s=WAIT_S)

    def _loads(self, prompt: list[int], before: float) -> bool:
        """Ask again until the index shows what was stored."""
        self.engine.reset_prefix_cache()
        self.engine.complete(prompt, max_tokens=1)
        return self.engine.metrics()[f"{VLLM_PREFIX}load_blocks_total"] > before


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Bed]:
    """A store of one host and an engine, which has stored and loaded."""
    folder = tmp_path_factory.mktemp("seen")
    node = NodeSpec("n", dram_bytes=64 * MIB, nvme_bytes=64 * MIB)
    with LocalCluster([node], folder / "store") as cluster, EngineBed(folder / "engines") as engines:
        store = store_transfer(cluster.metadata_address, cluster.node("n").local_socket)
        model = make_model(model_folder / "tiny")
        engine = engines.start(ServeSpec("engine", model, store=store, block_tokens=BLOCK_TOKENS))
        made = Bed(cluster, engine, None)
        made.round()
        yield made


@pytest.fixture(scope="module")
def prometheus(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen lookups, loads and stores between two scrapes of every job."""
    if not Prometheus.installed():
        pytest.skip("no Prometheus on this machine")
    jobs = {**bed.servers, "vllm": [bed.engine.address]}
    with Prometheus(tmp_path_factory.mktemp("prometheus"), jobs) as made:
        wait_until(lambda: len(made.query("up == 1")) == 3, "all targets are scraped", timeout_s=WAIT_S)

        def busy() -> bool:
            bed.round()
            totals = (
                "kvstore_metadata_lookup_hit_blocks_total",
                "kvstore_node_load_seconds_count",
                f"{VLLM_PREFIX}load_blocks_total",
                'kvstore_rpc_seconds_count{method="Prepare"}',
            )
            return all(sum(value for _, value in made.query(f"rate({total}[60s])")) > 0 for total in totals)

        wait_until(busy, "rates of loads and stores", timeout_s=WAIT_S)
        wait_until(
            lambda: all(rule["health"] == "ok" for rule in made.rules().values()), "all rules are evaluated", timeout_s=WAIT_S
        )
        yield made


def queried_selectors() -> dict[str, list[Selector]]:
    """Selectors of each query of a panel and of each rule."""
    found = {f"{panel} {target['refId']}": selectors(target["expr"]) for row, panel, target in targets() if row not in ELSEWHERE}
    of_rules = {rule["alert"]: selectors(str(rule["expr"])) for rule in alerts()}
    return found | {name: asked for name, asked in of_rules.items() if not (asked and asked[0].name.startswith(OF_SHARDS))}


def test_shipped_scrapes_ask_metadata_server_and_nodes_alone(bed: Bed) -> None:
    for path in SCRAPES:
        assert {job["job_name"] for job in yaml.safe_load(path.read_text())["scrape_configs"]} == bed.servers.keys()


def test_every_panel_and_rule_has_series_in_a_scrape(bed: Bed) -> None:
    def missing() -> set[tuple[str, Selector]]:
        servers = [series for addresses in bed.servers.values() for address in addresses for series in scraped(address)]
        engine = scraped(bed.engine.address)
        return {
            (name, selector)
            for name, queried in queried_selectors().items()
            for selector in queried
            if not any(
                selector.takes(one.name, one.labels) for one in (engine if selector.name.startswith(VLLM_PREFIX) else servers)
            )
        }

    wait_until(lambda: not missing(), lambda: f"every panel and rule has series; missing: {missing()}", timeout_s=WAIT_S)


def test_vllm_shows_every_counter_of_the_connector(bed: Bed) -> None:
    shown = {series.name for series in scraped(bed.engine.address) if series.name.startswith(VLLM_PREFIX)}
    assert {name for name in shown if name.endswith("_total")} == {f"{VLLM_PREFIX}{name}_total" for name in COUNTERS}


def test_every_panel_has_values(prometheus: Prometheus) -> None:
    empty = {
        f"{panel}: {target['expr']}"
        for row, panel, target in targets()
        if row not in ELSEWHERE
        and panel != OF_VERDICTS
        and not any(math.isfinite(value) for _, value in prometheus.query(target["expr"]))
    }
    assert empty == set()


def test_panels_compute_sane_values(prometheus: Prometheus) -> None:
    values = {
        f"{panel} {target['refId']}": [value for _, value in prometheus.query(target["expr"])]
        for row, panel, target in targets()
        if row not in ELSEWHERE
    }
    for ratio in ("Hit ratio A", "Hit ratio over time A", "Hit ratio of engines A"):
        assert all(0 < value < 1 for value in values[ratio]), (ratio, values[ratio])
    assert values["Hit ratio over time B"] == values["Hit ratio of engines B"] == [1], "all that was found was brought"
    assert values["Nodes alive A"] == [1]
    assert values["Nodes alive B"] == values["Volumes read-only A"] == values["Quarantined blocks A"] == [0]
    assert 0 < values["Loads, p99 A"][0] <= 30
    assert values["Loaded A"][0] > 0
    assert all(0 <= value <= 1 for value in values["Fill A"])
    assert sum(values["Blocks that loads did not deliver A"]) == 0


def test_no_alert_fires_on_a_healthy_store(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert rules.keys() == {rule["alert"] for rule in alerts()}
    assert {name: rule["state"] for name, rule in rules.items() if rule["state"] != "inactive" and name not in OF_DISK} == {}
