"""Models of transformers answer with the store as without it, also after failures and with all ways of ``generate``."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from generate_bed import (
    BLOCK,
    HIT,
    PROMPT,
    STEPS,
    WINDOW,
    Connect,
    answer,
    greedy,
    padded,
    prompt,
    until_all_shown,
    until_shown,
    with_local_prefix,
)
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from kvclient import InvalidArgument, encode_extra
from kvclient.engines.torch_blocks import KV
from kvclient.engines.transformers import PrefixStore, StoredCache
from kvclient.engines.transformers.model_facts import config_digest
from kvclient.engines.transformers.weights import fingerprint, weights_digest
from kvclient.engines.transformers.writer import StoredChain
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.tiny_models import PAD
from nursery import run_engine

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek"]
MIB = 1 << 20
TIMEOUT_S = 280.0
"""Bound of a process that imports transformers, which takes long on a busy machine."""


# ---- the same tokens ----
def test_cache_loads_what_another_process_stored(models: Callable[[str], Any], shared: LocalCluster, connect: Connect) -> None:
    script = [sys.executable, str(Path(__file__).with_name("generate_bed.py"))]
    arguments = [shared.metadata_address, shared.node("n").local_socket, str(models.folder)]  # type: ignore[attr-defined]
    done = run_engine([*script, *arguments, *FAMILIES], TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    for family in FAMILIES:
        model, ids = models(family), prompt()
        fresh = greedy(model, ids) if family != "deepseek" else with_local_prefix(model, ids, HIT)  # the latter computes in bf16
        assert len(set(fresh[0])) > 3, "an answer that says the same all the time proves nothing"
        store = connect(shared, model, salt="")
        tokens, loaded = answer(store, ids)
        assert (tokens, loaded) == (fresh, HIT), family
        assert store.stats()["hook_loaded_tokens_total"] == HIT


def test_what_was_loaded_can_be_asked_before_anything_was(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    store = connect(shared, models("llama"))
    assert store.stats()["hook_loaded_tokens_total"] == 0
    assert answer(store, prompt(2))[1] == 0
    assert store.stats()["hook_loaded_tokens_total"] == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_a_little_off_would_be_seen(
    family: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ids = connect(shared, models(family)), prompt(1)
    fresh, _ = answer(store, ids)
    assert answer(store, ids) == (fresh, HIT)
    fill = StoredCache.fill

    def fill_rolled(cache: StoredCache, layers: list[KV], columns: int, chains: list[StoredChain]) -> None:
        fill(cache, [(keys.roll(3, 2), values) for keys, values in layers], columns, chains)

    monkeypatch.setattr(StoredCache, "fill", fill_rolled)
    assert answer(store, ids)[0] != fresh


@pytest.mark.parametrize("tokens", [WINDOW // 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK + 1, 3 * WINDOW])
def test_a_sliding_window_goes_on_from_wherever_the_hit_ends(
    tokens: int, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    """The prompt that was stored ends elsewhere: each block must hold what its own tokens had in every layer."""
    store, longer = connect(shared, models("gemma3"), salt="windows"), prompt(2, 4 * WINDOW)
    if not answer(store, longer)[1]:
        assert answer(store, longer)[1] == 4 * WINDOW - BLOCK
    ids = torch.cat([longer[:, :tokens], prompt(3, 20)], 1)
    loaded = tokens // BLOCK * BLOCK
    found, hit = answer(store, ids)
    assert found == greedy(store.model, ids)
    assert hit >= loaded  # runs after the first find what they stored themselves


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_was_generated_is_there_in_the_next_turn(
    family: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    store, ids = connect(shared, models(family)), prompt(4, 50)
    for turn in range(4):
        fresh = greedy(store.model, ids)
        tokens, loaded = answer(store, ids)
        assert tokens == fresh
        assert turn == 0 or loaded >= ids.shape[1] - 7 - 2 * BLOCK
        ids = torch.cat([ids, torch.tensor(tokens), prompt(5 + turn, 7)], 1)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_batches_padded_on_the_left(
    family: str, background: bool, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    store = connect(shared, models(family), background=background)
    ids, mask = padded(100, 70, 5, 41)
    fresh = greedy(store.model, ids, mask)
    assert answer(store, ids, mask) == (fresh, 0)
    assert answer(store, ids, mask) == (fresh, 91)  # 59 of padding and 2 blocks of the last row
    ids, mask = padded(60, 100, seed=0)
    assert answer(store, ids, mask) == (greedy(store.model, ids, mask), 88)  # 48 of the shorter row, behind 40 of padding
    single, _ = padded(100)
    assert answer(store, single) == (greedy(store.model, single), 96)
    assert not store.stats().get("hook_store_failed_total")


def test_a_block_ends_within_the_padding_of_others(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    """Hits of rows with different padding end at different columns: a part of a block is used."""
    store = connect(shared, llama)
    answer(store, prompt(0, 48))
    ids, mask = padded(90, 77)
    _, loaded = answer(store, ids, mask)
    assert loaded == 48
    with store.cache(ids, mask) as cache:
        assert cache.hit_tokens == [77, 64]
        assert greedy(llama, ids, mask, past_key_values=cache) == greedy(llama, ids, mask)


# ---- however it is used ----
@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 50}])
def test_cache_generate_feeding_whole_prompt_loads_nothing(
    how: dict[str, int], llama: Any, shared: LocalCluster, connect: Connect
) -> None:
    store, ids = connect(shared, llama), prompt(61).repeat(1, 2)
    fresh = greedy(llama, ids, **how)
    for unused in (0, 1):
        tokens, loaded = answer(store, ids, **how)
        assert tokens == fresh
        assert not loaded or "prefill_chunk_size" in how  # later versions feed only the tokens after the cache
        assert store.stats().get("hook_prefix_unused_total", 0) == (0 if loaded else unused)
    assert answer(store, torch.cat([ids, torch.tensor(fresh)], 1))[1] >= ids.shape[1] + STEPS - 2 * BLOCK


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_cache_rejected_guesses_after_stored_prefix_are_cropped(
    how: str, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model, ids = models("gemma3"), prompt(62).repeat(1, 2)
    store, guesses = connect(shared, model), {"assistant": {"assistant_model": model}, "lookup": {"prompt_lookup_num_tokens": 3}}
    fresh, _ = answer(store, ids)
    assert ids.shape[1] > 2 * WINDOW
    for _ in range(2):
        assert answer(store, ids, **guesses[how]) == (fresh, 0)
    assert store.stats()["hook_prefix_unused_total"] == 2
    assert answer(store, torch.cat([ids, torch.tensor(fresh), prompt(63, 20)], 1))[1] >= ids.shape[1] + STEPS - 2 * BLOCK


def test_several_answers_and_beams(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(6).repeat(1, 2)
    for how in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        fresh = greedy(llama, ids, **how)
        assert answer(store, ids, **how)[0] == fresh
        assert answer(store, ids, **how) == (fresh, (ids.shape[1] - 1) // BLOCK * BLOCK)
    sampled = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    fresh = greedy(llama, ids, **sampled)
    torch.manual_seed(0)
    assert answer(store, ids, **sampled)[0] == fresh
    continued = torch.cat([ids, torch.tensor(fresh[1:2])], 1)
    assert answer(store, continued)[1] >= ids.shape[1] + STEPS - 2 * BLOCK, "each of the answers was stored"
    assert store.stats().get("hook_store_stopped_total", 0) == 0


@pytest.mark.parametrize("chunk", [16, 50, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_long_prompts_in_chunks(
    family: str, chunk: int, models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    store = connect(shared, models(family))
    ids, mask = padded(PROMPT, 150, seed=7)
    fresh = greedy(store.model, ids, mask)
    for _ in range(2):
        tokens = store.generate(ids, mask, max_new_tokens=STEPS, do_sample=False, prefill_chunk_size=chunk)
        assert tokens[:, PROMPT:].tolist() == fresh
        assert store.flush(30)
        for row, pad in enumerate((0, PROMPT - 150)):
            until_shown(store, store.client.keys(ids[row, pad : PROMPT - 1].numpy()))
        with store.cache(ids, mask) as cache:
            assert cache.loaded_tokens == HIT


def test_a_cache_goes_on_for_several_turns_and_can_be_copied(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(8)
    with store.cache(ids) as cache:
        first = greedy(llama, ids, past_key_values=cache)
        second = torch.cat([ids, torch.tensor(first), prompt(9, 30)], 1)
        fork = copy.deepcopy(cache)
        assert greedy(llama, second, past_key_values=cache) == greedy(llama, second)
        other = torch.cat([ids, torch.tensor(first), prompt(10, 30)], 1)
        with fork:
            assert greedy(llama, other, past_key_values=fork) == greedy(llama, other)
    until_all_shown(store, cache, fork)
    for turn in (second, other):
        assert answer(store, turn)[1] == (turn.shape[1] - 1) // BLOCK * BLOCK


def test_rows_that_ended_are_not_stored_as_padding(shared: LocalCluster, connect: Connect, models: Callable[[str], Any]) -> None:
    model = copy.deepcopy(models("llama"))
    store = connect(shared, model)
    ids, mask = padded(40, 40, seed=11)
    ids[1] = prompt(12, 40)[0]
    plain = greedy(model, ids, mask, max_new_tokens=100)
    ends = plain[0][5]  # what the first row says early becomes the end of a sequence
    assert ends not in plain[1][:60]
    model.generation_config.eos_token_id = ends
    store = connect(shared, model, salt="ended")
    cut, _ = answer(store, ids, mask, max_new_tokens=100)
    assert cut[0][6:] == [PAD] * len(cut[0][6:])
    assert store.stats()["hook_stored_blocks_total"] <= 3 + (40 + len(cut[1])) // BLOCK


def test_many_threads_share_a_model_and_a_store(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store = connect(shared, llama)
    prompts = [torch.cat([prompt(13, 100), prompt(20 + number, 30)], 1) for number in range(8)]
    fresh = [greedy(llama, ids) for ids in prompts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            found = list(threads.map(lambda ids: answer(store, ids)[0], prompts))
            assert found == fresh
    assert store.stats()["hook_loaded_tokens_total"] >= 8 * 112


# ---- what must not be stored, or not be used ----
def test_a_cache_of_another_prompt_is_refused(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(30)
    answer(store, ids)
    with store.cache(ids) as cache, pytest.raises(InvalidArgument, match="another prompt"):
        greedy(llama, torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1), past_key_values=cache)
    shifted, mask = padded(PROMPT, PROMPT + 9, seed=30)
    with store.cache(ids) as cache, pytest.raises(InvalidArgument, match="another prompt"):
        greedy(llama, shifted[:1], mask[:1], past_key_values=cache)


def test_keys_are_of_what_was_fed_and_not_of_what_was_said(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, announced, fed = connect(shared, llama), prompt(31), prompt(32)
    with store.cache(announced) as cache:
        assert greedy(llama, fed, past_key_values=cache) == greedy(llama, fed)
    until_all_shown(store, cache)
    assert store.cache(announced).loaded_tokens == 0
    assert answer(store, fed) == (greedy(llama, fed), HIT)


def test_cache_fed_another_prompt_whole_stores_nothing(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    """Blocks of the fed prompt must not get the keys of blocks that the store holds of the announced one as parents."""
    store, announced, fed = connect(shared, llama), prompt(35, 40), prompt(36, 80)
    answer(store, announced, max_new_tokens=1)
    before = store.stats()["hook_stored_blocks_total"]
    with store.cache(announced) as cache, torch.no_grad():
        assert cache.loaded_tokens == 2 * BLOCK
        logits = llama(fed, position_ids=torch.arange(80)[None], past_key_values=cache).logits
        assert torch.equal(logits, llama(fed).logits)
    assert store.flush(30)
    assert store.stats()["hook_stored_blocks_total"] == before
    assert store.stats()["hook_store_stopped_total"] == 1


@pytest.mark.parametrize("same", [True, False])
def test_cache_later_pass_within_stored_block_must_match(same: bool, llama: Any, shared: LocalCluster, connect: Connect) -> None:
    """The store holds 2 blocks of the first row, and the loaded columns end within the second of them."""
    store, ids = connect(shared, llama), torch.cat([prompt(37, 80), prompt(38, 80)])
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    answer(store, ids[:1, : 2 * BLOCK], max_new_tokens=1)
    answer(store, ids[1:, 8 : 8 + BLOCK], max_new_tokens=1)
    before = store.stats()["hook_stored_blocks_total"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    fed = ids if same else torch.cat([ids[:, :26], prompt(39, 54, rows=2)], 1)
    with store.cache(ids, mask) as cache, torch.no_grad():
        assert cache.loaded_tokens == 8 + BLOCK
        for start, stop in ((24, 26), (26, 80)):
            now = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            llama(fed[:, start:stop], **now, past_key_values=cache)
    assert store.flush(30)
    assert store.stats()["hook_stored_blocks_total"] - before == (3 + 3 if same else 0)
    assert store.stats().get("hook_store_stopped_total", 0) == (0 if same else 1)


def test_what_depends_on_more_than_tokens_is_not_stored(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(33, 64)
    embedded = llama.get_input_embeddings()(ids).detach()
    odd = {
        "embeddings": {"inputs_embeds": embedded},
        "a hole in the mask": {"input_ids": ids, "attention_mask": (torch.arange(64) != 5).long()[None]},
        "a 4-d mask": {"input_ids": ids, "attention_mask": torch.ones(1, 1, 64, 64).tril().log()},
        "other positions": {"input_ids": ids, "position_ids": torch.arange(64)[None] + 1},
    }
    for what, given in odd.items():
        with store.cache(ids) as cache, torch.no_grad():
            llama(**given, past_key_values=cache)
        assert store.flush(30)
        assert store.stats().get("hook_stored_blocks_total", 0) == 0, what
    assert store.stats()["hook_store_stopped_total"] == len(odd)
    with store.cache(ids) as cache, torch.no_grad():
        llama.model(ids, past_key_values=cache)  # passes by the hook
    with store.cache(ids) as cache:  # a pass that failed half-way
        cache.announce(ids, {})
        cache.update(torch.zeros(1, 2, 64, 32), torch.zeros(1, 2, 64, 32), 0)
    assert store.flush(30)
    assert store.stats().get("hook_stored_blocks_total", 0) == 0


def test_loaded_prefix_with_other_inputs_is_refused(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    """Blocks of a prompt's tokens alone are not those of the same ids fed with embeddings or an image."""
    store, ids = connect(shared, llama), prompt(34)
    fresh, _ = answer(store, ids)
    rest = ids[:, HIT:]
    embedded = llama.get_input_embeddings()(ids).detach()
    for given in ({"inputs_embeds": embedded[:, HIT:]}, {"input_ids": rest, "pixel_values": torch.ones(1, 3, 2, 2)}):
        cache = store.cache(ids)
        assert cache.loaded_tokens == HIT
        with pytest.raises(InvalidArgument, match="another prompt"):
            llama(**given, past_key_values=cache)
    loaded = store.stats()["hook_loaded_tokens_total"]
    tokens = store.generate(ids, inputs_embeds=embedded, max_new_tokens=STEPS, do_sample=False)
    assert tokens[:, -STEPS:].tolist() == fresh
    assert store.stats()["hook_loaded_tokens_total"] == loaded
    assert store.stats()["hook_bypassed_total"] == 1


