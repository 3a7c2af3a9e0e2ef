"""Conditional requests: a change names the state that it is based on, so that two operators cannot overwrite each other."""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import Header

from kvstore.admin.problems import changed_meanwhile, missing_precondition

_MOST_TAGS: Final = 32
_TAG: Final = re.compile(r'(W/)?"([^"]*)"')

IfMatch = Annotated[
    str | None,
    Header(max_length=1_024, description="ETag of the state to change, or *; required", examples=['"split"']),
]


def tag_of(state: str) -> str:
    """The ETag of a state."""
    return f'"{state}"'


def check_match(if_match: str | None, current: str) -> str | None:
    """Check the precondition of a change.

    Args:
        if_match: ``If-Match`` header.
        current: current state.

    Returns:
        The state that the change expects; None: any state.

    Raises:
        PreconditionError: the header is missing (428) or names another state (412).
    """
    if if_match is None or not if_match.strip():
        raise missing_precondition()
    if if_match.strip() == "*":
        return None
    tags = [state for weak, state in _TAG.findall(if_match)[:_MOST_TAGS] if not weak]  # a weak tag never matches
    if current not in tags:
        raise changed_meanwhile(tag_of(current))
    return current
