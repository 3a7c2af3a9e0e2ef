"""What made the client do less than asked: counted always, logged now and then.

An engine calls the store thousands of times a second; a metadata server that is away must not fill its log. Each kind of
incident is logged at most once an interval, with the number of those that were held back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from kvstore.core.clock import Clock
from kvstore.observe.counters import Counters

_log = logging.getLogger("kvclient")


class Incidents:
    """Counters of one client, with a rate-limited log. Thread-safe."""

    def __init__(self, clock: Clock, log_interval_s: float) -> None:
        self.counters = Counters()
        self._clock = clock
        self._interval_s = log_interval_s
        self._lock = threading.Lock()
        self._held_back: dict[str, tuple[float, int]] = {}  # name: (when last logged, how many since)

    def report(self, name: str, message: str, error: BaseException | None = None, amount: int = 1) -> None:
        """Counts an incident and logs it, unless its kind was logged a moment ago."""
        self.counters.add(name, amount)
        with self._lock:
            now_s = self._clock.now_s()
            last_s, held_back = self._held_back.get(name, (float("-inf"), 0))
            if now_s - last_s < self._interval_s:
                self._held_back[name] = (last_s, held_back + 1)
                return
            self._held_back[name] = (now_s, 0)
        suffix = f": {error}" if error is not None else ""
        _log.warning("%s%s [%s; %d such lines held back]", message, suffix, name, held_back)

    def snapshot(self) -> Mapping[str, int]:
        """All totals since the client was made."""
        return self.counters.snapshot()
