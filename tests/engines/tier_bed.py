"""A vLLM engine in this process with the store as a secondary tier. As a script: the process that stored before."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_bed import BLOCK, MIB, MOST_TOKENS, tiny

from kvstore.testing.connector.driver import StoreAddress

FAMILIES = ("llama", "gemma3", "gemma4", "llama4", "lfm2")
"""Plain attention, windows, two page sizes, chunks of the context, states."""
SETTLED_S = 30.0
PRIMARY_BYTES = 64 * MIB


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and how many tokens of its prompt were not computed."""

    tokens: list[int]
    cached_tokens: int


class TierEngine:
    """An engine; at most one per process at a time."""

    def __init__(self, model: Path, store: StoreAddress | None, options: dict[str, Any], **engine: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {}
        if store is not None:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVStoreOffloadingConnector",
                kv_connector_module_path="kvclient.engines.vllm.tier",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "cpu_bytes_to_use": PRIMARY_BYTES,
                    "kvstore": {"metadata": store.metadata, "node": store.node, **options},
                },
            )
        given = {"dtype": "float32", "block_size": BLOCK, "max_model_len": MOST_TOKENS, "max_num_seqs": 8, **engine}
        self.llm = LLM(
            model=str(model),
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=48 * MIB,
            seed=0,
            **more,
            **given,
        )

    @property
    def connector(self) -> Any:
        """The connector of the scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[Answer]:
        """Greedy answers, each prompt alone in its batch."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        found = []
        for prompt in prompts:
            (answer,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
            found.append(Answer(list(answer.outputs[0].token_ids), int(answer.num_cached_tokens or 0)))
        return found

    def settle(self) -> None:
        """Step until all offloading work of vLLM has ended."""
        end_s = time.monotonic() + SETTLED_S
        while self.connector.has_pending_push_work():
            assert time.monotonic() < end_s, "offloading has not ended"
            self.llm.llm_engine.step()

    def close(self) -> None:
        """End the engine, so that another one may begin."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        cleanup_dist_env_and_memory()


@contextmanager
def engine(model: Path, store: StoreAddress | None, options: dict[str, Any] | None = None, **more: Any) -> Iterator[TierEngine]:
    """An engine for the duration of the ``with`` statement."""
    made = TierEngine(model, store, options or {}, **more)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Answer prompts without the store, then with it, storing them; print the answers as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "prompts"):
        parser.add_argument(name)
    given = parser.parse_args()
    prompts = json.loads(Path(given.prompts).read_text())
    answers: dict[str, Any] = {}
    for family in FAMILIES:
        model = tiny(family, Path(given.folder))
        with engine(model, None) as alone:
            answers[family] = [answer.tokens for answer in alone.answers(prompts)]
        with engine(model, StoreAddress(given.metadata, given.node)) as storing:
            assert [answer.tokens for answer in storing.answers(prompts)] == answers[family]
            storing.settle()
    print(json.dumps(answers))


if __name__ == "__main__":
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
