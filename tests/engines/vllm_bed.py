"""A vLLM engine in this process, with or without the connector, for tests of the connector and the conformance kit.

One at a time: vLLM keeps a connector and distributed groups in globals. As a script: the process that stored before.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvclient.engines.vllm.identity.keys import RequestKeys, request_extras
from kvclient.engines.vllm.plan import StepPlan, WorkerOutput
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector
from kvclient.engines.vllm.worker.worker_connector import WorkerConnector
from kvstore.testing.connector.driver import EngineAnswer, StoreAddress
from kvstore.testing.tiny_models import Family, TinyModel, make_model

BLOCK = 32
MIB = 1 << 20
MOST_TOKENS = 2048
FLUSH_S = 20.0
SHOWN_S = 5.0


def tiny(family: str, folder: Path) -> Path:
    """A tiny model, the same in every process."""
    return make_model(folder / family, TinyModel(Family(family), hidden=128, head_dim=32, window=96, max_tokens=4096))


def text(seed: int, tokens: int) -> list[int]:
    """Printable token ids, different for each seed."""
    state = seed * 7919 + 17
    ids = []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append(32 + (state >> 16) % 95)
    return ids


def abort_after(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, steps: int) -> list[str]:
    """Begin to answer prompts, and abort them after some steps of the engine. Returns the names of the requests."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    names = [f"aborted{at}" for at in range(len(prompts))]
    inner = [llm.llm_engine.add_request(*one, params) for one in zip(names, _inputs(prompts), strict=True)]
    for _ in range(steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return inner


def _inputs(prompts: Sequence[Any]) -> list[Any]:
    return [prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)} for prompt in prompts]


