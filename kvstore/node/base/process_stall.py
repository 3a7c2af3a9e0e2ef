"""Detection of times in which the process did not run: stopped by a signal, starved of CPU, or on a suspended host."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvstore.core.clock import Clock

INTERVAL_S: Final = 0.1
TOLERANCE_S: Final = 0.1
"""A wake-up that is later than this is a stall. Less is usual on a busy machine."""
WINDOW_S: Final = 60.0
"""``recent_s`` returns the stalls of this time."""


class ProcessStallDetector:
    """A thread that measures how late it wakes up. ``start`` and ``stop`` once each.

    Args:
        clock: time.
        interval_s: time between two wake-ups.
    """

    def __init__(self, clock: Clock, interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._last_s = clock.now_s()
        self.stalled_s = 0.0
        """Total time in which the process did not run."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=int(WINDOW_S / INTERVAL_S))
        """When each of the last stalls ended, and its length."""
        self._thread = threading.Thread(target=self._run, name="kvstore-stall-detector", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._last_s = self._clock.now_s()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread and wait for it. No effect without ``start``."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Measure the time since the last wake-up."""
        now_s = self._clock.now_s()
        late_s = now_s - self._last_s - self._interval_s
        if late_s > TOLERANCE_S:
            self.stalled_s += late_s
            self._recent.append((now_s, late_s))
        self._last_s = now_s

    def recent_s(self) -> list[float]:
        """Return the lengths of the stalls that ended within the last minute, in seconds."""
        since_s = self._clock.now_s() - WINDOW_S
        return [late_s for ended_s, late_s in list(self._recent) if ended_s > since_s]

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.wake()
