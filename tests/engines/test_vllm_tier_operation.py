"""The tier in operation: many requests and little memory, a store that comes late, resets, events, metrics."""

from __future__ import annotations

import copy
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

from tier_bed import PRIMARY_BYTES, engine
from vllm_bed import BLOCK, MIB, text, tiny

from kvclient.engines.vllm.tier.counters import COUNTERS, GAUGES, metric_name
from kvstore.core.errors import Unsupported
from kvstore.embedded.cluster import LocalCluster
from kvstore.testing.connector.driver import StoreAddress

PROMPTS = [text(1, 300), text(2, 200)]
CHUNK_BYTES = 64 << 10
"""Of 32 tokens of the tiny model."""


def test_tier_crowd_with_little_memory_answers_as_alone(folder: Path, store: StoreAddress) -> None:
    """Requests are preempted, and host memory holds less than one prompt."""
    stems = [text(10 + at, 6 * BLOCK) for at in range(3)]
    prompts = [stems[at % 3] + text(20 + at, 40 + 37 * at) for at in range(12)]
    small = {"kv_cache_memory_bytes": 3 * MIB, "max_model_len": 1024}
    model = tiny("llama", folder)
    with engine(model, None, **small) as alone:
        right = [answer.tokens for answer in alone.answers(prompts, 60)]
    with engine(model, store, {"salt": "crowd"}, extra={"cpu_bytes_to_use": 9 * CHUNK_BYTES}, **small) as crowded:
        requests: list[Any] = []
        arrived = crowded.connector.on_new_request

        def on_new_request(request: Any) -> None:
            requests.append(request)
            arrived(request)

        crowded.connector.on_new_request = on_new_request
        for _ in range(3):
            assert [answer.tokens for answer in crowded.answers(prompts, 60, together=True)] == right
            crowded.settle()
            assert crowded.llm.reset_prefix_cache()
        assert any(request.num_preemptions for request in requests)
        assert not crowded.tier.counters.totals()["bugs"]


def test_tier_store_that_comes_late_is_used(folder: Path, fragile: LocalCluster) -> None:
    address = StoreAddress(fragile.metadata_address, fragile.node("n").local_socket)
    fragile.kill("n")
    fragile.kill("metadata")
    options = {"connect_deadline_s": 0.3, "lookup_deadline_s": 0.3, "store_deadline_s": 1.0}
    with engine(tiny("llama", folder), address, options) as served:
        first = served.answers(PROMPTS)
        counts = served.tier.counters.totals()
        assert counts["connected"] == 0
        assert counts["lookup_failures"]
        fragile.start_metadata()
        fragile.start_node("n")
        for _ in range(60):
            served.forget_memory()
            answers = served.answers(PROMPTS)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in first]
            if all(answer.cached_tokens for answer in answers):
                break
        else:
            pytest.fail("the store is not used")
        assert served.tier.counters.totals()["connected"] == 1


