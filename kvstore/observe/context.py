"""Which request the work at hand belongs to: set where a request begins, sent along with calls, shown in log lines.

A client names each load; the name travels in gRPC metadata (``kv-request-id``). Lookups by themselves bear none: they are many
and short. Threads that work for a request are given its context (``contextvars.copy_context``).
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kvstore.observe import tracing

REQUEST_ID_KEY: Final = "kv-request-id"
_PLAUSIBLE = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Others could send anything, and it is written to logs."""

request_id: Final[ContextVar[str]] = ContextVar("kvstore_request_id", default="")
"""The request that is worked for; empty: none."""
plan_id: Final[ContextVar[str]] = ContextVar("kvstore_plan_id", default="")
"""The load plan, where there is one."""

_boot = secrets.token_hex(4)
_numbers = itertools.count(1)


def new_request_id() -> str:
    """A name that no other request has."""
    return f"{_boot}-{next(_numbers):x}"


@contextmanager
def named_request() -> Iterator[str]:
    """While inside, work is for a request: the one that it is part of, or a new one."""
    name = request_id.get()
    if name:
        yield name
        return
    token = request_id.set(name := new_request_id())
    try:
        yield name
    finally:
        request_id.reset(token)


def outgoing() -> list[tuple[str, str]] | None:
    """What a call made now takes along; None: nothing."""
    name = request_id.get()
    if not name and not tracing.on():
        return None
    metadata = [(REQUEST_ID_KEY, name)] if name else []
    tracing.inject(metadata)
    return metadata or None


def take_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Takes over the request that a call was made for, as the call's metadata says."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _PLAUSIBLE.fullmatch(value):
            request_id.set(value)
