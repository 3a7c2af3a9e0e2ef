"""A vLLM engine with one or two tensor-parallel ranks and the store as a secondary tier, that answers prompts: as a script."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tier_bed import PRIMARY_BYTES
from vllm_bed import BLOCK, MIB, MOST_TOKENS, text, tiny
from vllm_ranks_bed import PATIENT, fork_children

TOKENS = 500
SETTLED_S = 2.0
"""Long enough for the few stores of a prompt; a shorter time shows as missing hits."""


def main() -> None:
    """Answer, say how much was cached, and leave time for the stores."""
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: F401  # before the fork
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "ranks"):
        parser.add_argument(name)
    given = parser.parse_args()
    fork_children()
    extra = {"cpu_bytes_to_use": PRIMARY_BYTES, "kvstore": {"metadata": given.metadata, "node": given.node, **PATIENT}}
    llm = LLM(
        model=str(tiny("llama", Path(given.folder))),
        enforce_eager=True,
        dtype="float32",
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
    (answer,) = llm.generate([{"prompt_token_ids": text(1, TOKENS)}], params, use_tqdm=False)
    time.sleep(SETTLED_S)
    llm.generate([{"prompt_token_ids": [40]}], SamplingParams(max_tokens=1), use_tqdm=False)
    print(json.dumps({"answer": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens}))


if __name__ == "__main__":
    main()
