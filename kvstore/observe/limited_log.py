"""Log lines that others can cause, at most one a kind and interval: whoever misbehaves must not set the pace of our log.

Totals belong in ``Counters``, which stay exact; here only the lines are held back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 10.0


class LimitedLog:
    """Warnings of one module. Thread-safe.

    A kind is the line's format, without its arguments: kinds are as many as there are calls in the source.

    Args:
        logger: where lines go.
        interval_s: from one line of a kind to the next.
        now_s: a monotonic clock.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = INTERVAL_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when the last line was written, and how many were held back since

    def warning(self, line: str, *arguments: object) -> None:
        """Writes a warning, unless one of its kind was written a moment ago; says how many were not."""
        with self._lock:
            now_s = self._now_s()
            last_s, held_back = self._kinds.get(line, (float("-inf"), 0))
            if now_s - last_s < self._interval_s:
                self._kinds[line] = (last_s, held_back + 1)
                return
            self._kinds[line] = (now_s, 0)
        if held_back:
            line, arguments = f"{line} [%d such lines held back]", (*arguments, held_back)
        self._logger.warning(line, *arguments)
