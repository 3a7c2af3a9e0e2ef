"""Id of the request that the current task or thread works for.

A client creates an id for each load and sends it in gRPC metadata (``kv-request-id``); log lines and traces have it. Lookups have
none, because they are many and short. Threads that work for a request run in a copy of its context.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kvstore.observe import tracing

REQUEST_ID_KEY: Final = "kv-request-id"
_PLAUSIBLE = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Other ids are ignored: the id is written to logs."""

request_id: Final[ContextVar[str]] = ContextVar("kvstore_request_id", default="")
"""Id of the current request; empty: none."""
plan_id: Final[ContextVar[str]] = ContextVar("kvstore_plan_id", default="")
"""Id of the current load plan; empty: none."""


class _RequestIds:
    """Request ids of this process. Without a new prefix after a fork, parent and child would give the same ids."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers):x}"


_ids = _RequestIds()


def new_request_id() -> str:
    """A unique request id."""
    return _ids.next()


@contextmanager
def named_request() -> Iterator[str]:
    """Work for the current request, or for a new one if there is none."""
    name = request_id.get()
    if name:
        yield name
        return
    token = request_id.set(name := new_request_id())
    try:
        yield name
    finally:
        request_id.reset(token)


def inject() -> list[tuple[str, str]] | None:
    """Metadata with the request id and the trace for an outgoing call; None: neither is set."""
    name = request_id.get()
    if not name and not tracing.on():
        return None
    metadata = [(REQUEST_ID_KEY, name)] if name else []
    tracing.inject(metadata)
    return metadata or None


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Set the current request id from the metadata of an incoming call."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _PLAUSIBLE.fullmatch(value):
            request_id.set(value)
