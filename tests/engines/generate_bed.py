"""What tests of the transformers hook share: models, prompts, greedy answers; as a script, the process that stored before."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvclient.engines.transformers import PrefixStore
from kvstore.testing.tiny_models import PAD, Family, TinyModel, make_model

BLOCK = 16
WINDOW = 64
PROMPT = 203
STEPS = 24


def saved(family: str, folder: Path) -> Path:
    """Folder of a tiny model, the same in every process."""
    return make_model(folder / family, TinyModel(Family(family), hidden=128, head_dim=32, window=WINDOW, max_tokens=2048))


def tiny(family: str, folder: Path) -> Any:
    """The model itself."""
    return AutoModelForCausalLM.from_pretrained(saved(family, folder)).eval()


def prompt(seed: int = 0, tokens: int = PROMPT, rows: int = 1) -> torch.Tensor:
    """Random printable text as ids ``[rows, tokens]``."""
    return torch.randint(32, 127, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **how: Any) -> list[list[int]]:
    """What a model says by itself, or with ``past_key_values``."""
    mask = torch.ones_like(ids) if mask is None else mask
    how = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": PAD, **how}
    answer: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **how)
    return answer[:, ids.shape[1] :].tolist()


def with_local_prefix(model: Any, ids: torch.Tensor, tokens: int) -> list[list[int]]:
    """The answer of a model that kept the KV of a whole prompt, and goes on from its first tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    cache.crop(tokens - ids.shape[1])
    return greedy(model, ids, past_key_values=cache)


def main() -> None:
    """Answers prompts and stores them: ``generate_bed.py METADATA NODE FOLDER FAMILY …``."""
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
