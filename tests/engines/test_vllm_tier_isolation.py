"""Engines whose chunks mean something else find nothing of each other in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from adapters_bed import make_adapter
from tier_bed import engine
from vllm_bed import BLOCK, text, tiny

from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.tiny_models import Family, TinyModel, make_model

PROMPTS = [text(1, 300)]
NAME = {"model": "one-name"}
"""All engines use one name, so that it does not tell them apart."""
HIT = 299 // BLOCK * BLOCK
THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def stored(folder: Path, store: StoreAddress) -> Path:
    """The model whose chunks are in the store."""
    model = tiny("llama", folder)
    with engine(model, store, NAME) as storing:
        storing.answers(PROMPTS)
        storing.forget_memory()
        assert storing.answers(PROMPTS)[0].cached_tokens == HIT
    return model


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        pytest.param({"seed": 1}, {}, id="weights"),
        pytest.param({}, {"block_size": 2 * BLOCK}, id="block"),
        pytest.param({}, {"dtype": "bfloat16"}, id="dtype", marks=THOROUGH),
        pytest.param({}, {"kv_cache_dtype": "fp8"}, id="fp8", marks=THOROUGH),
        pytest.param({"kv_heads": 1}, {}, id="heads", marks=THOROUGH),
        pytest.param({}, {"prefix_caching_hash_algo": "sha256_cbor"}, id="hash", marks=THOROUGH),
    ],
)
def test_tier_other_engine_finds_nothing(
    shape: dict[str, Any], how: dict[str, Any], stored: Path, folder: Path, store: StoreAddress
) -> None:
    model = stored
    if shape:
        full: dict[str, Any] = {"hidden": 128, "head_dim": 32, "window": 96, "max_tokens": 4096, **shape}
        model = make_model(folder / f"other-{shape}", TinyModel(Family.LLAMA, **full))
    with engine(model, store, NAME, **how) as other:
        assert other.answers(PROMPTS)[0].cached_tokens == 0


@THOROUGH
def test_tier_other_hash_seed_finds_nothing(stored: Path, store: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with engine(stored, store, NAME) as other:
        assert other.answers(PROMPTS)[0].cached_tokens == 0


def test_tier_salts_of_requests_and_adapters_are_not_shared(stored: Path, folder: Path, store: StoreAddress) -> None:
    from vllm.lora.request import LoRARequest

    make_adapter(stored, folder / "adapter", seed=1)
    adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
    with engine(stored, store, NAME, enable_lora=True, max_loras=1, max_lora_rank=8) as served:
        salted = served.answers(PROMPTS, cache_salt="a")
        adapted = served.answers(PROMPTS, adapter=adapter)
        assert [salted[0].cached_tokens, adapted[0].cached_tokens] == [0, 0]
        assert adapted[0].tokens != salted[0].tokens
        served.forget_memory()
        again = {name: served.answers(PROMPTS, cache_salt=name)[0] for name in "ab"}
        assert [again["a"].cached_tokens, again["b"].cached_tokens] == [HIT, 0]
        assert again["a"].tokens == again["b"].tokens == salted[0].tokens
        assert served.answers(PROMPTS, adapter=adapter) == adapted, "computed, not loaded"
        assert served.tier.counters.totals()["requests_skipped"] == 2


def test_tier_requests_mixed_with_an_adapter_are_not_stored(stored: Path, folder: Path, store: StoreAddress) -> None:
    """On a CPU, vLLM computes a request without an adapter with the weights of one in the same step."""
    from vllm.lora.request import LoRARequest

    make_adapter(stored, folder / "mixed", seed=2)
    adapter = LoRARequest("mixed", 1, str(folder / "mixed"))
    prompts = [text(seed, 400) for seed in (31, 31)]
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with engine(stored, None, NAME, **lora) as alone:
        right = alone.answers(prompts[:1])[0].tokens
    with engine(stored, store, NAME, **lora) as served:
        assert served.answers(prompts, together=True, adapter=[adapter, None])[1].tokens != right
        assert served.tier.counters.totals()["stores_unsure"] >= 1
    with engine(stored, store, NAME, **lora) as other:
        answer = other.answers(prompts[:1])[0]
        assert (answer.tokens, answer.cached_tokens) == (right, 0)
