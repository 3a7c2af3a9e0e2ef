"""Hints about sessions in HTTP headers. They travel to engines in ``kv_transfer_params``, as hints in bodies do.

| header | meaning |
|---|---|
| ``x-kvstore-session`` | name of the session |
| ``x-kvstore-keep-for`` | seconds for which its blocks are protected |
| ``x-kvstore-next-turn`` | seconds until its next turn is expected |
| ``x-kvstore-priority`` | 0 to 9 |
| ``x-kvstore-session-end`` | ``true``: this is the last request |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvclient.call.request_hint import DEFAULT_KEEP_S, HINT_FIELD, RequestHint
from kvstore.core.errors import InvalidArgument

SESSION: Final = "x-kvstore-session"
_KEEP, _NEXT, _PRIORITY, _END = "x-kvstore-keep-for", "x-kvstore-next-turn", "x-kvstore-priority", "x-kvstore-session-end"
_BOOLEANS: Final = {"true": True, "false": False}


def request_hint(headers: Mapping[str, str], fields: Mapping[str, Any]) -> RequestHint | None:
    """Return the hint of a request, from its headers or else from its body; None: it has none.

    Args:
        headers: of the request.
        fields: of its body.

    Raises:
        InvalidArgument: an invalid hint.
    """
    if (session := headers.get(SESSION)) is not None:
        keep_s = _number(headers, _KEEP)
        end = headers.get(_END, "false").lower()
        if end not in _BOOLEANS:
            raise InvalidArgument(f"{_END} must be true or false", got=ascii(end)[:80])
        priority = headers.get(_PRIORITY, "0")
        if not (priority.isascii() and priority.isdecimal() and len(priority) == 1):
            raise InvalidArgument(f"{_PRIORITY} must be an integer from 0 to 9", got=ascii(priority)[:80])
        return RequestHint(
            session, DEFAULT_KEEP_S if keep_s is None else keep_s, _number(headers, _NEXT), int(priority), _BOOLEANS[end]
        )
    if any(name in headers for name in (_KEEP, _NEXT, _PRIORITY, _END)):
        raise InvalidArgument(f"a hint requires the header {SESSION}")
    params = fields.get("kv_transfer_params")
    if isinstance(params, Mapping) and HINT_FIELD in params:
        return RequestHint.read(params[HINT_FIELD])
    return None


def with_hint(params: Mapping[str, Any] | None, hint: RequestHint | None) -> dict[str, Any]:
    """Return ``kv_transfer_params`` with a hint."""
    given = dict(params) if isinstance(params, Mapping) else {}
    return given if hint is None else {**given, HINT_FIELD: hint.fields()}


def _number(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        return float(text[:32])
    except ValueError:
        raise InvalidArgument(f"{name} must be a number of seconds", got=ascii(text)[:80]) from None
