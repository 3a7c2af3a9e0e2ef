"""vLLM's own prefix cache in the index: found by a lookup with tier HBM, gone after eviction and after a reset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvclient import BlockKey, Tier
from kvclient.engine_cache.cache_namespace import cache_keys
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call, connect
from kvstore.testing.connector.driver import StoreAddress
from support.wait import wait_until

PAGES = 48
TOKENS = 20 * BLOCK + 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as made:
        yield made


@pytest.fixture
def engine(folder: Path, cluster: LocalCluster) -> Iterator[VllmEngine]:
    single, store = SingleEngine(), StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)
    yield single.open(VllmDriver(tiny("llama", folder)), store, num_gpu_blocks_override=PAGES, max_model_len=1024)
    single.close()


def test_prefix_cache_is_published_until_evicted_or_reset(engine: VllmEngine, cluster: LocalCluster) -> None:
    from kvclient.engines.vllm.metrics import CACHE_INFO

    lookup = engine.scheduler_side.prefix_lookup
    assert lookup is not None
    chain, pool = lookup.chain, engine.core.scheduler.kv_cache_manager.block_pool

    def cached(keys: Sequence[BlockKey]) -> metadata_pb2.LookupResponse:
        namespace, packed = cache_keys(chain.spec, keys)
        request = metadata_pb2.LookupRequest(namespace_id=namespace, keys=packed)
        with connect(cluster.metadata_address) as channel:
            answer: metadata_pb2.LookupResponse = call(metadata_pb2_grpc.MetadataStub(channel).Lookup, request, 5.0)
        return answer

    prompts = [text(seed, TOKENS) for seed in range(4)]
    first, *others = [chain.keys(prompt) for prompt in prompts]
    engine.generate(prompts[:1], 4)
    wait_until(lambda: cached(first).hit_blocks == TOKENS // BLOCK)
    (node,) = cached(first).nodes
    assert [volume.tier for volume in node.volumes] == [common_pb2.TIER_HBM]
    assert engine.connector.get_kv_connector_stats().data[CACHE_INFO] == (node.node_id, 1), "routers find it under this name"
    assert engine.flush()
    found = lookup.begin(RequestKeys(chain, {}), prompts[0], TOKENS // BLOCK).result()
    assert found.hit_blocks == TOKENS // BLOCK
    runs = [run for by_name in found.by_group for one in by_name.values() for run in one.runs]
    assert {run.tier for run in runs} == {Tier.DRAM}, "nobody plans a load from the engine's pages"

    def published() -> int:
        counts = engine.counters()
        return counts["cache_published_blocks"] - counts.get("cache_removed_blocks", 0)

    def run_steps() -> None:  # the pool is checked in steps
        engine.generate([text(9, 5)], 8)

    engine.generate(prompts[1:], 4)  # more pages than there are: the first prompt is evicted
    assert engine.flush()
    wait_until(lambda: cached(first).hit_blocks == 0, step=run_steps)
    assert len(pool.cached_block_hash_to_block)
    wait_until(lambda: published() == len(pool.cached_block_hash_to_block), step=run_steps)

    engine.forget()
    wait_until(lambda: published() == 0 and not cached(others[-1]).hit_blocks)
    assert "cache_ignored_blocks" not in engine.counters()

    shown: list[tuple[str, int]] = []

    def shows(value: int) -> bool:  # without a step
        stats = engine.connector.get_kv_connector_stats()
        shown.extend([stats.data[CACHE_INFO]] if stats is not None else [])
        return shown[-1:] == [(node.node_id, value)]

    cluster.stop("metadata")
    wait_until(lambda: shows(0))
    cluster.start_metadata()
    wait_until(lambda: shows(1))


def test_cache_info_gauge_follows_the_publication() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from kvclient.engines.vllm.metrics import CACHE_INFO, StorePromMetrics, StoreStats

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = StorePromMetrics(SimpleNamespace(kv_transfer_config=object()), kinds, ["engine"], {0: ["0"], 1: ["1"]})
    for value in (0, 1, 0):
        stats = StoreStats(data={"loads": 1}).aggregate(StoreStats(data={CACHE_INFO: ["vllm-h-1", value]}))
        assert CACHE_INFO not in stats.reduce()
        metrics.observe(stats.data, 1)
        line = f'vllm:kvstore_cache_info{{cache="vllm-h-1",engine="1"}} {value}.0'
        assert line in generate_latest(registry).decode().splitlines()
