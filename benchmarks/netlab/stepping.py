"""Shared parts of both timed engines: a modelled processor and an event writer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import IO


class Processor:
    """Something that computes one thing at a time, in order of arrival, in modelled time: all steps of it that can be done.

    Work that waited begins, in the model, when the work before it ended, not when its thread woke: late sleeps do not add up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.busy_s = 0.0
        self.idle_s = 0.0
        """Between its first work and its last, with nothing to compute."""
        self.late_s = 0.0
        """By how much sleeps ended late, added up."""

    def run(self, seconds: float, ready_s: float, steps: int = 1) -> Iterator[float]:
        """Computes ``steps`` steps of this many seconds each without a break.

        Args:
            seconds: of each step.
            ready_s: time at which their input was ready.
            steps: how many.

        Yields:
            When each ended in the model, at about that time.
        """
        with self._lock:
            begin_s = max(self._free_s, ready_s)
            self.idle_s += begin_s - self._free_s if self._free_s else 0.0
            self._free_s = begin_s + seconds * steps
            self.busy_s += seconds * steps
        for step in range(1, steps + 1):
            end_s = begin_s + seconds * step
            sleep_until(end_s)
            self.late_s += max(0.0, time.monotonic() - end_s)
            yield end_s


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
