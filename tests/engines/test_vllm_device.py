"""vLLM whose pages are copied as a GPU's are (``late_connector``): the same tokens and blocks as with pages in host memory.

vLLM runs on a CPU here and computes at once, so only the copies, and the steps that wait for them, are late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pd_bed import Oracle, PdBed, pd_bed
from vllm_bed import SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvclient import KVClient, Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import ServeSpec
from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.connector.suite import ConnectorSuite
from kvstore.testing.tiny_models import make_model
from support.client_parts import session_of
from support.node_stats import empty_dram, flush
from support.wait import wait_until

LATE = {"connector": "LateConnector", "module": "late_connector"}
PROMPTS = [text(1, 700), text(2, 580), text(3, 128), text(4, 31)]

Open = Callable[..., VllmEngine]


@pytest.fixture
def opened(folder: Path, store: StoreAddress) -> Iterator[Open]:
    """Opens engines, one at a time, and closes them."""
    single = SingleEngine()

    def open_engine(family: str, options: dict[str, object], **driver: Any) -> VllmEngine:
        return single.open(VllmDriver(tiny(family, folder), family, **driver), store, {"salt": family, **options})

    yield open_engine
    single.close()


def ask(engine: VllmEngine) -> tuple[list[tuple[int, ...]], list[int]]:
    answers = engine.one_by_one(PROMPTS)
    return [one.tokens for one in answers], [one.loaded_tokens for one in answers]


@pytest.mark.parametrize(
    ("family", "mode", "copies"), [("llama", "async", "batched"), ("llama", "layerwise", "staged"), ("gemma3", "async", "auto")]
)
def test_blocks_go_both_ways_between_host_memory_and_a_device(family: str, mode: str, copies: str, opened: Open) -> None:
    """Stored out of host memory, loaded into a device; and the other way round, under another salt."""
    for salt, (writer, reader) in (("to", ({}, LATE)), ("from", (LATE, {}))):
        options = {"salt": f"{salt} {mode}", "device_copies": copies}
        engine = opened(family, options, **writer)
        right, _ = ask(engine)
        assert engine.flush()
        engine = opened(family, options, load_mode=mode, **reader)
        tokens, loaded = ask(engine)
        assert tokens == right
        assert loaded == [(len(prompt) - 1) // engine.block_tokens * engine.block_tokens for prompt in PROMPTS]
        engine.worker_side.count_device_copies()
        counts = engine.counters()
        assert counts.get("bugs", 0) == counts.get("loads_failed", 0) == 0
        assert counts.get("device_loaded_bytes", 0) == (counts["load_bytes"] if reader else 0)


def tiers_of(client: KVClient, prompt: list[int]) -> set[Tier]:
    """The tiers in which the index shows blocks of a prompt."""
    return {run.tier for run in client.lookup(client.keys(prompt)).runs}


def test_blocks_land_from_nvme_with_device_checksums(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device hashes stored blocks and blocks that land in its ring; no loaded block passes the arena."""
    from late_connector import QuickChecksums, stand_in_kernels

    stand_in_kernels(monkeypatch)
    hashed: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        hash_rows = getattr(QuickChecksums, name)

        def of(self: QuickChecksums, *given: Any, **how: Any) -> Any:
            hashed.append(name)
            return hash_rows(self, *given, **how)

        return of

    for name in ("of_pages", "of_memory"):
        monkeypatch.setattr(QuickChecksums, name, counted(name))
    single = SingleEngine()
    with LocalCluster([NodeSpec("n", dram_bytes=256 << 20, nvme_bytes=512 << 20)], tmp_path) as cluster:
        address = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)
        options = {"device_gds": "forced", "read_ahead_requests": 0}
        engine = single.open(VllmDriver(tiny("llama", folder), **LATE), address, options)
        try:
            right, loaded = ask(engine)  # by the engine alone: the store is empty
            assert loaded == [0] * len(PROMPTS)
            assert engine.flush()
            engine.forget()
            assert "of_pages" in hashed
            (client,) = engine.worker_side.clients
            assert flush(cluster, "n")
            empty_dram(cluster, "n")
            wait_until(lambda: all(tiers_of(client, prompt) == {Tier.NVME} for prompt in PROMPTS[:3]), "the index shows that")
            reader = client.context.disks
            assert reader is not None
            wait_until(lambda: reader.reads_disks(session_of(client).volumes))
            del hashed[:]
            tokens, loaded = ask(engine)
            assert tokens == right
            blocks = [(len(prompt) - 1) // engine.block_tokens for prompt in PROMPTS]
            assert loaded == [count * engine.block_tokens for count in blocks]
            assert "of_memory" in hashed
            engine.worker_side.count_device_copies()
            counts = engine.counters()
            assert counts["device_gds_blocks"] == sum(blocks)
            for name in ("device_loaded_bytes", "device_gds_failed_blocks", "device_checksums_by_host", "loads_failed", "bugs"):
                assert counts.get(name, 0) == 0, name
        finally:
            single.close()


@pytest.mark.thorough
def test_prompts_change_engines_from_device_to_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PdBed.spec

    def spec(bed: PdBed, name: str) -> ServeSpec:
        given = plain(bed, name)
        store = {**(given.store or {}), "kv_connector": "LatePDConnector", "kv_connector_module_path": "late_connector"}
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        return replace(given, store=store, environment={**given.environment, "PYTHONPATH": path})

    monkeypatch.setattr(PdBed, "spec", spec)
    model = make_model(tmp_path / "model")
    oracle = Oracle(model)
    with pd_bed(tmp_path, model) as bed:
        for seed, tokens in enumerate((31, 32, 333, 900, 2100)):
            prompt = text(20 + seed, tokens)
            assert bed.ask(prompt) == oracle.says(prompt, 16)
        prefill, decode = bed.counts(bed.prefill), bed.counts(bed.decode)
    assert decode["prompts"] == 5
    assert decode["device_loaded_bytes"] >= decode["prompt_bytes"] > 0
    assert prefill["device_stored_bytes"] >= prefill["handoff_bytes"] > 0
    assert prefill.get("handoffs_failed", 0) == prefill.get("bugs", 0) == decode.get("bugs", 0) == 0


@pytest.mark.thorough
class TestVllmOnALateDevice(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> VllmDriver:
        return VllmDriver(tiny("llama", folder), **LATE)


@pytest.mark.thorough
class TestVllmOnALateDeviceLayerByLayer(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> VllmDriver:
        return VllmDriver(tiny("llama", folder), load_mode="layerwise", **LATE)


def test_copy_gauges_follow_the_strategy_in_use() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from kvclient.engines.vllm.metrics import COPY_RATES, StorePromMetrics, StoreStats

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = StorePromMetrics(SimpleNamespace(kv_transfer_config=object()), kinds, ["engine"], {0: ["0"], 1: ["1"]})

    def rates(batched: int) -> StoreStats:
        rows = [[2, "load", "batched", batched, 5e9], [2, "load", "staged", 1 - batched, 0.0]]
        return StoreStats(data={COPY_RATES: {"0": rows}})

    for batched in (1, 0):
        other = StoreStats(data={COPY_RATES: {"1": [[0, "store", "staged", 1, 7e9]]}, "loads": 1})
        stats = StoreStats(data={"loads": 2}).aggregate(rates(batched)).aggregate(other)
        assert stats.reduce() == {"loads": 3}, "facts are no counts of the log line"
        metrics.observe(stats.data, 1)
        shown = generate_latest(registry).decode().splitlines()
        for name, labels, value in (
            ("strategy", 'direction="load",engine="1",group="2",strategy="batched",worker="0"', f"{batched}.0"),
            ("strategy", 'direction="load",engine="1",group="2",strategy="staged",worker="0"', f"{1 - batched}.0"),
            ("strategy", 'direction="store",engine="1",group="0",strategy="staged",worker="1"', "1.0"),
            ("bytes_per_second", 'direction="load",engine="1",group="2",strategy="batched",worker="0"', "5e+09"),
        ):
            assert f"vllm:kvstore_copy_{name}{{{labels}}} {value}" in shown
        assert sum("copy_bytes_per_second{" in line for line in shown) == 2, "none of strategies that were not measured"
