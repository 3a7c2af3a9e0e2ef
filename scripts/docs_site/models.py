"""The table of models: which were served from the store, by which connector of vLLM, in the last thorough run of the tests."""

from __future__ import annotations

import json

from docs_site.included import REPOSITORY
from docs_site.markdown import code, plain, table
from kvstore.lab.model_recipes import RECIPES

RECORD = REPOSITORY / "docs" / "reference" / "models.json"
"""Written by ``tests/engines/test_vllm_models.py``."""
_HEADING = ("models", "class", "served by", "KV cache groups of the tiny model", "result on a CPU")


def pages() -> str:
    """Write one row per architecture, in the order of the recipes."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = []
    for name, recipe in RECIPES.items():
        row = record[name]
        result = f"not run: {recipe.cannot}" if recipe.cannot else f"{row['result']}, {row['hit_tokens']} of 700 tokens loaded"
        if recipe.whole_prompts:
            result += ", with AMX; without AMX vLLM computes prompts only as a whole, and nothing is loaded"
        if recipe.patch:
            result += f", with a one-line patch of vLLM: {recipe.patch}"
        groups = ", ".join(row.get("groups", ()))
        rows.append((plain(recipe.models), code(recipe.architecture), code(recipe.served_by), plain(groups), plain(result)))
    return table(_HEADING, rows)
