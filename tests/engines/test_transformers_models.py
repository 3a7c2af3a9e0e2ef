"""Changed models and unusual calls bypass the store and answer as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from generate_bed import HIT, PROMPT, STEPS, Connect, answer, greedy, padded, prompt
from torch.nn.utils import parametrize
from transformers import GenerationConfig

from kvclient import InvalidArgument
from kvclient.engines.torch_private import forward_hooks
from kvstore.embedded.cluster import LocalCluster
from kvstore.testing.tiny_models import PAD


@pytest.mark.parametrize("said_by", ["argument", "configuration", "checkpoint"])
def test_without_a_cache_the_store_is_left_alone(
    said_by: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model, ids = copy.deepcopy(models("llama")), prompt(64)
    store, how = connect(shared, model), {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": PAD}
    fresh, _ = answer(store, ids)
    if said_by == "argument":
        how["use_cache"] = False
    elif said_by == "configuration":
        how = {"generation_config": GenerationConfig(**how, use_cache=False)}
    else:
        model.generation_config.use_cache = False
    before = store.stats()
    for number in (1, 2):
        assert store.generate(ids, **how)[:, PROMPT:].tolist() == fresh
        assert store.stats()["hook_bypassed_total"] == number
    assert store.flush(30)
    after = store.stats()
    assert all(after[name] == before[name] for name in ("hook_prompts_total", "hook_stored_blocks_total"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_that_generate_is_not_to_use_does_no_harm(
    family: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    """With ``use_cache=False`` each pass but the first is fed the whole text, without regard to the cache."""
    store = connect(shared, models(family))
    ids, mask = padded(PROMPT, 150, seed=65)
    fresh = greedy(store.model, ids, mask, use_cache=False)
    assert answer(store, ids, mask, use_cache=False) == (fresh, 0)
    assert answer(store, ids, mask, use_cache=False) == (fresh, HIT)
    assert store.stats()["hook_bypassed_total"] == 2 * (STEPS - 1)
    assert answer(store, ids, mask) == (greedy(store.model, ids, mask), HIT)


def test_a_cache_of_another_kind_is_generates_own_affair(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(66)
    fresh, _ = answer(store, ids)
    for kind in ("static", "sliding_window"):
        how = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": kind}
        assert store.generate(ids, **how)[:, PROMPT:].tolist() == fresh
    assert store.stats()["hook_bypassed_total"] == 2


def _steer(_module: object, _inputs: object, output: Any) -> Any:
    return (output[0] + 3.0, *output[1:]) if isinstance(output, tuple) else output + 3.0


def _push(_module: object, given: tuple[Any, ...]) -> Any:
    return (given[0] + 3.0, *given[1:])


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _parametrize(model: Any) -> Callable[[], None]:
    part = model.model.layers[0].self_attn.v_proj
    parametrize.register_parametrization(part, "weight", _Doubled())
    return lambda: parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)


STEERED: dict[str, Callable[[Any], Callable[[], None]]] = {
    "a hook": lambda model: model.model.layers[0].register_forward_hook(_steer).remove,
    "a hook before": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(_push).remove,
    "a hook on everything": lambda _: torch.nn.modules.module.register_module_forward_hook(_steer_first).remove,
    "a parametrization": _parametrize,
}


def _steer_first(module: object, _inputs: object, output: Any) -> Any:
    return output + 3.0 if isinstance(module, torch.nn.Embedding) else None


@pytest.mark.parametrize("how", STEERED)
def test_models_kv_under_foreign_hooks_is_not_shared(
    how: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model, ids = copy.deepcopy(models("llama")), prompt(67)
    store, plain = connect(shared, model), greedy(model, ids)
    remove = STEERED[how](model)
    steered = greedy(model, ids)
    assert steered != plain
    assert answer(store, ids) == (steered, 0)
    assert store.stats()["hook_bypassed_total"] == 1
    remove()
    if how == "a parametrization":  # its end makes another parameter of the weight
        store = connect(shared, model, salt=store.options.salt)
    assert answer(store, ids) == (plain, 0), "nothing of it was stored"
    assert answer(store, ids) == (plain, HIT)
    remove = STEERED[how](model)
    assert answer(store, ids) == (steered, 0)
    remove()


def test_models_hooks_added_after_the_cache_are_found(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model, ids = copy.deepcopy(models("llama")), prompt(68)
    store = connect(shared, model)
    with store.cache(ids) as cache:
        hook = model.model.layers[0].register_forward_hook(_steer)
        steered = greedy(model, ids, past_key_values=cache)
        hook.remove()
    assert store.flush(30)
    assert (store.stats()["hook_store_stopped_total"], store.stats().get("hook_stored_blocks_total", 0)) == (1, 0)
    plain, _ = answer(store, ids)
    assert steered != plain
    with (
        store.cache(ids) as cache,
        model.model.layers[0].register_forward_hook(_steer),
        pytest.raises(InvalidArgument, match="hook"),
    ):
        greedy(model, ids, past_key_values=cache)
    with store.cache(ids) as cache:  # a second, steered turn: plain caches allow it too
        turn = torch.cat([ids, torch.tensor(greedy(model, ids, past_key_values=cache)), prompt(69, 40)], 1)
        cache.commit()
        stored = store.stats()["hook_stored_blocks_total"]
        with model.model.layers[0].register_forward_hook(_steer):
            greedy(model, turn, past_key_values=cache)
    assert store.flush(30)
    assert store.stats()["hook_stored_blocks_total"] == stored


def test_hooks_of_transformers_itself_only_look(models: Callable[[str], Any], shared: LocalCluster, connect: Connect) -> None:
    model, ids = copy.deepcopy(models("llama")), prompt(70)
    store, other = connect(shared, model), connect(shared, model, salt="beside")
    with torch.no_grad():
        model(ids, output_hidden_states=True)  # leaves hooks behind on its layers
    assert any(forward_hooks(layer)[1] for layer in model.model.layers[:2])
    fresh, _ = answer(store, ids)
    assert answer(store, ids) == (fresh, HIT)
    assert answer(other, ids) == (fresh, 0)
    assert not store.stats().get("hook_bypassed_total")


def test_a_copied_model_has_no_store(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect, tmp_path: Path
) -> None:
    model, ids = copy.deepcopy(models("llama")), prompt(71)
    store = connect(shared, model)
    torch.save(model, tmp_path / "model")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        with torch.no_grad():
            other.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        with store.cache(ids) as cache:
            assert greedy(other, ids, past_key_values=cache) == greedy(other, ids)
        assert store.flush(30)
        assert not store.stats().get("hook_stored_blocks_total")
        own = connect(shared, other, salt=f"own {id(other)}")
        assert answer(own, ids) == (greedy(other, ids), 0)
        assert answer(own, ids)[1] == HIT
    assert answer(store, ids) == (greedy(model, ids), 0)
