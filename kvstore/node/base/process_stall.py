"""When a process did not run: stopped, starved, on a host that stood still. Nothing inside sees it but a clock that jumps."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvstore.core.clock import Clock

BEAT_S: Final = 0.1
MISSED_S: Final = 0.1
"""A beat so late is a standstill; less is what a busy machine does."""
_KEPT: Final = 64


class Pulse:
    """A thread that does nothing but come back in time. Thread-safe; ``start`` and ``stop`` once each.

    Args:
        clock: where time comes from.
        beat_s: how often it looks.
    """

    def __init__(self, clock: Clock, beat_s: float = BEAT_S) -> None:
        self._clock = clock
        self._beat_s = beat_s
        self._stopping = threading.Event()
        self._last_s: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._thread = threading.Thread(target=self._run, name="kvstore-pulse", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._last_s = self._clock.now_s()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends it; without a start, nothing."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def stood_still(self, from_s: float, to_s: float) -> float:
        """How much of a time the process did not run, as of now: also where this is called before the thread has come back."""
        last_s = self._last_s
        gaps = list(self._gaps)
        noted = bool(gaps) and gaps[-1][0] == last_s  # by the thread, which came back meanwhile
        if last_s is not None and not noted and self._late(last_s, to_s):
            gaps.append((last_s, to_s))
        return sum(max(0.0, min(end_s, to_s) - max(begin_s + self._beat_s, from_s)) for begin_s, end_s in gaps)

    def beat(self) -> None:
        """What the thread does each time that it comes back."""
        now_s = self._clock.now_s()
        if self._last_s is not None and self._late(self._last_s, now_s):
            self._gaps.append((self._last_s, now_s))
        self._last_s = now_s

    def _late(self, last_s: float, now_s: float) -> bool:
        return now_s - last_s > self._beat_s + MISSED_S

    def _run(self) -> None:
        while not self._stopping.wait(self._beat_s):
            self.beat()
