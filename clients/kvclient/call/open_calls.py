"""The calls that the end of a client cancels."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

Call = TypeVar("Call")


class OpenCalls(Generic[Call]):
    """Calls that the end of a client cancels, held weakly. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # iterating over a ``WeakSet`` to which another thread adds raises
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._closed = False

    def add(self, call: Call) -> bool:
        """Add a call that begins. False: the client is closed, and nothing will cancel the call."""
        with self._lock:
            if not self._closed:
                self._calls.add(call)
            return not self._closed

    def close(self) -> list[Call]:
        """Refuse further calls. Returns those to cancel."""
        with self._lock:
            self._closed = True
            return list(self._calls)
