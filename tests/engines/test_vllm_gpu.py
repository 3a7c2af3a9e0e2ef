"""vLLM on a GPU answers with the store as from its own prefix cache. ``make test-gpu`` runs it.

Needs vLLM's own wheel, for CUDA. Written before it could be run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_bed import VllmDriver, text, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress

pytestmark = pytest.mark.gpu
PROMPTS = [text(1, 700), text(2, 580), text(3, 128), text(4, 31)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    with LocalCluster([NodeSpec("n", dram_bytes=1 << 30)], tmp_path_factory.mktemp("store")) as cluster:
        yield StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("copies", ["batched", "staged", "direct"])
@pytest.mark.parametrize("mode", ["async", "layerwise"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_same_tokens_as_from_its_own_cache(
    family: str, copies: str, mode: str, eager: bool, store: StoreAddress, tmp_path: Path
) -> None:
    if mode == "layerwise" and family == "gemma3":
        pytest.skip("vLLM cannot learn that a layer-wise load of several groups failed")
    driver = VllmDriver(tiny(family, tmp_path), family, load_mode=mode)
    how = {"dtype": "bfloat16", "enforce_eager": eager, "async_scheduling": mode == "async", "kv_cache_memory_bytes": 256 << 20}
    options = {"salt": f"{copies}{mode}{eager}", "device_copies": copies}
    engine = driver.open(store, options, **how)
    try:
        engine.one_by_one(PROMPTS)
        cached = engine.one_by_one(PROMPTS)
        assert [one.loaded_tokens for one in cached] == [0] * len(PROMPTS)
        for _ in range(3):
            engine.forget()
            loaded = engine.one_by_one(PROMPTS)
            assert [one.tokens for one in loaded] == [one.tokens for one in cached]
            whole_blocks = [(len(prompt) - 1) // engine.block_tokens * engine.block_tokens for prompt in PROMPTS]
            assert [one.loaded_tokens for one in loaded] == whole_blocks
        engine.forget()
        assert len(engine.tokens(PROMPTS)) == len(PROMPTS)  # all at once
        engine.worker_side.count_device_copies()
        counts = engine.counters()
        assert counts["device_loaded_bytes"] == counts["load_bytes"] > 0
        assert counts["device_stored_bytes"] >= counts["store_bytes"] > 0
        assert counts.get("bugs", 0) == counts.get("loads_failed", 0) == counts.get("device_errors", 0) == 0
    finally:
        engine.close()
