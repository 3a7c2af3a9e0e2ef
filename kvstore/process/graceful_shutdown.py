"""Graceful shutdown of a daemon: SIGTERM or SIGINT begins it, the same signal again ends the process immediately.

A supervisor may signal a process group, and the parent may pass the signal on. So a repeated signal within ``REPEAT_S`` is
ignored.
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
REPEAT_S: Final = 1.0
"""A signal that arrives at least this long after the first of its kind ends the process immediately."""
OVERTIME_S: Final = 3.0
"""A daemon that still runs this long after the deadline of its shutdown is killed."""


def exit_now(code: int) -> None:
    """End the process without cleanup."""
    logging.shutdown()
    os._exit(code)


class SignalCounter:
    """First arrival of each signal. Called by signal handlers, in the main thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._first_s: dict[int, float] = {}

    def is_repeated(self, number: int) -> bool:
        """Record a signal. Returns whether the process must end immediately."""
        now_s = self._now_s()
        return now_s - self._first_s.setdefault(number, now_s) >= REPEAT_S


class GracefulShutdown:
    """Shutdown of a process with an event loop.

    Args:
        grace_s: time limit of the graceful shutdown.
        begin: begins the graceful shutdown; called again for later signals.
        end: ends the process immediately, with the given exit code.
    """

    def __init__(self, grace_s: float, begin: Callable[[], object], end: Callable[[int], None] = exit_now) -> None:
        self._grace_s = grace_s
        self._begin = begin
        self._end = end
        self._signals = SignalCounter()
        self._watchdog: threading.Timer | None = None

    def listen(self) -> None:
        """Install the signal handlers on the running loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def begin(self) -> None:
        """Begin the graceful shutdown, and the time limit for it."""
        if self._watchdog is None:
            self._watchdog = threading.Timer(self._grace_s + OVERTIME_S, self._on_overtime)
            self._watchdog.daemon = True
            self._watchdog.start()
        self._begin()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signals.is_repeated(number):
            log.warning("signal repeated: %s; exiting immediately", name)
            self._end(128 + number)
        elif self._watchdog is None:
            log.info("shutdown begun: %s (grace_s=%.1f)", name, self._grace_s)
        self.begin()

    def _on_overtime(self) -> None:
        """End a process that hangs. The time limit for making data durable has passed."""
        log.error("shutdown timed out: still running %.1f s after the deadline; exiting immediately", OVERTIME_S)
        self._end(0)
