"""Lists a page at a time. A cursor is opaque to callers: it says which list, and behind which entry the next page begins."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, Field

from kvstore.core.errors import InvalidArgument

Item = TypeVar("Item")
T = TypeVar("T")

MOST: Final = 500
USUAL: Final = 100
MAX_CURSOR: Final = 2_048

Limit = Annotated[int, Query(ge=1, le=MOST, description="entries a page")]
Cursor = Annotated[
    str | None, Query(max_length=MAX_CURSOR, description="next_cursor of the page before; not given: the first page")
]


class Page(BaseModel, Generic[Item]):
    """A part of a list."""

    items: list[Item] = Field(description="the entries")
    next_cursor: str | None = Field(description="for the next page; null: this is the last", examples=["bm9kZXMKaG9zdC0x"])


def cursor_for(which: str, last: str) -> str:
    """What the next page is asked for with.

    Args:
        which: name of the list, so that a cursor of another one is refused.
        last: what the last entry of this page is called.
    """
    return base64.urlsafe_b64encode(json.dumps([which, last]).encode()).decode().rstrip("=")


def after(which: str, cursor: str | None) -> str | None:
    """The name of the entry behind which the page begins; None: from the first.

    Raises:
        InvalidArgument: it is no cursor of this list.
    """
    if cursor is None:
        return None
    try:
        found = json.loads(base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        found = None
    match found:
        case [str(of), str(last)] if of == which:
            return last
    raise InvalidArgument("this is no cursor of this list: begin without one", field="cursor")


def page_of(
    which: str, entries: Sequence[T], name: Callable[[T], str], cursor: str | None, limit: int
) -> tuple[list[T], str | None]:
    """One page of a list that is at hand whole, in order of names; an entry that came or went meanwhile moves nothing.

    Returns:
        Its entries, and the cursor of the next one.

    Raises:
        InvalidArgument: it is no cursor of this list.
    """
    behind = after(which, cursor)
    left = sorted((entry for entry in entries if behind is None or name(entry) > behind), key=name)
    shown = left[:limit]
    return shown, cursor_for(which, name(shown[-1])) if len(left) > limit else None