def test_training_and_late_adapters_leave_the_store_alone(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model = copy.deepcopy(models("llama"))
    store, ids = connect(shared, model), prompt(34)
    answer(store, ids)
    model.train()
    assert store.cache(ids).loaded_tokens == 0
    model.eval()
    assert store.cache(ids).loaded_tokens == HIT
    model._hf_peft_config_loaded = True
    assert answer(store, ids)[1] == 0
    assert store.stats()["hook_bypassed_total"] == 2
    with pytest.raises(InvalidArgument, match="adapters"):
        connect(shared, model)


def test_what_autocast_computes_is_neither_loaded_nor_stored(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama), prompt(36)
    with torch.autocast("cpu", torch.bfloat16):
        cast = greedy(llama, ids)
        assert answer(store, ids) == (cast, 0)
    with store.cache(ids) as cache, torch.autocast("cpu", torch.bfloat16):  # made before
        assert greedy(llama, ids, past_key_values=cache) == cast
    assert store.flush(30)
    stats = store.stats()
    assert stats.get("hook_stored_blocks_total", 0) == 0
    assert (stats["hook_bypassed_total"], stats["hook_store_stopped_total"]) == (1, 1)
    fresh = greedy(llama, ids)
    assert answer(store, ids) == (fresh, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert answer(store, ids) == (cast, 0)
    with store.cache(ids) as cache, torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidArgument, match="autocast"):
        greedy(llama, ids, past_key_values=cache)
    with torch.autocast("cpu", torch.bfloat16):  # connecting there says nothing of where caches are used
        again = connect(shared, llama, salt=store.options.salt)
    assert answer(again, ids) == (fresh, HIT)


def test_a_model_with_autocast_of_its_own_is_refused(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model = copy.deepcopy(models("llama"))
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    with pytest.raises(InvalidArgument, match="autocast"):
        connect(shared, model)


def _cast(model: Any) -> None:
    model.to(torch.bfloat16)


def _write(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def _write_unseen(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data += 0.1  # as merging an adapter does: no version is counted


def _replace(model: Any) -> None:
    layer = model.model.layers[1].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


@pytest.mark.parametrize("change", [_cast, _write, _write_unseen, _replace])
def test_a_model_that_changed_goes_on_without_the_store(
    change: Callable[[Any], None], models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model = copy.deepcopy(models("llama"))
    store, ids = connect(shared, model), prompt(37)
    assert answer(store, ids) == (greedy(model, ids), 0)
    assert answer(store, ids)[1] == HIT
    stored = store.stats()["hook_stored_blocks_total"]
    held = store.cache(prompt(38))
    change(model)
    assert answer(store, ids) == (greedy(model, ids), 0)
    with held:
        assert greedy(model, prompt(38), past_key_values=held) == greedy(model, prompt(38))
    assert store.flush(30)
    stats = store.stats()
    assert stats["hook_stored_blocks_total"] == stored
    assert (stats["hook_bypassed_total"], stats["hook_store_stopped_total"]) == (1, 1)
    again = connect(shared, model, salt=store.options.salt)
    assert [answer(again, ids)[1] for _ in range(2)] == [0, HIT]


def test_extras_tenants_and_weights_are_worlds_of_their_own(
    models: Callable[[str], Any], shared: LocalCluster, connect: Connect
) -> None:
    model = copy.deepcopy(models("llama"))
    store, ids = connect(shared, model, salt="worlds"), prompt(35)
    with store.cache(ids, extra=encode_extra([("customer", b"7")])) as cache:
        greedy(model, ids, past_key_values=cache)
    until_all_shown(store, cache)
    assert store.cache(ids, extra=encode_extra([("customer", b"7")])).loaded_tokens == HIT
    assert store.cache(ids).loaded_tokens == store.cache(ids, extra=encode_extra([("customer", b"8")])).loaded_tokens == 0
    answer(store, ids)
    assert store.cache(ids).loaded_tokens == HIT
    assert connect(shared, model, salt="worlds").cache(ids).loaded_tokens == HIT
    assert connect(shared, model, salt="worlds", tenant="b").cache(ids).loaded_tokens == 0
    assert connect(shared, model, salt="worlds", block_tokens=BLOCK * 2).cache(ids).loaded_tokens == 0
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3  # one number of one matrix
    assert connect(shared, model, salt="worlds").cache(ids).loaded_tokens == 0
    with pytest.raises(InvalidArgument, match="does not identify a model"):
        connect(shared, LlamaForCausalLM(LlamaConfig(**SMALL)), weights_epoch="1")


SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_cache_models_without_prefix_kv_are_refused(shared: LocalCluster, connect: Connect) -> None:
    ropes = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refused = {
        "encoder": T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)),
        "keys and values": MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4)),
        "length of the whole prompt": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=ropes)),
    }
    for why, model in refused.items():
        with pytest.raises(InvalidArgument, match=why):
            connect(shared, model.eval())
    llama = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    with pytest.raises(InvalidArgument, match="unknown option"):
        connect(shared, llama, tenantt="b")


