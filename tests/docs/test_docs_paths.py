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

MODULE = re.compile(r"`(\w+\.py)`")
BESIDE_CODE = sorted(path for folder in ("clients", "kvstore") for path in (REPOSITORY / folder).rglob("*.md"))
"""Pages in the folder of the code that they describe."""


def missing_paths(document: Path) -> Iterator[str]:
    for path in PATH.findall(document.read_text(encoding="utf-8")):
        if not (REPOSITORY / path).exists() and not (REPOSITORY / f"{path}.py").exists():
            yield path


def missing_modules(document: Path) -> Iterator[str]:
    """Yield the Python files that a page beside code names without a folder, and that are not below its folder."""
    for name in MODULE.findall(document.read_text(encoding="utf-8")):
        if not any(document.parent.rglob(name)):
            yield name


@pytest.mark.parametrize("document", BESIDE_CODE, ids=lambda path: path.parent.name)
def test_docs_named_module_exists(document: Path) -> None:
    assert list(missing_modules(document)) == []


def test_docs_missing_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").touch()
    page = tmp_path / "README.md"
    page.write_text("`here.py` and `gone.py`")
    assert list(missing_modules(page)) == ["gone.py"]


@pytest.mark.parametrize("document", [*DOCUMENTS, *sorted((REPOSITORY / "docs").rglob("*.md"))], ids=lambda path: path.name)
def test_docs_named_path_exists(document: Path) -> None:
    assert list(missing_paths(document)) == []


def test_architecture_page_is_short() -> None:
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_docs_missing_path_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`kvstore/core` and `kvstore/nowhere/gone.py`")
    assert list(missing_paths(page)) == ["kvstore/nowhere/gone.py"]


def test_readme_has_at_most_150_lines() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
