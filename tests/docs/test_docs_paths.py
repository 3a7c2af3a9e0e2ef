"""Paths of the repository, and names in its files, that documents name exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_site import included

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = "kvstore|clients|proto|tests|deploy|benchmarks|scripts|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w)`")
DOCUMENTS = [REPOSITORY / "ARCHITECTURE.md", REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES = [*DOCUMENTS, *sorted((REPOSITORY / "docs").rglob("*.md"))]

MEMBERS = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w\.py)`:([^|;\n]*?)(?=`(?:{FOLDERS})/|[|;\n]|$)")
"""A file, and the text about it: up to the next path, semicolon, table cell or line."""
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")

MODULE = re.compile(r"`(\w+\.py)`")
BESIDE_CODE = sorted(path for folder in ("clients", "kvstore") for path in (REPOSITORY / folder).rglob("*.md"))
"""Pages in the folder of the code that they describe."""


def missing_paths(document: Path) -> Iterator[str]:
    for path in PATH.findall(document.read_text(encoding="utf-8")):
        if not (REPOSITORY / path).exists() and not (REPOSITORY / f"{path}.py").exists():
            yield path


def missing_names(document: Path) -> Iterator[str]:
    """Yield the names after ``file.py`:`` in a document that do not occur in that file."""
    for path, text in MEMBERS.findall(document.read_text(encoding="utf-8")):
        words = set(re.findall(r"\w+", (REPOSITORY / path).read_text(encoding="utf-8")))
        yield from (name for name in NAME.findall(text) if not words.issuperset(name.split(".")))


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


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_docs_named_path_exists(document: Path) -> None:
    assert list(missing_paths(document)) == []


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_docs_name_occurs_in_its_file(document: Path) -> None:
    assert list(missing_names(document)) == []


def test_docs_missing_name_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| `kvstore/node/table.py`: `BlockTable.claim` fetches (`_nowhere`), then `BlockTable.nowhere` |")
    assert list(missing_names(page)) == ["_nowhere", "BlockTable.nowhere"]


def test_architecture_page_is_short() -> None:
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_docs_missing_path_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`kvstore/core` and `kvstore/nowhere/gone.py`")
    assert list(missing_paths(page)) == ["kvstore/nowhere/gone.py"]


def test_readme_has_at_most_150_lines() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_directives_say_where_the_text_is() -> None:
    """Readers of the repository see the directives, not the text that the site has in their place."""
    for page in sorted(included.DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for found in included.DIRECTIVE.finditer(text):
            link = os.path.relpath(included.REPOSITORY / found["file"], page.parent)
            assert f"\nIn the repository: [{found['file']}]({link})." in found[0], page
        for line in re.findall(r"^<!-- generated: .* -->\n(.*)$", text, re.MULTILINE):
            assert line.startswith("In the repository: "), page
        assert text.count("<!-- generated: ") == len(re.findall(r"^<!-- generated: .* -->\n", text, re.MULTILINE))
