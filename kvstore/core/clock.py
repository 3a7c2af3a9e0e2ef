"""Time as a value that is passed in, so that tests own it."""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    """Monotonic seconds. On one host all processes read the same clock, so deadlines may be compared across them."""

    def now_s(self) -> float:
        """Seconds since an arbitrary, fixed point."""


class MonotonicClock:
    """The host's ``CLOCK_MONOTONIC``."""

    now_s = staticmethod(time.monotonic)


class BootTimeClock:
    """The host's ``CLOCK_BOOTTIME``, which also counts the time while the host is suspended; without it, the monotonic clock."""

    _ID: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def now_s(self) -> float:
        return time.clock_gettime(self._ID)


class ManualClock:
    """A clock that moves only when told: for tests."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        self._now_s += seconds
