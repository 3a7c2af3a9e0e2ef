"""What both kinds of timed engine share: a modelled processor, and a voice."""

from __future__ import annotations

import json
import threading
import time
from typing import IO


class Processor:
    """Something that computes one thing at a time, in order of arrival, in modelled time.

    Work that waited begins, in the model, when the work before it ended, not when its thread woke: late sleeps do not add up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.busy_s = 0.0
        self.late_s = 0.0
        """By how much sleeps ended late, added up."""

    def run(self, seconds: float, ready_s: float) -> float:
        """Computes; ``ready_s``: when what it takes was there. Returns when it ended in the model, at about that time."""
        with self._lock:
            end_s = max(self._free_s, ready_s) + seconds
            self._free_s = end_s
            self.busy_s += seconds
        sleep_until(end_s)
        self.late_s += max(0.0, time.monotonic() - end_s)
        return end_s


class Speaker:
    """Writes events as JSON lines, from any thread."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._lock = threading.Lock()

    def say(self, **event: object) -> None:
        """One event."""
        line = json.dumps(event)
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()


def sleep_until(due_s: float) -> None:
    """Of the monotonic clock; at once where that is past."""
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
