"""A vLLM engine in this process with the store as a secondary tier. As a script: the process that stored before."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_bed import BLOCK, MIB, MOST_TOKENS, abort_after, tiny

from kvstore.testing.connector.driver import EngineAnswer, StoreAddress

SETTLED_S = 30.0
SHOWN_S = 5.0
PRIMARY_BYTES = 64 * MIB


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and how many tokens of its prompt were not computed."""

    tokens: list[int]
    cached_tokens: int


class TierEngine:
    """An engine; at most one per process at a time.

    Args:
        model: its folder.
        store: None: without the store.
        options: of the tier.
        extra: options of vLLM's offloading.
        engine: arguments of ``LLM``.
    """

    def __init__(
        self,
        model: Path,
        store: StoreAddress | None,
        options: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
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
                    **(extra or {}),
                },
            )
        given = {
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": MOST_TOKENS,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 48 * MIB,
            **engine,
        }
        try:
            self.llm = LLM(model=str(model), enforce_eager=True, enable_prefix_caching=True, seed=0, **more, **given)
        except BaseException:
            forget_engine()
            raise

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The connector of the scheduler."""
        return self.scheduler.connector

    @property
    def tier(self) -> Any:
        """The tier."""
        return self.connector.scheduler.manager.secondary_tiers[0]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 12,
        *,
        together: bool = False,
        adapter: Any = None,
        **prompt_fields: Any,
    ) -> list[Answer]:
        """Greedy answers, each prompt alone in its batch unless they are asked together."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt), **prompt_fields} for prompt in prompts]
        batches = [inputs] if together else [[one] for one in inputs]
        answers = [answer for batch in batches for answer in self._generate(batch, params, adapter)]
        return [Answer(list(one.outputs[0].token_ids), int(one.num_cached_tokens or 0)) for one in answers]

    def _generate(self, batch: Any, params: Any, adapter: Any) -> Any:
        return self.llm.generate(batch, params, use_tqdm=False, lora_request=adapter)

    def stream(self, parts: Sequence[Sequence[int]]) -> None:
        """Compute a streamed input; a token is sampled after each part and discarded."""
        engine = self.llm.llm_engine
        for part in parts:
            engine.engine_core.add_request(self._streamed(part, resumable=True))
            while self.scheduler.num_waiting_for_streaming_input == 0:
                engine.engine_core.get_output()
        engine.engine_core.add_request(self._streamed([0], resumable=False))

    def _streamed(self, part: Sequence[int], *, resumable: bool) -> Any:
        from vllm import SamplingParams

        engine, params = self.llm.llm_engine, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        prompt, tasks = {"prompt_token_ids": list(part)}, engine.get_supported_tasks()
        return engine.input_processor.process_inputs("streamed", prompt, params, supported_tasks=tasks, resumable=resumable)

    def settle(self) -> None:
        """Step until all offloading work of vLLM has ended."""
        end_s = time.monotonic() + SETTLED_S
        while self.connector.has_pending_push_work():
            assert time.monotonic() < end_s, "offloading has not ended"
            self.llm.llm_engine.step()

    def forget_memory(self) -> None:
        """Drop what vLLM holds on the device and in host memory, in the same weights epoch."""
        self.settle()
        self.connector.scheduler.reset_cache()
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine, so that another one may begin."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        forget_engine()


