"""vLLM answers with the store as without it, and its output would show a wrong byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvclient import KVClient, LoadHandle
from kvstore.testing.connector.driver import StoreAddress
from nursery import run_engine

FAMILIES = ["llama", "qwen3", "gemma3", "gemma4", "llama4", "deepseek"]
MIB = 1 << 20
TIMEOUT_S = 280.0
"""Bound of the process that answers first: it imports vLLM, which takes a minute or two on a busy machine."""
PROMPTS = [text(1, 700), text(2, 620), text(3, BLOCK * 4), text(4, 31)]
"""A hit of the second ends within a chunk of 96 tokens (Llama 4), so that pages of chunks are loaded."""

Open = Callable[..., VllmEngine]


def hits(engine: VllmEngine) -> list[int]:
    """Tokens of whole blocks, at least one token short of the prompt; none where vLLM itself keeps no prefixes."""
    if engine.whole_prompts_only:
        return [0] * len(PROMPTS)
    return [(len(prompt) - 1) // engine.hit_tokens * engine.hit_tokens for prompt in PROMPTS]


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """Opens engines, one at a time, and closes them."""
    single = SingleEngine()

    def open_engine(store: StoreAddress | None, family: str = "llama", mode: str = "async", **engine: Any) -> VllmEngine:
        options = engine.pop("options", {})
        return single.open(VllmDriver(tiny(family, folder), family, load_mode=mode), store, options, **engine)

    yield open_engine
    single.close()


@pytest.fixture(scope="module")
def elsewhere(folder: Path, store: StoreAddress, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of another process, computed and from its own prefix cache; it stored the KV."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    script = Path(__file__).with_name("vllm_bed.py")
    argv = [sys.executable, str(script), store.metadata, store.node, str(folder), str(prompts), *FAMILIES]
    done = run_engine(argv, TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def spoil(clients: Sequence[KVClient]) -> None:
    """Rotate the pages of the first layer of each client after each load, unseen by the connector."""

    def spoil_loads(client: KVClient) -> None:
        start_load = client.start_load

        def start_spoiled(lookup: Any, pages: Any, **how: Any) -> LoadHandle:
            handle = start_load(lookup, pages, **how)
            handle.result()
            for page in range(pages.count):
                (memory,) = (torch.frombuffer(piece, dtype=torch.uint8) for piece in pages.segments(page, 0, 1))
                memory[:] = memory.roll(3 * 256)
            return handle

        client.start_load = start_spoiled  # type: ignore[method-assign]

    for client in clients:
        spoil_loads(client)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_by_another_process(family: str, elsewhere: dict[str, Any], store: StoreAddress, opened: Open) -> None:
    """The same tokens; and a wrong byte would show."""
    engine = opened(store, family)
    answers = engine.one_by_one(PROMPTS)
    assert [one.loaded_tokens for one in answers] == hits(engine)
    assert [list(one.tokens) for one in answers] == elsewhere[family]["cached"]
    if family != "deepseek":  # in bfloat16 a prefill of all tokens and one of the last differ in vLLM itself
        assert elsewhere[family]["cached"] == elsewhere[family]["fresh"]
    assert engine.counters().get("loads_failed", 0) == 0
    again = engine.one_by_one(PROMPTS)
    assert [one.loaded_tokens for one in again] == [0] * len(PROMPTS), "its own cache is nearer"
    assert [one.tokens for one in again] == [one.tokens for one in answers]
    if engine.whole_prompts_only:
        return  # nothing is loaded
    first, *others = engine.worker_side.clients
    for clients, changed in (([first], [1]), (others, [0, 1])):  # of several groups, the first has windows or chunks
        engine.forget()
        spoil(clients)
        spoiled = engine.one_by_one(PROMPTS)
        assert [one.loaded_tokens for one in spoiled] == hits(engine)
        for prompt in changed:
            assert list(spoiled[prompt].tokens) != elsewhere[family]["cached"][prompt]


def watch_pages(engine: VllmEngine) -> list[bool]:
    """Holds each page that is loaded against what was stored under its key: whether it was the same, a page each."""
    side, stored, same = engine.worker_side, {}, []

    def content(group: int, page: int) -> bytes:
        pages = side.pages[group]
        return b"".join(bytes(piece) for piece in pages.buffer([page]).segments(0, 0, pages.shape.layers))

    begin, arrivals, end = side.begin_loads, side.take_completions, side.end_forward
    under_way: list[Any] = []

    def begin_loads(plan: Any) -> None:
        under_way.extend(plan.loads)
        begin(plan)

    def compare(jobs: list[Any]) -> None:
        for job in jobs:
            under_way.remove(job)
            (part,) = job.groups
            (lookup,) = part.lookups.values()
            same.extend(content(0, page) == stored[key] for key, page in zip(lookup.keys, part.block_ids, strict=True))

    def arrived(plan: Any, finished: set[str]) -> Any:
        completions = arrivals(plan, finished)
        compare([job for job in under_way if job.request_id in completions.received])
        return completions

    def end_forward(plan: Any, **how: Any) -> None:
        end(plan, **how)
        for job in plan.stores if not side.step_failed else ():
            for key, page in zip(job.keys, job.block_ids[0], strict=True):
                stored.setdefault(key, content(0, page))  # what is stored first stays
        compare([job for job in under_way if job.layerwise])

    side.begin_loads, side.take_completions = begin_loads, arrived  # type: ignore[method-assign]
    side.end_forward = end_forward  # type: ignore[method-assign]
    return same


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_latents_of_several_requests_at_once(mode: str, store: StoreAddress, opened: Open) -> None:
    """Compare pages: in bfloat16 an answer depends on the other requests of its batch."""
    prompts = [text(70, 300) + text(71 + at, 90 * at + 40) for at in range(5)]
    engine = opened(store, "deepseek", mode=mode, options={"salt": f"latents {mode}"})
    if engine.whole_prompts_only:
        pytest.skip("vLLM computes prompts of latents only as a whole on this CPU, which has no AMX: nothing is loaded")
    same = watch_pages(engine)
    engine.tokens(prompts)
    assert engine.flush()
    engine.forget()
    answers = engine.generate(prompts, 12)
    assert all(one.loaded_tokens for one in answers)
    assert len(same) > len(prompts[-1]) // engine.block_tokens
    assert all(same)
    counts = engine.counters()
    assert counts.get("loads_failed", 0) == counts.get("bugs", 0) == 0


def test_vllm_whole_prompts_only_loads_nothing(store: StoreAddress, opened: Open) -> None:
    """vLLM's backend for latents on a CPU without AMX ignores the KV before a prompt's new tokens."""
    how = {"dtype": "float32", "attention_config": {"backend": "CPU_MLA"}}
    alone = [one.tokens for one in opened(None, "deepseek", **how).one_by_one(PROMPTS)]
    engine = opened(store, "deepseek", options={"salt": "whole"}, **how)
    assert engine.whole_prompts_only
    for _ in range(2):
        answers = engine.one_by_one(PROMPTS)
        assert [one.tokens for one in answers] == alone
        assert [one.loaded_tokens for one in answers] == [0] * len(PROMPTS)
        assert engine.flush()
    counts = engine.counters()
    assert counts["whole_prompts_only"] == 1
    assert counts.get("stores", 0) == counts.get("loads", 0) == 0


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_vllm_pooling_of_all_tokens_loads_nothing(kind: str, store: StoreAddress, opened: Open) -> None:
    """vLLM fails, for good, where such a prompt was not computed as a whole."""
    from vllm.config import PoolerConfig

    how = {"runner": "pooling", "convert": "embed", "pooler_config": PoolerConfig(seq_pooling_type=kind)}
    engine = opened(store, options={"salt": kind}, enable_prefix_caching=None, **how)
    prompts = [{"prompt_token_ids": text(60, 3 * engine.block_tokens)}, {"prompt_token_ids": text(61, 40)}]

    def embedded() -> list[list[float]]:
        return [one.outputs.embedding for one in engine.llm.embed(prompts, use_tqdm=False)]

    first = embedded()
    assert engine.flush()
    assert embedded() == first
    counts = engine.counters()
    assert counts["whole_prompts_only"] == 1
    assert counts.get("stores", 0) == counts.get("loads", 0) == 0


MANY = [text(20, 300) + text(21 + at, 40 + 37 * at) for at in range(10)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """Answers of an engine with enough pages and no store."""
    engine = VllmDriver(tiny("llama", folder)).open(None)
    try:
        return engine.tokens(MANY, 40)
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_llama_alone_and_with_the_store(mode: str, alone: list[tuple[int, ...]], store: StoreAddress, opened: Open) -> None:
    """Many at once, in chunks, with a pool so small that requests are preempted: as an engine with space and no store."""
    tight = {"num_gpu_blocks_override": 60, "max_model_len": 1024, "max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    engine = opened(store, mode=mode, options={"salt": mode}, disable_log_stats=False, **tight)
    for _ in range(3):
        assert engine.tokens(MANY, 40) == alone
        engine.forget()
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:num_preemptions"].value > 0, "the pool is small enough"
    counts = engine.counters()
    assert counts["loads"] > 10
    assert counts.get("loads_failed", 0) == counts.get("bugs", 0) == 0
