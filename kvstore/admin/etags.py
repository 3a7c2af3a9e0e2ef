"""Conditional changes: whoever changes something says which state it saw, so that two operators do not undo each other unseen."""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import Header

from kvstore.admin.problems import changed_meanwhile, say_which

_MOST_TAGS: Final = 32
_TAG: Final = re.compile(r'(W/)?"([^"]*)"')

IfMatch = Annotated[
    str | None,
    Header(max_length=1_024, description="the ETag of the state that is changed, or *; required", examples=['"split"']),
]


def tag_of(state: str) -> str:
    """The ETag of a state."""
    return f'"{state}"'


def check_match(if_match: str | None, current: str) -> str | None:
    """Whether a change may go on.

    Args:
        if_match: the header.
        current: the state there is.

    Returns:
        The state that must still be there when it is changed; None: any will do.

    Raises:
        Refused: there is no header (428), or it names another state (412).
    """
    if if_match is None or not if_match.strip():
        raise say_which()
    if if_match.strip() == "*":
        return None
    tags = [state for weak, state in _TAG.findall(if_match)[:_MOST_TAGS] if not weak]  # a weak tag never matches
    if current not in tags:
        raise changed_meanwhile(tag_of(current))
    return current
