"""The documentation has a page for each health code, made from the registry."""

from __future__ import annotations

from write_health_pages import FOLDER, pages


def test_pages_equal_the_registry() -> None:
    written = dict(pages())
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"run scripts/write_health_pages.py: {path.name} differs"
    assert set(FOLDER.glob("*.md")) == written.keys()
