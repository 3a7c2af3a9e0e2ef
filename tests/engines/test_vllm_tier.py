"""The store as a secondary tier of vLLM: the tokens of vLLM alone, also for models that the connector refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from docs_site.markdown import fences
from tier_bed import engine
from vllm_bed import BLOCK, text, tiny

from kvclient import InvalidArgument
from kvstore.embedded.cluster import LocalCluster
from kvstore.testing.connector.driver import StoreAddress
from nursery import run_engine
from samples import sample

TIMEOUT_S = 280.0
FAMILIES = ["llama", "gemma3", "lfm2", "gemma4", "llama4"][: sample(3, of=5)]
"""Plain attention, windows, states, two page sizes, chunks of the context."""
PROMPTS = [text(1, 700), text(2, 580), text(3, BLOCK * 4), text(4, 31)]
PARTS = [text(5, 110), text(6, 150), text(7, 120)]
"""A streamed input. vLLM alone answers otherwise after parts of it with LFM2, which is not compared."""
TOKENS_BETWEEN_HITS = {"gemma4": 2 * BLOCK}
"""Hits end at a page of every group: Gemma 4 has pages of two sizes."""


@pytest.fixture(scope="module")
def elsewhere(folder: Path, store: StoreAddress, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of another process without the store. It then stored the KV."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.json"
    prompts.write_text(json.dumps([*PROMPTS, PARTS]))
    script = Path(__file__).with_name("tier_bed.py")
    argv = [sys.executable, str(script), store.metadata, store.node, str(folder), str(prompts), *FAMILIES]
    done = run_engine(argv, TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_tier_loads_what_another_process_stored(
    family: str, elsewhere: dict[str, Any], folder: Path, store: StoreAddress
) -> None:
    """And a changed byte shows."""
    model, step = tiny(family, folder), TOKENS_BETWEEN_HITS.get(family, BLOCK)
    prompts = PROMPTS if family == "lfm2" else [*PROMPTS, PARTS[0] + PARTS[1] + PARTS[2]]
    alone = elsewhere[family][: len(prompts)]
    with engine(model, store) as loading:
        answers = loading.answers(prompts)
        assert [answer.tokens for answer in answers] == alone
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.cached_tokens >= (len(prompt) - 1) // step * step
        again = loading.answers(prompts)
        assert [answer.tokens for answer in again] == alone, "from vLLM's own prefix cache"
    with engine(model, store) as spoiled:
        spoil_loads(spoiled.connector)
        answers = spoiled.answers(PROMPTS[:1])
        assert answers[0].cached_tokens
        assert answers[0].tokens != alone[0]


def spoil_loads(connector: Any) -> None:
    """Change the rows of all loaded chunks."""
    for store in connector.scheduler.manager.secondary_tiers[0].stores.values():
        load = store.load

        def spoiled(chunks: Any, *how: Any, load: Any = load) -> Any:
            result = load(chunks, *how)
            for chunk in chunks:
                chunk.row[:] = chunk.row[::-1].copy()
            return result

        store.load = spoiled


def scale_layer(model: Any) -> None:
    """Change the weights of one norm in place."""
    model.model.layers[1].input_layernorm.weight.data.mul_(2)


def test_tier_reset_of_the_connector_begins_an_epoch(folder: Path, store: StoreAddress) -> None:
    """KV of other weights is not found any more, by this engine or by vLLM's host memory."""
    with engine(tiny("llama", folder), store, {"salt": "reset"}) as resetting:
        first = resetting.answers(PROMPTS)
        resetting.settle()
        assert resetting.llm.reset_prefix_cache(reset_connector=True)
        again = resetting.answers(PROMPTS)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
        assert [answer.cached_tokens > 0 for answer in again] == [True, True, True, False], "the weights are the same"
        resetting.llm.llm_engine.engine_core.engine_core.pause_scheduler("abort", True)
        resetting.llm.apply_model(scale_layer)
        resetting.llm.llm_engine.engine_core.engine_core.resume_scheduler()
        after = resetting.answers(PROMPTS)
        assert [answer.tokens for answer in after] != [answer.tokens for answer in first]
        assert [answer.cached_tokens for answer in after] == [0] * len(PROMPTS)
        resetting.settle()
        assert resetting.llm.reset_prefix_cache(reset_connector=False)
        assert [answer.cached_tokens > 0 for answer in resetting.answers(PROMPTS)] == [True, True, True, False]


def test_tier_engine_answers_after_the_store_is_gone(folder: Path, fragile: LocalCluster) -> None:
    address = StoreAddress(fragile.metadata_address, fragile.node("n").local_socket)
    with engine(tiny("llama", folder), address, {"load_deadline_s": 2.0, "store_deadline_s": 2.0}) as served:
        first = served.answers(PROMPTS)
        served.settle()
        fragile.kill("n")
        fragile.kill("metadata")
        assert served.llm.reset_prefix_cache()
        assert [answer.tokens for answer in served.answers(PROMPTS)] == [answer.tokens for answer in first]
        others = [text(40, 300), text(41, 200)]
        assert len(served.answers(others)) == 2
        served.settle()


@pytest.mark.thorough
def test_report_of_whole_prompts_repeats(tmp_path: Path) -> None:
    """vLLM answers wrongly with its own example of a connector. If it does not any more, the page must say so."""
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-a-connector.md"
    [program] = [fence.text for fence in fences(page.read_text(encoding="utf-8")) if fence.title == "reproduce.py"]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line.partition(": ") for line in done.stdout.splitlines() if "[" in line and ": [" in line]
    computed = [tokens for name, _, tokens in said if name == "computed"]
    loaded = [tokens for name, _, tokens in said if name == "288 tokens loaded"]
    assert len(computed) == len(loaded) == 4
    if not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        assert computed != loaded


def test_tier_refuses_backend_of_whole_prompts(folder: Path, store: StoreAddress) -> None:
    """vLLM's own offloading computes wrong tokens there."""
    how = {"dtype": "float32", "attention_config": {"backend": "CPU_MLA"}}
    with (
        pytest.raises(InvalidArgument, match="computes prompts only as a whole"),
        engine(tiny("deepseek", folder), store, **how),
    ):
        pass
