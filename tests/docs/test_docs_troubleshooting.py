"""The page on troubleshooting has a cause and a remedy per symptom, and quotes messages that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "how-to" / "troubleshooting.md"
LEAST_SYMPTOMS = 20
_SPLIT_LITERAL = re.compile(r'"\s*f?"')
_VARIES = re.compile(r"'[^']*'|\[[^\]]*\]|\b[A-Z]{4,}[A-Z:]*\b|\bhost-\S+|[\d.]+|the metadata server at")
"""Parts of a quoted message that the code fills in."""


def symptoms() -> dict[str, str]:
    """Text below each symptom's heading."""
    parts = re.split(r"^### (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        heading: re.split(r"^## ", text, flags=re.MULTILINE)[0] for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.fixture(scope="module")
def code() -> str:
    """All code of the store, with string literals of several lines joined."""
    files = [path for folder in ("kvstore", "clients") for path in (REPOSITORY / folder).rglob("*.py")]
    return _SPLIT_LITERAL.sub("", "\n".join(path.read_text(encoding="utf-8") for path in files))


def unknown_fragments(heading: str, code: str) -> list[str]:
    """Fragments of the messages in a heading that the code does not have."""
    quoted = [span for span in re.findall(r"`([^`]+)`", heading) if not span.startswith(("kvstore ", "pip "))]
    fragments = [fragment.strip(" ;:,.?") for span in quoted for fragment in _VARIES.split(span)]
    return [fragment for fragment in fragments if len(fragment) > 2 and fragment not in code]


def test_troubleshooting_symptom_has_cause_and_remedy() -> None:
    found = symptoms()
    assert len(found) >= LEAST_SYMPTOMS
    for heading, text in found.items():
        assert "**Why.** " in text, heading
        assert "**What to do.** " in text, heading


@pytest.mark.parametrize("heading", symptoms())
def test_troubleshooting_message_exists(heading: str, code: str) -> None:
    assert unknown_fragments(heading, code) == []


def test_troubleshooting_unknown_message_is_detected(code: str) -> None:
    assert unknown_fragments("`port 7400 is in use` and `the moon is full`", code) == ["the moon is full"]
