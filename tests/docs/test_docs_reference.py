"""Each name of the reference has a description, which is long enough and used once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import reference_texts

LEAST_WORDS = 4
KINDS = [
    reference_texts.settings,
    reference_texts.metrics,
    reference_texts.errors,
    reference_texts.rest,
    reference_texts.commands,
    reference_texts.calls,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_reference_description_is_long_enough(kind: Callable[[], Iterator[tuple[str, str]]]) -> None:
    described = list(kind())
    assert len(described) > 10
    assert [f"{name}: {text}" for name, text in described if len(text.split()) < LEAST_WORDS] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_reference_description_is_used_once(kind: Callable[[], Iterator[tuple[str, str]]]) -> None:
    names = defaultdict(list)
    for name, text in kind():
        names[text].append(name)
    assert [found for found in names.values() if len(found) > 1] == []
