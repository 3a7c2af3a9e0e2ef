"""A circuit breaker: after repeated failures, fail fast for a short time instead of letting every caller wait again. Pure."""

from __future__ import annotations

import threading

from kvstore.core.clock import Clock


class CircuitBreaker:
    """Counts consecutive failures. Thread-safe.

    Closed: all calls pass. After ``failures`` consecutive failures the breaker opens and refuses calls for ``open_s`` seconds.
    Then one call passes as a trial, and all others are refused for another ``open_s``. If the trial succeeds, the breaker
    closes. If it fails, the breaker opens again.

    Args:
        clock: source of time.
        failures: consecutive failures that open the breaker.
        open_s: seconds between a failure and the next trial.
    """

    def __init__(self, clock: Clock, *, failures: int = 3, open_s: float = 1.0) -> None:
        self._clock = clock
        self._limit = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s: float | None = None

    def allow(self) -> bool:
        """Return whether a call may be tried now. True from an open breaker means: this call is the trial."""
        with self._lock:
            if self._open_until_s is None:
                return True
            now_s = self._clock.now_s()
            if now_s < self._open_until_s:
                return False
            self._open_until_s = now_s + self._open_s
            return True

    def succeeded(self) -> None:
        """Record a success and close the breaker."""
        with self._lock:
            self._failures = 0
            self._open_until_s = None

    def failed(self) -> bool:
        """Record a failure. Return whether this failure opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return False
            opened = self._open_until_s is None
            self._open_until_s = self._clock.now_s() + self._open_s
            return opened
