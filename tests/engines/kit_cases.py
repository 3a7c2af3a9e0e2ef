"""Chooses cases of the connector suite that ordinary runs include."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import pytest

from kvstore.testing.connector.suite import ConnectorSuite

Suite = TypeVar("Suite", bound=type[ConnectorSuite])
UNIQUE = {
    "test_engine_killed_during_store_leaves_no_wrong_block",
    "test_wrong_bytes_in_memory_are_recomputed",
    "test_seeded_faults_during_store_and_load",
}
"""Cases that the hooks' own tests do not have."""


def unique_cases_only(suite: Suite) -> Suite:
    """Class decorator: leave all cases except ``UNIQUE`` to ``--thorough``."""
    for name in dir(suite):
        if name.startswith("test_") and name not in UNIQUE:
            setattr(suite, name, pytest.mark.thorough(_copy(getattr(suite, name))))
    return suite


def _copy(case: Callable[..., None]) -> Callable[..., None]:
    """Return a new function, so that a mark on it does not apply to other suites."""

    @wraps(case)
    def run(*given: Any, **named: Any) -> None:
        case(*given, **named)

    return run
