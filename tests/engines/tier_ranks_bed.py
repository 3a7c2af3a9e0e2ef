"""A vLLM engine with one or two tensor-parallel ranks and the store as a secondary tier, that answers prompts: as a script."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from tier_bed import PRIMARY_BYTES
from vllm_bed import BLOCK, MIB, MOST_TOKENS, text
from vllm_ranks_bed import PATIENT, fork_children

TOKENS = 500
SETTLED_S = 2.0
"""Long enough for the few stores of a prompt; a shorter time shows as missing hits."""


def main() -> None:
    """Answer one prompt after the other, say how much was cached, and leave time for the stores."""
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: F401  # before the fork
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "model", "ranks"):
        parser.add_argument(name)
    parser.add_argument("--prompts", nargs="+", type=int, default=[1])
    parser.add_argument("--prefill", nargs="*", type=int, default=[], help="prompts of which only the first token is computed")
    parser.add_argument("--canonical", action="store_true")
    parser.add_argument("--epoch", default="")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    fork_children()
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": PRIMARY_BYTES,
        "kvstore": {"metadata": given.metadata, "node": given.node, "model": "one-name", **PATIENT},
    }
    if given.epoch:
        extra["kvstore"]["weights_epoch"] = given.epoch
    extra |= {"canonical_layout": True} if given.canonical else {}
    llm = LLM(
        model=given.model,
        enforce_eager=True,
        dtype=given.dtype,
        max_model_len=MOST_TOKENS,
        max_num_seqs=8,
        block_size=BLOCK,
        kv_cache_memory_bytes=48 * MIB,
        seed=0,
        tensor_parallel_size=int(given.ranks),
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreOffloadingConnector",
            kv_connector_module_path="kvclient.engines.vllm.tier",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": text(seed, TOKENS)} for seed in given.prompts]
    answers = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prefilled = [{"prompt_token_ids": text(seed, TOKENS)} for seed in given.prefill]
    first_tokens = [llm.generate([prompt], first, use_tqdm=False)[0].outputs[0].token_ids[0] for prompt in prefilled]
    time.sleep(SETTLED_S)
    llm.generate([{"prompt_token_ids": [40]}], SamplingParams(max_tokens=1), use_tqdm=False)
    said = {
        "answers": [list(answer.outputs[0].token_ids) for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
        "first_tokens": first_tokens,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
