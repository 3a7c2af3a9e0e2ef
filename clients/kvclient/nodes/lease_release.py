"""When leases that nobody reads any more go back to their node."""

from __future__ import annotations

import math

QUIET_S = 0.005
"""So long after the last lease that was done with, no other is coming: the load waits, perhaps for this very room."""
LONGEST_S = 0.05
"""No lease that is done with is kept for longer, however many come."""


class ReturnTimes:
    """Says when what has gathered is to be sent. Not thread-safe.

    A call for each lease would take time from the loads; but whatever is kept here keeps blocks in the arena, and their ancestors
    with them, which in a small arena may be all there is: no load must wait for room that leases keep which it has done with.
    So they go once they hold ``most_bytes``, and else as soon as no others come, at the latest after ``LONGEST_S``.

    Args:
        most_bytes: of blocks that may be kept, over all loads of the session.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._first_s = self._last_s = math.inf
        self._nbytes = 0
        self._urgent = False

    def added(self, now_s: float, nbytes: int, *, urgent: bool) -> None:
        """Something to send has come, which holds so many bytes in the arena; ``urgent``: it may not wait for company."""
        if self._first_s == math.inf:
            self._first_s = now_s
        self._last_s = now_s
        self._nbytes += nbytes
        self._urgent |= urgent or self._nbytes >= self._most_bytes

    def left_s(self, now_s: float) -> float:
        """Seconds until what has gathered is to be sent: 0 or less: now; infinity: there is nothing."""
        if self._urgent:
            return 0.0
        return min(self._last_s + QUIET_S, self._first_s + LONGEST_S) - now_s

    def sent(self) -> None:
        """What had gathered was taken to be sent."""
        self._first_s = self._last_s = math.inf
        self._nbytes = 0
        self._urgent = False
