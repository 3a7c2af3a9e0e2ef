"""Pagination of lists. A cursor is opaque to callers; it contains the list's name and the last entry of the page."""

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

Limit = Annotated[int, Query(ge=1, le=MOST, description="entries per page")]
Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR, description="next_cursor of the previous page; unset: first page")]


class Page(BaseModel, Generic[Item]):
    """A page of a list."""

    items: list[Item] = Field(description="entries of the page")
    next_cursor: str | None = Field(
        description="cursor of the next page; null: this is the last page", examples=["bm9kZXMKaG9zdC0x"]
    )


def cursor_for(which: str, last: str) -> str:
    """The cursor of the page after an entry.

    Args:
        which: name of the list; a cursor is valid for one list only.
        last: name of the last entry of this page.
    """
    return base64.urlsafe_b64encode(json.dumps([which, last]).encode()).decode().rstrip("=")


def after(which: str, cursor: str | None) -> str | None:
    """The entry after which the page begins; None: first page.

    Raises:
        InvalidArgument: the cursor is invalid for this list.
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
    raise InvalidArgument("invalid cursor for this list; start without a cursor", field="cursor")


def page_of(
    which: str, entries: Sequence[T], name: Callable[[T], str], cursor: str | None, limit: int
) -> tuple[list[T], str | None]:
    """One page of a complete list, by name. Entries that appear or vanish between pages do not shift others.

    Returns:
        Its entries, and the cursor of the next one.

    Raises:
        InvalidArgument: the cursor is invalid for this list.
    """
    behind = after(which, cursor)
    left = sorted((entry for entry in entries if behind is None or name(entry) > behind), key=name)
    shown = left[:limit]
    return shown, cursor_for(which, name(shown[-1])) if len(left) > limit else None
