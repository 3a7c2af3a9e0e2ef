"""The registry of health codes."""

from __future__ import annotations

import re

import pytest

from kvstore.health.codes import CODES, HealthCode, Severity, code_named


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: str(code.name))
def test_code_has_name_and_complete_sentences(code: HealthCode) -> None:
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", code.name)
    assert not code.title.endswith(".")
    for text in (code.meaning, code.action):
        assert text[0].isupper() or text.startswith("`")
        assert text.endswith(".")
    assert code.docs == f"docs/reference/health/{code.name.lower().replace('_', '-')}.md"


def test_code_of_other_version_is_a_warning() -> None:
    assert code_named("NODE_HUNG") is CODES["NODE_HUNG"]
    assert code_named("FROM_THE_FUTURE").severity is Severity.WARNING
    assert code_named("evil\x1b[1m").name == "UNKNOWN"