def forget_engine() -> None:
    """Clear vLLM's globals. An engine that failed to start leaves its connector there, which the next engine would use."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


@contextmanager
def engine(model: Path, store: StoreAddress | None, options: dict[str, Any] | None = None, **more: Any) -> Iterator[TierEngine]:
    """An engine for the duration of the ``with`` statement."""
    made = TierEngine(model, store, options or {}, **more)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class TierDriver:
    """Opens engines; see ``HookDriver``.

    Attributes:
        model: its folder.
    """

    model: Path
    block_tokens: int = BLOCK

    def open(self, store: StoreAddress | None, options: Mapping[str, object] = {}) -> TierHookEngine:  # type: ignore[assignment]
        """A new engine in this process."""
        return TierHookEngine(TierEngine(self.model, store, options))


class TierHookEngine:
    """An engine; see ``HookEngine``."""

    def __init__(self, engine: TierEngine) -> None:
        self._engine = engine
        self._has_store = engine.connector is not None
        self._loaded: dict[str, int] = {}
        self._requests: list[Any] = []
        if self._has_store:
            self._watch(engine.connector)

    @property
    def tier(self) -> Any:
        """The tier."""
        return self._engine.tier

    def _watch(self, connector: Any) -> None:
        """Notes requests, and how much of each was loaded: vLLM does not say."""
        arrived, allocated = connector.on_new_request, connector.update_state_after_alloc

        def on_new_request(request: Any) -> None:
            self._requests.append(request)
            arrived(request)

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            name, most = request.request_id.rsplit("-", 1)[0], (request.num_prompt_tokens - 1) // BLOCK * BLOCK
            self._loaded[name] = max(self._loaded.get(name, 0), min(tokens, most))  # once more after the load, with 0
            allocated(request, blocks, tokens)

        connector.on_new_request, connector.update_state_after_alloc = on_new_request, update_state_after_alloc

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        """Greedy answers, all at once."""
        from vllm import SamplingParams

        self._loaded.clear()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._engine.llm.generate(inputs, params, use_tqdm=False)
        return [EngineAnswer(tuple(one.outputs[0].token_ids), self._loaded.get(one.request_id, 0)) for one in answers]

    def abort(self, prompts: Sequence[Sequence[int]], max_tokens: int, steps: int) -> None:
        """Begins to answer prompts, and aborts them after some steps."""
        asked = len(self._requests)
        abort_after(self._engine.llm, prompts, max_tokens, steps)
        del self._requests[asked:]  # perhaps not stored

    def flush(self, timeout_s: float) -> bool:
        """Steps until all that was generated is stored, or given up, and waits a moment until lookups show it."""
        if not self._has_store:
            return True
        self._engine.settle()
        end_s = time.monotonic() + min(timeout_s, SHOWN_S)
        waiting = [list(request.block_hashes)[: (request.num_tokens - 1) // BLOCK] for request in self._requests]
        self._requests.clear()
        while waiting and time.monotonic() < end_s:
            waiting = [chain for chain in waiting if not self._is_shown(chain)]
            time.sleep(0.005)
        return True  # what was evicted, or lost with its node, is never shown

    def _is_shown(self, chain: list[bytes]) -> bool:
        found = [store.find_chain(chain) for store in self._engine.tier.stores.values()]
        return all(one.hit_blocks == len(chain) or one.error for one in found)

    def forget(self) -> None:
        """Drops what the engine itself has cached."""
        if self._has_store:
            self.flush(SETTLED_S)
            self._engine.forget_memory()
        else:
            assert self._engine.llm.reset_prefix_cache()

    def counters(self) -> Mapping[str, int]:
        """Of the tier, and of its clients."""
        return self._engine.tier.counters.totals() if self._has_store else {}

    def close(self) -> None:
        """Ends it."""
        self._engine.close()


def main() -> None:
    """Answer prompts without the store, then with it, storing them; print the answers as JSON.

    The last prompt is a list of parts, which are streamed when it is stored.
    """
    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "prompts"):
        parser.add_argument(name)
    parser.add_argument("families", nargs="+")
    given = parser.parse_args()
    *prompts, parts = json.loads(Path(given.prompts).read_text())
    answers: dict[str, Any] = {}
    for family in given.families:
        model = tiny(family, Path(given.folder))
        with engine(model, None) as alone:
            answers[family] = [answer.tokens for answer in alone.answers([*prompts, [token for part in parts for token in part]])]
        with engine(model, StoreAddress(given.metadata, given.node)) as storing:
            assert [answer.tokens for answer in storing.answers(prompts)] == answers[family][:-1]
            storing.stream(parts)
            storing.settle()
    print(json.dumps(answers))


if __name__ == "__main__":
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
