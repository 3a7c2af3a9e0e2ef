"""Which described engines share chunks in the store, and that all others find nothing of each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from tier_namespaces import HEAD_SIZE, HEADS, Described

from kvclient import CacheSpec, KVClient
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvstore.lab.tiny_models import Family, TinyModel, make_model
from kvstore.testing.connector.driver import StoreAddress

DEADLINE_S = 10.0
CHANGES: dict[str, Callable[[Described], Described]] = {
    "weights": lambda one: replace(one, weights="w1"),
    "dtype": lambda one: one.changed(dtype="bfloat16"),
    "quantized KV": lambda one: one.changed(kv_cache_dtype="fp8"),
    "block": lambda one: one.changed(block_size=64),
    "configuration": lambda one: one.changed(hf_overrides='{"rms_norm_eps": 0.5}'),
    "hash": lambda one: one.changed(prefix_caching_hash_algo="sha256_cbor"),
    "hash seed": lambda one: replace(one, hash_seed="7"),
    "order in pages": lambda one: replace(one, heads_first=not one.heads_first),
    "windows": lambda one: replace(one, window=64),
    "chunk": lambda one: replace(one, offloading=(("blocks_per_chunk", 2),)),
    "layout": lambda one: replace(one, canonical=not one.canonical),
    "tensor parallelism": lambda one: replace(one, ranks=2 if one.ranks == 1 else 1, canonical=False),
    "unnamed weights": lambda one: replace(one, ranks=2 if one.ranks == 1 else 1, named=False),
    "tenant": lambda one: replace(one, hook=(("tenant", "t"),)),
    "salt": lambda one: replace(one, hook=(("salt", "s"),)),
}
"""Each makes an engine that must not share KV with the one before."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose configuration the engines read."""
    shape = TinyModel(Family.LLAMA, hidden=128, heads=2 * HEADS, kv_heads=HEADS, head_dim=HEAD_SIZE, max_tokens=4096)
    return make_model(tmp_path_factory.mktemp("namespaces") / "llama", shape)


@cache
def specs_of(engine: Described, model: Path) -> dict[int, CacheSpec]:
    return engine.specs(model)


def pair(seed: int) -> tuple[Described, Described, list[str]]:
    """Two engines that must not share KV, and how they differ."""
    dice = random.Random(seed)
    first = Described(ranks=dice.choice([1, 2]), canonical=dice.random() < 0.5)
    for name in dice.sample(sorted(CHANGES), dice.randint(0, 2)):  # what both have in common
        first = CHANGES[name](first)
    second, names = first, []
    while second.like == first.like:  # some changes have no effect, or undo each other
        second, names = first, dice.sample(sorted(CHANGES), dice.randint(1, 3))
        for name in names:
            second = CHANGES[name](second)
    return first, second, names


def held(storing: CacheSpec, finding: CacheSpec, store: StoreAddress, seed: int) -> tuple[int, int]:
    """Store chunks in one namespace; return how many of them that one and another one find."""
    hashes = [sha256(bytes([seed, at])).digest() for at in range(3)]
    rows = np.ones((3, storing.layer_block_bytes), np.uint8)
    chunks = [Chunk(one + bytes(4), one, at, row) for at, (one, row) in enumerate(zip(hashes, rows, strict=True))]
    found = []
    with KVClient.connect(store.metadata, storing, node=store.node) as client:
        kept, *_ = ChunkStore(client).store(chunks, hashes, time.monotonic() + DEADLINE_S)
        assert len(kept) == len(chunks)
        for spec in (storing, finding):
            with KVClient.connect(store.metadata, spec, node=store.node) as other:
                end_s = time.monotonic() + (DEADLINE_S if spec is storing else 0)
                tier = ChunkStore(other)
                while (hits := tier.find_chain(hashes).hit_blocks) < len(hashes) and time.monotonic() < end_s:
                    time.sleep(0.005)
                found.append(hits)
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(50))
def test_tier_incompatible_engines_find_nothing(seed: int, model: Path, store: StoreAddress) -> None:
    first, second, names = pair(seed)
    one, other = specs_of(first, model), specs_of(second, model)
    assert not {spec.namespace for spec in one.values()} & {spec.namespace for spec in other.values()}, names
    for storing in one.values():
        for finding in other.values():
            assert held(storing, finding, store, seed) == (3, 0), names


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("heads_first", [True, False])
def test_tier_canonical_namespaces_ignore_ranks(window: int, heads_first: bool, model: Path) -> None:
    engines = [Described(ranks=ranks, canonical=True, window=window, heads_first=heads_first) for ranks in (1, 2, 4, 8)]
    one, *others = [specs_of(engine, model) for engine in engines]
    assert all(other == one for other in others)
    assert all("canonical=v1-hnd" in spec.layout for spec in one.values())
    assert len(one) == (2 if window else 1)


def test_tier_direct_namespaces_depend_on_ranks(model: Path) -> None:
    spaces = [specs_of(Described(ranks=ranks), model)[0].namespace for ranks in (1, 2, 4)]
    assert len(set(spaces)) == len(spaces)


def test_tier_canonical_weights_without_name_depend_on_ranks(model: Path) -> None:
    known, unknown = (Described(canonical=True, named=named) for named in (True, False))
    epochs = {specs_of(replace(engine, ranks=ranks), model)[0].weights_epoch for engine in (known, unknown) for ranks in (1, 2)}
    assert len(epochs) == 3, "one name, and one digest for each number of ranks"