def test_tier_reset_while_pages_are_in_use_closes_it(folder: Path, store: StoreAddress) -> None:
    """Otherwise KV of the old weights would be stored in the new epoch."""
    from vllm import SamplingParams

    with engine(tiny("llama", folder), store, {"salt": "in-use"}) as served:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        served.llm.llm_engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, params)
        scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
        copies, late = served.tier.page_copies, []
        report, copies.reported = copies.reported, late.append
        while not (scheduler.running and any(late)):  # until its lookup is answered, or late, and pages were copied
            served.llm.llm_engine.step()
        copies.reported = report
        open_at_drain: list[bool] = []
        drain = served.tier.drain_jobs

        def drain_jobs() -> None:
            open_at_drain.append(bool(served.tier.stores))
            drain()

        served.tier.drain_jobs = drain_jobs
        assert not served.llm.reset_prefix_cache(reset_connector=True)
        assert not served.tier.stores
        assert open_at_drain == [False], "loads and stores under way are cancelled before vLLM waits for them"
        assert copies.stale, "as if a worker had yet to copy pages into rows of before the reset"
        for ended in late:
            report(ended)
        while served.llm.llm_engine.has_unfinished_requests():
            served.llm.llm_engine.step()
        served.settle()
        assert not copies.stale
        served.llm.apply_model(lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(2) is None)
        assert served.llm.reset_prefix_cache(reset_connector=True)
        first = served.answers(PROMPTS)
        assert [answer.cached_tokens for answer in first] == [0, 0]
        served.forget_memory()
        again = served.answers(PROMPTS)
        assert all(answer.cached_tokens for answer in again)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def test_tier_slow_stores_make_vllm_drop_stores(folder: Path, store: StoreAddress) -> None:
    """By vLLM's own detector, which takes time and bytes of each store from the tier. Stores resume when it sees no pressure."""
    detects = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 0.2,
        "low_water_s": 0.1,
        "warmup_completions": 1,
        "decay_half_life_s": 3600.0,
        "cooldown_s": 0.0,
    }
    prompts = [text(50 + at, 100) for at in range(4)]
    with engine(tiny("llama", folder), store, {"salt": "pressure"}, extra={"backpressure": detects}) as served:
        [chunks], detector = served.tier.stores.values(), served.tier.bp_detector

        pause_s, stored = [0.3], []

        def slow_store(*given: Any, stores: Any = chunks.store) -> Any:
            stored.append(given)
            time.sleep(pause_s[0])
            return stores(*given)

        def stores_of(prompt: list[int]) -> int:
            stored.clear()
            served.answers([prompt])
            served.settle()
            return len(stored)

        chunks.store = slow_store
        assert stores_of(prompts[0])
        assert not detector.is_under_pressure(), "the first store only warms it up"
        assert stores_of(prompts[1])
        assert detector.is_under_pressure()
        assert not stores_of(prompts[2])
        pause_s[0] = 0.0
        detector.store_latency_ema = 0.0  # instead of waiting until it decays
        assert stores_of(prompts[3])
        assert not detector.is_under_pressure()


@pytest.mark.parametrize("name", ["connector:KVStoreConnector", "tier:KVStoreOffloadingConnector"])
def test_connectors_refuse_untested_vllm(name: str) -> None:
    """At their start, before they use anything else of vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    module, _, connector = name.partition(":")
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    made = getattr(import_module(f"kvclient.engines.vllm.{module}"), connector)
    with mock.patch("vllm.__version__", "0.99.0"), pytest.raises(Unsupported, match="allow_untested_vllm"):
        made(config, KVConnectorRole.SCHEDULER, None)


def test_tier_events_and_metrics_tell_what_was_stored(folder: Path, store: StoreAddress) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    how: dict[str, Any] = {"kv_events_config": events, "extra": {"self_describing_kv_events": True}}
    with engine(tiny("llama", folder), store, {"salt": "events"}, **how) as served:
        taken: list[Any] = []
        take = served.connector.take_events

        def take_events() -> list[Any]:
            new = list(take())
            taken.extend(new)
            return new

        served.connector.take_events = take_events
        served.answers(PROMPTS[:1])
        served.settle()
        take_events()
        stored = [one for one in taken if isinstance(one, BlockStored) and one.ownership == "kvstore"]
        assert {one.medium for one in stored} == {"CPU"}, "the node has only DRAM"
        told = {tuple(one.token_ids) for one in stored}
        assert {tuple(PROMPTS[0][at : at + BLOCK]) for at in range(0, 299 // BLOCK * BLOCK, BLOCK)} <= told
        stats = served.connector.get_kv_connector_stats()
        vllm_config = copy.copy(served.llm.llm_engine.vllm_config)
    check_metrics_of_api_server(vllm_config, stats)


def check_metrics_of_api_server(vllm_config: Any, stats: Any) -> None:
    """The API server has the user's configuration, not the one that the connector completes."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvclient.engines.vllm.tier import KVStoreOffloadingConnector

    vllm_config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    vllm_config.kv_transfer_config.kv_connector_extra_config = {"cpu_bytes_to_use": PRIMARY_BYTES}
    registry = CollectorRegistry()
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = KVStoreOffloadingConnector.build_prom_metrics(vllm_config, types, ["engine"], {0: ["0"]})
    if stats is not None:
        metrics.observe(stats.data)
    assert {metric_name(name) for name in {*COUNTERS, *GAUGES}} <= {one.name for one in registry.collect()}
