"""A log that writes at most one warning per kind and interval, so that clients and peers cannot fill it.

Totals belong in ``Counters``, which stay exact; only log lines are suppressed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.observe.counters import Counters
from kvstore.observe.metrics import Event

INTERVAL_S: Final = 10.0
_QUIET_INTERVALS: Final = 6
"""After this many first intervals without a line of a kind, a grown interval is the first one again."""


@dataclass(slots=True)
class _Kind:
    """Lines of one kind: times of the last written and of the last wanted one, present interval, lines suppressed since."""

    written_s: float
    wanted_s: float
    interval_s: float
    suppressed: int = 0


class LimitedLog:
    """Rate-limited warnings of one module or one client. Thread-safe.

    Args:
        logger: destination of the lines.
        interval_s: minimum time between two lines of one kind.
        now_s: a monotonic clock.
        counters: registry for ``report``; None: a new one.
        most_interval_s: while lines of a kind recur, each interval is twice the last one, up to this. After six times
            ``interval_s`` without a line of the kind, the interval is ``interval_s`` again. None: the interval does not grow.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        now_s: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
        most_interval_s: float | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._logger = logger
        self._interval_s = interval_s
        self._most_interval_s = interval_s if most_interval_s is None else most_interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def warning(self, line: str, *arguments: object, cause: str = "") -> None:
        """Write a warning with the number of lines suppressed before it, unless one of its kind was written recently.

        The kind is ``line`` without its arguments, with ``cause``, which has few values.
        """
        suppressed = self._next(f"{line} {cause}")
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
            known = self._kinds.get(kind)
            if known is None:
                self._kinds[kind] = _Kind(now_s, now_s, self._interval_s)
                return 0
            is_over = now_s - known.wanted_s >= min(_QUIET_INTERVALS * self._interval_s, self._most_interval_s)
            known.wanted_s = now_s
            if not is_over and now_s - known.written_s < known.interval_s:
                known.suppressed += 1
                return None
            known.interval_s = self._interval_s if is_over else min(2 * known.interval_s, self._most_interval_s)
            suppressed, known.suppressed, known.written_s = known.suppressed, 0, now_s
            return suppressed
