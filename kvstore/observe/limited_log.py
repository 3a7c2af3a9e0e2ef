"""A log that writes at most one warning per kind and interval, so that clients and peers cannot fill it.

Totals belong in ``Counters``, which stay exact; only log lines are suppressed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore.observe.counters import Counters
from kvstore.observe.metrics import Event

INTERVAL_S: Final = 10.0


class LimitedLog:
    """Rate-limited warnings of one module or one client. Thread-safe.

    Args:
        logger: destination of the lines.
        interval_s: minimum time between two lines of one kind.
        now_s: a monotonic clock.
        counters: registry for ``report``; None: a new one.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        now_s: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._logger = logger
        self._interval_s = interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # time of the last line, number of lines suppressed since

    def warning(self, line: str, *arguments: object) -> None:
        """Write a warning with the number of lines suppressed before it, unless one of its kind was written recently.

        The kind is ``line`` without its arguments.
        """
        suppressed = self._next(line)
        if suppressed is None:
            return
        if suppressed:
            line, arguments = f"{line} (suppressed=%d)", (*arguments, suppressed)
        self._logger.warning(line, *arguments, stacklevel=2)

    def report(self, counter: Event, message: str, error: BaseException | None = None, amount: int = 1) -> None:
        """Count a failure, and write a warning unless one for the same counter was written recently.

        Args:
            counter: name of the counter, which is the kind of the line.
            message: the event.
            error: the cause, if there is one.
            amount: added to the counter.
        """
        self.counters.add(counter, amount)
        suppressed = self._next(counter)
        if suppressed is not None:
            cause = f": {error}" if error is not None else ""
            self._logger.warning("%s%s (counter=%s, suppressed=%d)", message, cause, counter, suppressed, stacklevel=2)

    def _next(self, kind: str) -> int | None:
        """Return the number of lines of a kind suppressed since the last one, or None if this one must be suppressed too."""
        with self._lock:
            now_s = self._now_s()
            last_s, suppressed = self._kinds.get(kind, (float("-inf"), 0))
            if now_s - last_s < self._interval_s:
                self._kinds[kind] = (last_s, suppressed + 1)
                return None
            self._kinds[kind] = (now_s, 0)
            return suppressed
