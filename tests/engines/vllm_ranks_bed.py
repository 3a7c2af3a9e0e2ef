"""A vLLM engine with two tensor-parallel ranks, a core and a process each, that answers one prompt: as a script."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

from vllm_bed import VllmDriver, text, tiny

from kvstore.testing.connector_kit import StoreAddress

TOKENS = 500


def fork_children() -> None:
    """On CPUs vLLM spawns its processes, three here, and each imports vLLM for ten seconds of a core: forked, they have it."""
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvclient.engines.vllm.connector  # noqa: F401

    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]


def main() -> None:
    """Answers three times, and forgets its own cache each time; says what it counted."""
    from vllm import SamplingParams

    fork_children()

    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "family"):
        parser.add_argument(name)
    given = parser.parse_args()
    driver = VllmDriver(tiny(given.family, Path(given.folder)), given.family)
    llm = driver.make(StoreAddress(given.metadata, given.node), tensor_parallel_size=2, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said, cached = [], []
    for _ in range(3):
        (answer,) = llm.generate([{"prompt_token_ids": text(1, TOKENS)}], params, use_tqdm=False)
        said.append(list(answer.outputs[0].token_ids))
        cached.append(answer.num_cached_tokens)
        while not llm.reset_prefix_cache():
            llm.generate([{"prompt_token_ids": [40]}], SamplingParams(max_tokens=1), use_tqdm=False)
    counts = {
        metric.name.removeprefix("vllm:kvstore_"): metric.value for metric in llm.get_metrics() if "kvstore_" in metric.name
    }
    cache = llm.llm_engine.vllm_config.cache_config
    chosen = {"block_tokens": cache.block_size, "whole_prompts_only": not cache.enable_prefix_caching}
    print(json.dumps({"said": said, "cached": cached, "counts": counts, **chosen}))


if __name__ == "__main__":
    main()
