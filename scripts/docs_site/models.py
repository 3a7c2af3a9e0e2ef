"""Tables of engines and models.

The table of models is made from the last thorough run of the tests: which models were served from the store, by which connector
of vLLM. Of the table of engines, which is written by hand, each engine's page shows the rows that link to it.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from docs_site.included import REPOSITORY
from docs_site.markdown import code, plain, table
from kvstore.lab.model_recipes import RECIPES

RECORD = REPOSITORY / "docs" / "reference" / "models.json"
"""Written by ``tests/engines/test_vllm_models.py``."""
ENGINES = REPOSITORY / "docs" / "reference" / "models.md"
"""The page with the table of engines. A row without an engine is about that of the row above."""
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


def engine_rows(page: PurePosixPath) -> str:
    """Return the rows of the table of engines that are about a page's engine; empty: none.

    Args:
        page: its path below ``docs``; in a folder beside the table's.
    """
    lines = ENGINES.read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[0].splitlines()
    about, rows = "", []
    for line in lines[2:]:
        engine = line.split("|")[1].strip()
        about = engine or about
        if f"](../{page})" in about:
            rows.append(line if engine else line.replace("| |", f"| {about} |", 1))
    if not rows:
        return ""
    legend = "*Run here*: on machines without a GPU. The models are in [engines and models](../reference/models.md)."
    return "\n".join([*lines[:2], *rows, "", legend, ""])
