"""Models, prompts and greedy answers for tests of the transformers hook. As a script: a second process that stores answers."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvclient import BlockKey
from kvclient.engines.transformers import PrefixStore, StoredCache
from kvstore.testing.tiny_models import PAD, Family, TinyModel, make_model

BLOCK = 16
WINDOW = 64
PROMPT = 203
STEPS = 24
HIT = (PROMPT - 1) // BLOCK * BLOCK

Connect = Callable[..., PrefixStore]


def saved(family: str, folder: Path) -> Path:
    """Create the folder of a tiny model, with equal weights in every process."""
    return make_model(folder / family, TinyModel(Family(family), hidden=128, head_dim=32, window=WINDOW, max_tokens=2048))


def tiny(family: str, folder: Path) -> Any:
    """Load the model."""
    return AutoModelForCausalLM.from_pretrained(saved(family, folder)).eval()


def prompt(seed: int = 0, tokens: int = PROMPT, rows: int = 1) -> torch.Tensor:
    """Return random printable text as ids ``[rows, tokens]``."""
    return torch.randint(32, 127, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **how: Any) -> list[list[int]]:
    """Return a model's greedy answer, alone or with ``past_key_values``."""
    mask = torch.ones_like(ids) if mask is None else mask
    how = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": PAD, **how}
    answer: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **how)
    return answer[:, ids.shape[1] :].tolist()


def with_local_prefix(model: Any, ids: torch.Tensor, tokens: int) -> list[list[int]]:
    """Return the answer of a model that continues from the first tokens of a KV cache of its own."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    cache.crop(tokens - ids.shape[1])
    return greedy(model, ids, past_key_values=cache)


def answer(
    store: PrefixStore, ids: torch.Tensor, mask: torch.Tensor | None = None, *, shown: bool = True, **how: Any
) -> tuple[list[list[int]], int]:
    """Return an answer computed with the store, and the number of columns that were loaded.

    Waits until the answer is stored and, with ``shown``, until lookups find it: nodes publish blocks with a short delay.
    """
    with store.cache(ids, mask) as cache:
        tokens = greedy(store.model, ids, mask, past_key_values=cache, **how)
    assert store.flush(30)
    if shown:
        until_all_shown(store, cache)
    return tokens, cache.loaded_tokens


def until_all_shown(store: PrefixStore, *caches: StoredCache) -> None:
    """Wait until the index has what the caches stored."""
    assert store.flush(30)
    for cache in caches:
        for keys in cache.stored_keys:
            until_shown(store, keys)


def until_shown(store: PrefixStore, keys: list[BlockKey]) -> None:
    """Wait until the index has the blocks."""
    pause = threading.Event()
    for _ in range(600):
        if store.client.lookup(keys).hit_blocks == len(keys):
            return
        pause.wait(0.05)
    raise AssertionError("the blocks do not appear")


def padded(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of prompts, padded on the left. All are prefixes of the same text."""
    ids, mask = torch.full((len(lengths), max(lengths)), PAD), torch.zeros((len(lengths), max(lengths)), dtype=torch.long)
    for row, tokens in enumerate(lengths):
        ids[row, max(lengths) - tokens :], mask[row, max(lengths) - tokens :] = prompt(seed, max(lengths))[0, :tokens], 1
    return ids, mask


def main() -> None:
    """Answer prompts and store them: ``generate_bed.py METADATA NODE FOLDER FAMILY …``."""
    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder"):
        parser.add_argument(name)
    parser.add_argument("families", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for family in given.families:
        model = tiny(family, Path(given.folder))
        with PrefixStore.connect(model, metadata=given.metadata, node=given.node, block_tokens=BLOCK) as store:
            ids = prompt()
            with store.cache(ids) as cache:
                greedy(model, ids, past_key_values=cache)
            assert store.flush(30)
            assert store.stats()["hook_stored_blocks_total"] == (PROMPT + STEPS - 1) // BLOCK, store.stats()


if __name__ == "__main__":
    sys.exit(main())
