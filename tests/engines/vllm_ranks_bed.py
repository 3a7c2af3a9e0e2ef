"""A vLLM engine with two tensor-parallel ranks, a core and a process each, that answers one prompt: as a script."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm_bed import VllmDriver, text, tiny

from kvstore.testing.connector.driver import StoreAddress

TOKENS = 500
SHOWN_S = 60.0
PATIENT = {"connect_deadline_s": 30.0, "lookup_deadline_s": 30.0, "load_deadline_s": 60.0, "store_deadline_s": 60.0}
"""Long deadlines: two ranks leave a store on two cores little time."""


def is_shown(worker: Any) -> bool:
    """In each worker: waits until the store shows its part of the prompt. A reset of the cache drops what is not stored yet."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvclient import KeyChain
    from kvclient.engines.vllm.identity.namespaces import chain_spec
    from kvstore.core.keys import NamespaceKeyMask

    (client,) = get_kv_transfer_group().worker_side.clients  # type: ignore[attr-defined]
    chain = KeyChain(chain_spec([replace(client.spec, shard_rank=0)]))
    keys = NamespaceKeyMask(chain.spec.namespace, client.spec.namespace).keys(chain.keys(text(1, TOKENS)))
    end_s = time.monotonic() + SHOWN_S
    while client.lookup(keys).hit_blocks < TOKENS // client.spec.block_tokens:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def fork_children() -> None:
    """On CPUs vLLM spawns its processes, three here, and each imports vLLM for ten seconds of a core: forked, they have it."""
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast

    import kvclient.engines.vllm.connector  # noqa: F401

    # Ranks spin on sched_yield for their orders. On two busy cores Linux 6.18 was seen to run them and not the metadata server,
    # which had a request to read, for half a minute.
    shm_broadcast.sched_yield = lambda: time.sleep(1e-4)
    os.register_at_fork(after_in_child=bind)
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]


def bind() -> None:
    """Apply vLLM's settings of OpenMP for each worker: a forked process has loaded OpenMP before they are set."""
    cores = re.findall(r"\d+", os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES") or "")
    if cores:
        torch.set_num_threads(len(cores))
        os.sched_setaffinity(0, {int(core) for core in cores})


def processors(worker: Any) -> tuple[int, int]:
    """In each worker: how many may compute, and how many store."""
    storing = [thread.native_id or 0 for thread in threading.enumerate() if thread.name == "kvstore-save"]
    return len(os.sched_getaffinity(0)), len(os.sched_getaffinity(storing[0] if storing else 0))


def main() -> None:
    """Answers three times, and forgets its own cache each time; says what it counted."""
    from vllm import SamplingParams

    fork_children()

    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "family"):
        parser.add_argument(name)
    given = parser.parse_args()
    driver = VllmDriver(tiny(given.family, Path(given.folder)), given.family)
    llm = driver.make(StoreAddress(given.metadata, given.node), PATIENT, tensor_parallel_size=2, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers, cached = [], []
    for _ in range(3):
        (answer,) = llm.generate([{"prompt_token_ids": text(1, TOKENS)}], params, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
        cached.append(answer.num_cached_tokens)
        assert all(llm.collective_rpc(is_shown))
        while not llm.reset_prefix_cache():
            llm.generate([{"prompt_token_ids": [40]}], SamplingParams(max_tokens=1), use_tqdm=False)
    counts = {
        metric.name.removeprefix("vllm:kvstore_"): metric.value for metric in llm.get_metrics() if "kvstore_" in metric.name
    }
    chosen = {"processors": llm.collective_rpc(processors), "block_tokens": llm.llm_engine.vllm_config.cache_config.block_size}
    print(json.dumps({"answers": answers, "cached": cached, "counts": counts, **chosen}))


if __name__ == "__main__":
    main()
