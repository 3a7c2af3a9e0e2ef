"""Paths of the repository that documents name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = "kvstore|clients|proto|tests|deploy|benchmarks|scripts|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w)`")
DOCUMENTS = [REPOSITORY / "ARCHITECTURE.md", REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]


def missing_paths(document: Path) -> Iterator[str]:
    for path in PATH.findall(document.read_text(encoding="utf-8")):
        if not (REPOSITORY / path).exists() and not (REPOSITORY / f"{path}.py").exists():
            yield path


@pytest.mark.parametrize("document", [*DOCUMENTS, *sorted((REPOSITORY / "docs").rglob("*.md"))], ids=lambda path: path.name)
def test_docs_named_path_exists(document: Path) -> None:
    assert list(missing_paths(document)) == []


def test_architecture_page_is_short() -> None:
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_docs_missing_path_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`kvstore/core` and `kvstore/nowhere/gone.py`")
    assert list(missing_paths(page)) == ["kvstore/nowhere/gone.py"]
