"""Pauses of a server process: it or its host was stopped, so the heartbeats of that time are not processed yet.

A task runs several times per time to live. If it is much later than intended, the process was paused. Another task that is about
to judge nodes asks for a check first, because it may be the first one to run after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvstore.core.clock import BootTimeClock, Clock
from kvstore.observe.limited_log import LimitedLog

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

_PAUSES_PER_TTL: Final = 4
_CHECKS_PER_PAUSE: Final = 4
_MIN_CHECK_S: Final = 0.005


class PauseWatch:
    """Notices pauses of this process that are longer than a quarter of the time to live.

    Args:
        ttl_s: time to live of nodes.
        on_pause: called at the end of each pause, on the event loop.
        clock: counts the time while the host is suspended.
    """

    def __init__(self, ttl_s: float, on_pause: Callable[[], None], clock: Clock | None = None) -> None:
        self._shortest_s = ttl_s / _PAUSES_PER_TTL
        self._on_pause = on_pause
        self._clock = clock if clock is not None else BootTimeClock()
        self._checked_s = self._clock.now_s()

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        self._checked_s = self._clock.now_s()
        while True:
            await asyncio.sleep(max(self._shortest_s / _CHECKS_PER_PAUSE, _MIN_CHECK_S))
            self.check()

    def check(self) -> None:
        """Report a pause if the last check was too long ago."""
        now_s = self._clock.now_s()
        paused_s, self._checked_s = now_s - self._checked_s, now_s
        if paused_s > self._shortest_s:
            limited.warning("server paused: silent nodes get another time to live (paused_for_s=%.1f)", paused_s)
            self._on_pause()
