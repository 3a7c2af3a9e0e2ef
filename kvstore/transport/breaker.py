"""A circuit breaker: after repeated failures, fail fast for a short time instead of letting every caller wait again. Pure."""

from __future__ import annotations

import threading

from kvstore.core.clock import Clock


class CircuitBreaker:
    """Counts failures in a row. Thread-safe.

    Closed: all calls pass. After ``failures`` in a row it opens: calls are refused for ``open_s``. Then one call passes as a
    trial (others are still refused, again for ``open_s``); its success closes the breaker, its failure opens it again.
    """

    def __init__(self, clock: Clock, *, failures: int = 3, open_s: float = 1.0) -> None:
        self._clock = clock
        self._limit = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s: float | None = None

    def allow(self) -> bool:
        """Whether a call may be tried now. A True from an open breaker is the trial."""
        with self._lock:
            if self._open_until_s is None:
                return True
            now_s = self._clock.now_s()
            if now_s < self._open_until_s:
                return False
            self._open_until_s = now_s + self._open_s
            return True

    def succeeded(self) -> None:
        """A call went well."""
        with self._lock:
            self._failures = 0
            self._open_until_s = None

    def failed(self) -> bool:
        """A call failed. True: this failure opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return False
            opened = self._open_until_s is None
            self._open_until_s = self._clock.now_s() + self._open_s
            return opened