@dataclass(frozen=True)
class VllmDriver:
    """Opens engines; see ``HookDriver``.

    Attributes:
        model: its folder.
        family: of the model.
        load_mode: of the connector.
        policy: vLLM's policy for failed loads.
        connector: the connector's class.
        module: its module.
    """

    model: Path
    family: str = "llama"
    block_tokens: int = BLOCK
    load_mode: str = "async"
    policy: str = "recompute"
    connector: str = "KVStoreConnector"
    module: str = "kvclient.engines.vllm.connector"

    def open(self, store: StoreAddress | None, options: Mapping[str, object] = {}, **engine: object) -> VllmEngine:  # type: ignore[assignment]
        """A new engine in this process; ``engine``: further arguments of ``LLM``."""
        return VllmEngine(self.make(store, options, **engine))

    def make(self, store: StoreAddress | None, options: Mapping[str, object] = {}, **engine: object) -> Any:
        """vLLM's own object."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        given: dict[str, object] = {
            "enforce_eager": True,
            "dtype": "bfloat16" if self.family == "deepseek" else "float32",
            "max_model_len": MOST_TOKENS,
            "max_num_seqs": 8,
            "block_size": self.block_tokens,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 48 * MIB,
            "seed": 0,
        }
        if store is not None:
            extra: dict[str, object] = {
                "metadata": store.metadata,
                "node": store.node,
                "load_mode": self.load_mode,
                "load_choice": "always",  # the same hits in every run; auto: test_vllm_load_choice
            }
            extra |= options
            given["kv_transfer_config"] = KVTransferConfig(
                kv_connector=self.connector,
                kv_connector_module_path=self.module,
                kv_role="kv_both",
                kv_load_failure_policy=self.policy,
                kv_connector_extra_config=extra,
            )
        return LLM(model=str(self.model), **{**given, **engine})


class VllmEngine:
    """An engine; see ``HookEngine``."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector
        self._loaded: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._jobs: dict[int, str] = {}
        """Requests of planned stores."""
        self._stored: dict[str, tuple[RequestKeys, list[int], int]] = {}
        """By request: its keys, its tokens, and the number of blocks that were given to the store."""
        if self.connector is not None:
            self._watch_loads(self.scheduler_side)
            self._watch_stores(self.scheduler_side)

    @property
    def block_tokens(self) -> int:
        """Tokens per page, as vLLM chose them: without AMX, pages of latents have 16 tokens despite the option."""
        chosen: int = self.core.vllm_config.cache_config.block_size
        return chosen

    @property
    def hit_tokens(self) -> int:
        """Tokens of a block of the connector: a hit is a multiple of it."""
        return self._lookup.blocks.block_tokens

    @property
    def whole_prompts_only(self) -> bool:
        """Whether vLLM computes a prompt only as a whole: on CPUs without AMX it does so with latents, and keeps no prefixes."""
        return not self.core.vllm_config.cache_config.enable_prefix_caching

    @property
    def scheduler_side(self) -> SchedulerConnector:
        side: SchedulerConnector = self.connector.scheduler_side
        return side

    @property
    def worker_side(self) -> WorkerConnector:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side: WorkerConnector = get_kv_transfer_group().worker_side
        return side

    def _watch_loads(self, side: SchedulerConnector) -> None:
        """Notes how much of each request came from the store; vLLM does not say."""
        planned, failed = side.update_state_after_alloc, side.on_loads_failed

        def allocated(request: Any, block_ids: Any, tokens: int) -> None:
            self._loaded[request.request_id] = tokens
            planned(request, block_ids, tokens)

        def loads_failed(invalid: set[int], requests: set[str]) -> set[str]:
            computed = failed(invalid, requests)
            self._loaded.update(dict.fromkeys(computed, 0))
            return computed

        side.update_state_after_alloc, side.on_loads_failed = allocated, loads_failed  # type: ignore[method-assign]

    def _watch_stores(self, side: SchedulerConnector) -> None:
        """Notes which chains were given to the store: its index shows them a moment later."""
        arrived, plan_step, ended = side.on_new_request, side.build_step_plan, side.on_worker_output

        def on_new_request(request: Any, **how: Any) -> None:
            self._requests[request.request_id] = request
            arrived(request, **how)

        def build_step_plan(*given: Any) -> StepPlan:
            plan = plan_step(*given)
            for job in plan.stores:
                request = self._requests[job.request_id]
                self._jobs[job.job_id] = job.request_id
                blocks = job.first_block + len(job.keys) // self._lookup.blocks.keys_per_block
                self._stored[job.request_id] = (self._keys(request), list(request.all_token_ids), blocks)
            return plan

        def on_worker_output(output: WorkerOutput) -> None:
            for job_id in output.stores_failed:
                self._stored.pop(self._jobs[job_id], None)
            ended(output)

        side.on_new_request, side.build_step_plan = on_new_request, build_step_plan  # type: ignore[method-assign]
        side.on_worker_output = on_worker_output  # type: ignore[method-assign]

    def _keys(self, request: Any) -> RequestKeys:
        side, chain = self.scheduler_side, self._lookup.chain
        adapter = side.adapters.weights(request.lora_request) if request.lora_request is not None else None
        return RequestKeys(chain, request_extras(request, adapter, chain.spec.block_tokens))

    @property
    def _lookup(self) -> BackgroundLookup:
        lookup = self.scheduler_side.prefix_lookup
        assert lookup is not None
        return lookup

    def _is_shown(self, keys: RequestKeys, tokens: list[int], blocks: int) -> bool:
        """Whether lookups show a whole chain, or cannot tell."""
        found = self._lookup.begin(keys, tokens, blocks).result()
        return found.hit_blocks == blocks or any(one.error for group in found.by_group for one in group.values())

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, adapter: Any = None, **sampling: Any) -> list[Any]:
        """vLLM's own answers, with a LoRA adapter if one is given."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        answers: list[Any] = self.llm.generate(_inputs(prompts), params, use_tqdm=False, lora_request=adapter)
        return answers

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, adapter: Any = None) -> list[EngineAnswer]:
        """Greedy answers, all at once."""
        self._loaded.clear()
        answers = self.run(prompts, max_tokens, adapter)
        loaded = {request_id.rsplit("-", 1)[0]: tokens for request_id, tokens in self._loaded.items()}
        return [EngineAnswer(tuple(one.outputs[0].token_ids), loaded.get(one.request_id, 0)) for one in answers]

    def abort(self, prompts: Sequence[Sequence[int]], max_tokens: int, steps: int) -> None:
        """Begins to answer prompts, and aborts them after some steps."""
        for name in abort_after(self.llm, prompts, max_tokens, steps):
            self._stored.pop(name, None)  # perhaps not stored

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[tuple[int, ...]]:
        """Only the tokens."""
        return [one.tokens for one in self.generate(prompts, max_tokens)]

    def one_by_one(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[EngineAnswer]:
        """The same, each prompt alone in its batch: in bfloat16 a batch changes results."""
        return [self.generate([prompt], max_tokens)[0] for prompt in prompts]

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Steps until all that was generated is stored, or given up."""
        end_s = time.monotonic() + timeout_s
        while self.connector is not None and self.scheduler_side.has_pins:
            if time.monotonic() > end_s:
                return False
            self.llm.llm_engine.step()
        shown_s = time.monotonic() + SHOWN_S
        while self._stored and time.monotonic() < min(end_s, shown_s):
            self._stored = {name: chain for name, chain in self._stored.items() if not self._is_shown(*chain)}
            time.sleep(0.005)
        self._stored.clear()  # what was evicted, or lost with its node, is never shown
        return True

    def forget(self) -> None:
        """Drops what the engine itself has cached."""
        assert self.flush()
        assert self.llm.reset_prefix_cache()

    def counters(self) -> Mapping[str, int]:
        """Of the connector, and of its clients."""
        if self.connector is None:
            return {}
        counts = {**self.scheduler_side.counters.totals()}
        for name, value in self.worker_side.counters.totals().items():
            counts[name] = counts.get(name, 0) + value
        of_clients: Counter[str] = Counter()
        for client in self.worker_side.clients:
            of_clients.update(client.stats())
        return {name: int(value) for name, value in counts.items()} | of_clients

    def close(self) -> None:
        """Ends it, so that another one may begin."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.llm = self.core = self.connector = None
        cleanup_dist_env_and_memory()
        _spare_later_engines()


class SingleEngine:
    """Holds at most one open engine, because vLLM keeps a connector and distributed groups in globals."""

    def __init__(self) -> None:
        self._engine: VllmEngine | None = None

    def open(
        self, driver: VllmDriver, store: StoreAddress | None, options: Mapping[str, object] = {}, **engine: object
    ) -> VllmEngine:
        """Close the open engine, and open another one."""
        self.close()
        self._engine = driver.open(store, options, **engine)
        return self._engine

    def close(self) -> None:
        """Close the open engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


@cache
def _spare_later_engines() -> None:
    """Skip work that vLLM repeats for every engine, although this process has done it.

    It collects garbage seven times an engine, each time through all that its hundreds of modules hold, and it looks through all
    modules for kernels that are to be replaced: six seconds an engine. What is imported by now stays frozen; engines are still
    collected, for none is frozen.
    """
    from vllm.platforms import current_platform

    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def main() -> None:
    """Answers prompts, and again from its own cache, and stores them; prints both answers as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder", "prompts"):
        parser.add_argument(name)
    parser.add_argument("families", nargs="+")
    given = parser.parse_args()
    prompts = json.loads(Path(given.prompts).read_text())
    answers: dict[str, Any] = {}
    for family in given.families:
        engine = VllmDriver(tiny(family, Path(given.folder)), family).open(StoreAddress(given.metadata, given.node))
        fresh = [one.tokens for one in engine.one_by_one(prompts)]
        assert engine.flush()
        cached = [one.tokens for one in engine.one_by_one(prompts)]
        answers[family] = {"fresh": fresh, "cached": cached}
        engine.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
