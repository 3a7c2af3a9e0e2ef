"""Counts of a hook that keeps KV in host memory, and a log line for each fallback."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from kvstore.observe.limited_log import LimitedLog

LOOKUP_FAILURES = "lookup_failures"
"""Count of lookups that the store did not answer. After one, the store counts as away."""


class FallbackCounters:
    """Totals since the start, and whether the store answers. Thread-safe.

    Args:
        names: of the counts; ``lookup_failures`` and ``bugs`` are among them.
        logger: destination of the lines.
    """

    def __init__(self, names: Iterable[str], logger: logging.Logger) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(names, 0)
        self._logger = logger
        self._limited = LimitedLog(logger)
        self._connected: bool | None = None

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._totals[name] += amount

    def failed(self, name: str, amount: int, event: str, cause: object = None) -> None:
        """Count a fallback, and log it unless a line of its kind was written recently.

        Args:
            name: of the count.
            amount: added to it.
            event: the failure, which is also the kind of the line.
            cause: why; None or empty: the event includes the reason.
        """
        self.add(name, amount)
        if name == LOOKUP_FAILURES:
            self.set_connected(False)
        if cause:
            self._limited.warning(f"{event} (amount=%d, cause=%s)", amount, cause)
        else:
            self._limited.warning(f"{event} (amount=%d)", amount)

    def bug(self, where: str, error: BaseException) -> None:
        """Count and log a failure that should be impossible."""
        self.add("bugs")
        self._logger.error("%s failed unexpectedly: a miss", where, exc_info=error)

    # ---- whether the store answers ----
    @property
    def connected(self) -> bool | None:
        """Whether the store answered the last lookup; None: not known yet."""
        with self._lock:
            return self._connected

    def set_connected(self, connected: bool) -> None:
        """Note whether the store answers."""
        with self._lock:
            self._connected = connected

    def answered(self) -> None:
        """Note that the store answers, and log it if it did not before."""
        with self._lock:
            before, self._connected = self._connected, True
        if before is False:
            self._limited.warning("store answers again")

    def totals(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._totals)
