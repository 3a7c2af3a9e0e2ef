"""How a daemon is told to end: SIGTERM or SIGINT, in order; the same signal again, at once.

A process group and the parent that started it may both be told to end, and the parent passes it on: what comes twice within a
moment is one wish.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
AGAIN_S: Final = 1.0
"""A signal that comes so long after the first of its kind means: at once."""
LATE_S: Final = 3.0
"""A daemon that has not ended so long after its deadline is ended where it stands."""


def exit_now(code: int) -> None:
    """Ends the process, with nothing cleaned up."""
    logging.shutdown()
    os._exit(code)


class Wishes:
    """Signals that have come. Called by handlers, in the main thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._first_s: dict[int, float] = {}

    def at_once(self, number: int) -> bool:
        """A signal has come: whether it means that the process is to end at once."""
        now_s = self._now_s()
        return now_s - self._first_s.setdefault(number, now_s) >= AGAIN_S


class Leaving:
    """Of one process with an event loop.

    Args:
        grace_s: how long its end in order may take.
        leave: begins that end; also called for later signals.
        at_once: ends the process, with the exit code given.
    """

    def __init__(self, grace_s: float, leave: Callable[[], object], at_once: Callable[[int], None] = exit_now) -> None:
        self._grace_s = grace_s
        self._leave = leave
        self._at_once = at_once
        self._wishes = Wishes()
        self._late: threading.Timer | None = None

    def listen(self) -> None:
        """Takes the signals over, on the running loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def begin(self) -> None:
        """The end in order begins, for whatever reason; it is bounded from now on."""
        if self._late is None:
            self._late = threading.Timer(self._grace_s + LATE_S, self._too_late)
            self._late.daemon = True
            self._late.start()
        self._leave()

    def _on_signal(self, number: int) -> None:
        if self._wishes.at_once(number):
            log.warning("told to end once more (%s): ending at once", signal.Signals(number).name)
            self._at_once(128 + number)
        elif self._late is None:
            log.info("told to end (%s): within %.1f s", signal.Signals(number).name, self._grace_s)
        self.begin()

    def _too_late(self) -> None:
        """What hangs is given up: what was to be made durable in time is, the rest had its deadline."""
        log.error("not ended %.1f s after its deadline: ended where it stands", LATE_S)
        self._at_once(0)
