"""SGLang's radix tree and controllers over the store: a new tree restores the backup of another one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang_cases import PAGE

from kvstore.lab.sglang_bed import Tree
from support.wait import wait_until

Extra = Callable[..., dict[str, object]]
TOKENS = list(range(100, 100 + 8 * PAGE))


def given(extra: Extra, **changes: object) -> dict[str, object]:
    in_place = bool(changes.get("interface_v1", 1))
    return extra(**{"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": in_place, **changes})


def produce(extra: dict[str, object], tokens: list[int], **how: Any) -> list[torch.Tensor]:
    """Store a prompt from one tree in two turns, and return the KV that another tree must restore."""
    with Tree(extra, **how) as tree:
        half = len(tokens) // 2
        tree.back_up(tree.insert(tokens[:half], 1))
        node = tree.insert(tokens, 2)
        tree.back_up(node)
        assert failures(tree) == {}
        return tree.snapshot(node)


def failures(tree: Tree) -> dict[str, int]:
    return {name: value for name, value in tree.storage.counters().items() if "failed" in name or "broke" in name}


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def consume(extra: dict[str, object], tokens: list[int], want: list[torch.Tensor], **how: Any) -> None:
    """A new tree brings all of a prompt back, once the store shows it."""
    with Tree(extra, **how) as tree:
        wait_until(lambda: tree.prefetch(tokens) == len(tokens), "the whole prompt is prefetched")
        assert equal(tree.snapshot(tree.load_back(tokens)), want), "other bytes than were stored"
        assert failures(tree) == {}


@pytest.mark.parametrize("in_place", [1, 0])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_new_tree_brings_it_back(extra: Extra, layout: str, in_place: int) -> None:
    config = given(extra, interface_v1=in_place)
    want = produce(config, TOKENS, layout=layout)
    assert float(want[0].abs().sum()) > 0
    consume(config, TOKENS, want, layout=layout)


def hybrid(kind: str) -> Any:
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

    sizes: dict[str, Any] = {"num_layers": 8, "full_attention_layer_ids": (3, 7), "dtype": torch.float32}
    if kind == "window":
        return CacheConfig(
            page_size=PAGE, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=32, kv_size=512, **sizes
        )
    return CacheConfig(
        page_size=64,
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
        **sizes,
    )


@pytest.mark.parametrize("in_place", [1, 0])
@pytest.mark.parametrize("kind", ["window", "state"])
def test_hybrid_models(extra: Extra, kind: str, in_place: int) -> None:
    """Sliding windows and recurrent state: the pools beside the KV come back with it."""
    model = hybrid(kind)
    tokens = list(range(8 * model.page_size))
    config = given(extra, interface_v1=in_place)
    want = produce(config, tokens, config=model)
    assert len(want) > 4
    assert all(float(tensor.float().abs().sum()) > 0 for tensor in want)
    consume(config, tokens, want, config=model)


def test_state_exists_at_some_points_only(extra: Extra) -> None:
    """A prompt that shares six of eight pages: its recurrent state is there for four, the end of the first turn."""
    model = hybrid("state")
    tokens = list(range(8 * model.page_size))
    config = given(extra)
    produce(config, tokens, config=model)
    other = tokens[: 6 * model.page_size] + list(range(5000, 5000 + 2 * model.page_size))
    with Tree(config, config=model) as tree:
        wait_until(lambda: tree.prefetch(other) == 4 * model.page_size, "the prefix up to the first turn's end is prefetched")


def test_a_prompt_that_goes_on(extra: Extra) -> None:
    """A tree that has the beginning itself asks for the rest by its place in the chain."""
    config = given(extra)
    want = produce(config, TOKENS)
    with Tree(config) as tree:
        wait_until(lambda: tree.prefetch(TOKENS[: 4 * PAGE]) == 4 * PAGE, "the first half is prefetched")
        tree.load_back(TOKENS[: 4 * PAGE])
        wait_until(lambda: tree.prefetch(TOKENS) == len(TOKENS), "the rest is prefetched")
        assert equal(tree.snapshot(tree.load_back(TOKENS)), want)


def test_a_prompt_that_branches(extra: Extra) -> None:
    config = given(extra)
    want = produce(config, TOKENS)
    branch = TOKENS[: 5 * PAGE] + list(range(9000, 9000 + 3 * PAGE))
    with Tree(config) as tree:
        wait_until(lambda: tree.prefetch(branch) == 5 * PAGE, "the shared prefix is prefetched")
        assert equal(tree.snapshot(tree.load_back(branch[: 5 * PAGE])), [tensor[: 5 * PAGE] for tensor in want])


@pytest.mark.parametrize("in_place", [1, 0])
def test_several_requests_at_once(extra: Extra, in_place: int) -> None:
    """Prompts with common prefixes, and one that was never stored: each gets its own KV."""
    config = given(extra, interface_v1=in_place)
    prompts = [TOKENS, TOKENS[: 3 * PAGE] + list(range(7000, 7000 + 4 * PAGE)), list(range(8000, 8000 + 6 * PAGE))]
    want = [produce(config, tokens) for tokens in prompts]
    strange = list(range(9500, 9500 + 4 * PAGE))
    with Tree(config) as tree:
        sizes = [*map(len, prompts), 0]
        wait_until(lambda: tree.prefetch_at_once([*prompts, strange]) == sizes, "all that is stored is prefetched")
        for tokens, tensors, first in zip(prompts, want, (0, 3 * PAGE, 0), strict=True):  # the common pages are the first one's
            restored = tree.snapshot(tree.load_back(tokens))
            assert equal([tensor[first:] for tensor in restored], [tensor[first:] for tensor in tensors])
        assert failures(tree) == {}


def test_adapters_and_salts_are_chains_of_their_own(extra: Extra) -> None:
    """SGLang seeds page hashes with them: equal tokens, other keys."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    seen = set()
    for seed in ({}, {"extra_key": "lora"}, {"cache_salt": "mine"}, {"extra_key": "lora", "cache_salt": "mine"}):
        seen.update(get_storage_hash_str(RadixKey(TOKENS, **seed), page_size=PAGE))
    assert len(seen) == 4 * 8


def test_weights_epochs_are_kept_apart(extra: Extra) -> None:
    produce(given(extra, weights_epoch="1"), TOKENS)
    with Tree(given(extra, weights_epoch="2")) as tree:
        assert tree.prefetch(TOKENS) == 0


def test_sglangs_own_failure_injection(extra: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all calls fail, others are delayed: all loaded pages are right."""
    config = given(extra)
    want = produce(config, TOKENS)
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    prefetched = set()
    for _ in range(12):
        with Tree(config) as tree:
            tokens = tree.prefetch(TOKENS)
            prefetched.add(tokens)
            if tokens:
                assert equal(tree.snapshot(tree.load_back(TOKENS[:tokens])), [tensor[:tokens] for tensor in want])
    assert len(prefetched) > 1, "some failed, some did not"
