"""The page of engines and models says what the tests have shown."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

from docs_site import models

from kvstore.lab.model_recipes import RECIPES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reference" / "models.md"


def test_models_record_is_of_the_current_recipes() -> None:
    """Else run the tests of ``tests/engines/test_vllm_models.py`` with ``--thorough --record-models``."""
    record = json.loads((PAGE.parent / "models.json").read_text(encoding="utf-8"))
    assert {name: row["recipe"] for name, row in record.items()} == {name: recipe.digest for name, recipe in RECIPES.items()}
    assert list(record) == list(RECIPES)
    assert {row["result"] for name, row in record.items() if not RECIPES[name].cannot} == {"same tokens"}


def test_engine_table_names_existing_tests() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 5
    for row in rows:
        tests = re.findall(r"`(tests/[^`]+)`", row)
        assert tests, row
        assert [path for path in tests if not (REPOSITORY / path).is_file()] == []


def test_engine_pages_begin_with_their_rows() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[0]
    rows, shown = table.splitlines()[2:], []
    for page in sorted(set(re.findall(r"\]\(\.\./(how-to/[\w-]+\.md)\)", table))):
        own = [line for line in models.engine_rows(PurePosixPath(page)).splitlines() if line.startswith("| ")][1:]
        assert own, page
        assert all(f"](../{page})" in line for line in own), "each row names its engine"
        shown += own
    assert len(shown) == len(rows)
    assert not models.engine_rows(PurePosixPath("how-to/deploy.md"))