def test_digests_differ_exactly_where_kv_may() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    torch.manual_seed(0)
    assert weights_digest(LlamaForCausalLM(LlamaConfig(**SMALL))) == weights_digest(model)
    assert weights_digest(copy.deepcopy(model).half()) != weights_digest(model)
    config = LlamaConfig(**SMALL).to_dict()
    assert config_digest({**config, "_name_or_path": "x", "eos_token_id": 7}) == config_digest(config)
    for changed in (
        {"rms_norm_eps": 1e-4},
        {"sliding_window": 7},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    ):
        assert config_digest({**config, **changed}) != config_digest(config)


class _Odd(torch.nn.Module):
    """Its state is more than tensors."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra


def test_digests_count_all_of_a_models_state() -> None:
    with warnings.catch_warnings():  # torch is about to move this elsewhere
        warnings.simplefilter("ignore")
        digests = []
        for more in (0.0, 0.0, 0.1):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            with torch.no_grad():
                model[0].weight[0, 0] += more
            packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
            digests.append(weights_digest(packed))
            script_object = torch.ops.quantized.linear_prepack(packed[0].weight(), packed[0].bias())
            digests.append(weights_digest(_Odd(script_object)))
            assert fingerprint(packed) != fingerprint(model)
    assert digests[:2] == digests[2:4]
    assert len(set(digests)) == 4
    odd = [weights_digest(_Odd(extra)) for extra in ({"a": [1, torch.zeros(2)]}, {"a": [1, torch.ones(2)]}, b"x", b"y", 1, 1.0)]
    assert len(set(odd)) == len(odd)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        weights_digest(_Odd(object()))
    with pytest.raises(InvalidArgument, match="offloaded"):
        weights_digest(torch.nn.Linear(2, 2, device="meta"))
    rope = LlamaForCausalLM(LlamaConfig(**SMALL)).half()
    rounded = copy.deepcopy(rope)
    rope.model.rotary_emb.float()
    rope.model.rotary_emb.inv_freq += 1e-5  # no part of the state, and yet of all keys
    assert weights_digest(rope) != weights_digest(rounded)


# ---- whatever fails ----
def test_without_a_store_models_answer_as_ever(llama: Any, connect: Connect) -> None:
    with LocalCluster([NodeSpec("n", dram_bytes=16 * MIB)]) as cluster:
        store, ids = connect(cluster, llama, store_deadline_s=2.0), prompt(40)
        fresh, _ = answer(store, ids)
        assert answer(store, ids) == (fresh, HIT)
    assert answer(store, ids, shown=False) == (fresh, 0)  # the store is down
    assert store.stats()["client_lookups_failed_total"]
    nowhere = PrefixStore.connect(llama, metadata="127.0.0.1:1", node="none", block_tokens=BLOCK, store_deadline_s=0.5)
    with nowhere:
        assert nowhere.generate(ids, max_new_tokens=STEPS, do_sample=False)[:, PROMPT:].tolist() == fresh


def test_node_and_metadata_server_restart_between_store_and_load(llama: Any, fragile: LocalCluster, connect: Connect) -> None:
    store, ids = connect(fragile, llama), prompt(41)
    fresh, _ = answer(store, ids)
    assert store.client.flush(20)
    fragile.kill("n")
    assert answer(store, ids, shown=False) == (fresh, 0)
    fragile.start_node("n")
    fragile.kill("metadata")
    fragile.start_metadata()
    again = connect(fragile, llama, salt=store.options.salt)
    until_shown(again, again.client.keys(ids[0, :HIT].numpy()))
    assert answer(again, ids) == (fresh, HIT)


def test_a_flipped_bit_is_a_miss_and_the_answer_stays(llama: Any, fragile: LocalCluster, connect: Connect) -> None:
    store, ids = connect(fragile, llama), prompt(42)
    fresh, _ = answer(store, ids)
    assert store.client.flush(20)
    keys = store.client.keys(ids[0, :HIT].numpy())
    space = store.facts.layout.allocate(len(keys))
    assert store.client.load(keys, space).hit_blocks == len(keys)
    slab = max(fragile.volume_path("n").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content, bad = slab.read_bytes(), 5
    at = content.index(space[bad].numpy().tobytes()) + 1000
    fragile.kill("n")
    with slab.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 0x10]))
    fragile.start_node("n")
    again = connect(fragile, llama, salt=store.options.salt)
    until_shown(again, again.client.keys(ids[0, :HIT].numpy()))
    assert answer(again, ids) == (fresh, bad * BLOCK)
    assert again.stats()["client_missed_corrupt_blocks_total"] == 1
    assert answer(again, ids) == (fresh, HIT), "the corrupt blocks were computed and stored again"


@pytest.mark.parametrize("when", ["before the answer", "in the middle of it"])
def test_a_node_killed_while_a_model_answers(when: str, llama: Any, fragile: LocalCluster, connect: Connect) -> None:
    store, ids = connect(fragile, llama, store_deadline_s=1.0), prompt(43)
    fresh = greedy(llama, ids)
    half = ids[:, : PROMPT // 2]
    answer(store, half)

    class Killer:
        steps = 0

        def __call__(self, seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            if self.steps == 8:
                fragile.kill("n")
            return scores

    with store.cache(ids) as cache:
        assert cache.loaded_tokens == PROMPT // 2 // BLOCK * BLOCK
        if when == "before the answer":
            fragile.kill("n")
        assert (
            greedy(llama, ids, past_key_values=cache, logits_processor=[Killer()] if when != "before the answer" else []) == fresh
        )
    assert store.flush(30)
    assert store.stats()["hook_store_failed_total"] >= 1
    assert answer(store, ids, shown=False) == (fresh, 0)


def test_a_store_without_space_costs_nothing_but_misses(llama: Any, connect: Connect) -> None:
    with LocalCluster([NodeSpec("n", dram_bytes=1 * MIB)]) as cluster:
        store = connect(cluster, llama, store_deadline_s=1.0)
        for seed in range(50, 54):
            ids = prompt(seed, 1000)
            fresh = greedy(llama, ids)
            assert answer(store, ids, shown=False)[0] == fresh
            assert answer(store, ids, shown=False)[0] == fresh


def test_more_than_may_wait_is_offered_later(llama: Any, shared: LocalCluster, connect: Connect) -> None:
    store, ids = connect(shared, llama, max_pending_bytes=1), prompt(60)
    stop, put = threading.Event(), store.client.store
    store.client.store = lambda *given, **named: (stop.wait(30), put(*given, **named))[1]  # type: ignore[method-assign]
    with store.cache(ids) as cache:
        fresh = greedy(llama, ids, past_key_values=cache)
        stop.set()
        assert store.flush(30)
    until_all_shown(store, cache)
    assert store.stats()["hook_store_refused_total"] >= 1
    assert fresh == greedy(llama, ids)
    assert answer(store, torch.cat([ids, torch.tensor(fresh)], 1))[1] == (PROMPT + STEPS - 1) // BLOCK * BLOCK
