"""Turns among the processes of a host: pinning holds locks of the driver, and every call of every process waits for them."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)

TURN_S = 10.0
"""Longer than all ranks of a host take for one chunk each. A process that stops during its turn delays the others by this."""
_FORGIVE_S = 60.0
"""After a missed turn, turns are not waited for during this time."""
_NAP_S = 0.002


class HostLock:
    """Turns of all processes that map one file: a record lock on the file, which ends with its process.

    If another descriptor of the file is closed in this process, the kernel ends the turn early. That costs time only.

    Args:
        descriptor: of the file, open as long as turns are taken; None: no other process maps the memory.
        counters: counts turns that did not come in time.
    """

    def __init__(self, descriptor: int | None, counters: Counters) -> None:
        self._descriptor = descriptor
        self._counters = counters
        self._missed_s = -_FORGIVE_S
        """When a turn did not come in time."""

    @contextmanager
    def turn(self, *, unless: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn. After ``TURN_S``, or if the file cannot be locked, go on without it.

        Args:
            unless: ends the wait.
        """
        taken = self._descriptor is not None and self._wait(self._descriptor, unless)
        try:
            yield
        finally:
            if taken and self._descriptor is not None:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _wait(self, descriptor: int, unless: Callable[[], bool]) -> bool:
        now_s = time.monotonic()
        until_s = now_s + (TURN_S if now_s - self._missed_s >= _FORGIVE_S else 0.0)
        while not unless():
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process has its turn
                if time.monotonic() > until_s:
                    return self._miss("another process held the lock too long")
                time.sleep(_NAP_S)
            except OSError as error:
                return self._miss(str(error))
            else:
                return True
        return False

    def _miss(self, reason: str) -> bool:
        self._missed_s = time.monotonic()
        self._counters.add(device_metrics.DEVICE_PIN_TURNS_MISSED)
        _log.info(
            "pinning not serialized: it continues beside other processes (reason=%s, counter=device_pin_turns_missed)", reason
        )
        return False
