"""Bandwidth of a node's storage link, learnt from real transfers.

Bytes that were credited over the time in which the queue was not empty, both forgotten exponentially in *busy* time: so idle gaps
do not count, any number of parts may be in flight, and a burst of reports only moves bytes between neighbouring moments. A prior
(the configured rate, worth one time constant) makes the start smooth. While a link is idle its estimate returns slowly to the
configured rate: a link that was slow once is tried again, instead of being avoided for ever.
"""

from __future__ import annotations

import math

from kvstore.core.errors import InvalidArgument

MEMORY_S = 0.5
"""Busy time after which a report weighs 1/e."""
RECOVERY_S = 30.0
"""Idle time after which an estimate has come back 63 % of the way to the configured rate."""
LEAST_SHARE = 1e-3
"""Floor of an estimate as a share of the configured rate: a stalled link stays comparable, and divisions stay finite."""


class BandwidthEstimator:
    """One link.

    Args:
        configured: bytes/s assumed at the start.
        memory_s: time constant, in busy seconds.
        recovery_s: time constant of the return to ``configured``, in idle seconds.
    """

    __slots__ = ("_busy", "_bytes", "_idle", "_since", "configured", "memory_s", "recovery_s")

    def __init__(self, configured: float, *, memory_s: float = MEMORY_S, recovery_s: float = RECOVERY_S) -> None:
        if not (configured > 0 and math.isfinite(configured)):
            raise InvalidArgument("bandwidth must be positive", bytes_per_second=configured)
        self.configured = configured
        self.memory_s = memory_s
        self.recovery_s = recovery_s
        self._bytes = configured * memory_s
        self._busy = memory_s
        self._since: float | None = None  # settled until then; None while idle
        self._idle: float | None = None  # idle since then

    def begin(self, now: float) -> None:
        """The queue is no longer empty."""
        if self._since is None:
            rate = self.rate(now)
            self._bytes = rate * self._busy
            self._since, self._idle = now, None

    def end(self, now: float) -> None:
        """The queue is empty."""
        if self._since is not None:
            self.credit(0, now)
            self._since, self._idle = None, now

    def credit(self, nbytes: int, now: float) -> None:
        """Bytes that arrived over this link since the last call; time passes while the queue is not empty."""
        if self._since is None:
            return
        passed = max(0.0, now - self._since)
        self._since = max(now, self._since)
        kept = math.exp(-passed / self.memory_s)
        self._bytes = self._bytes * kept + nbytes
        self._busy = self._busy * kept + passed

    def rate(self, now: float) -> float:
        """Estimate in bytes/s, greater than zero."""
        rate = max(self._bytes / self._busy, self.configured * LEAST_SHARE)
        if self._idle is not None and now > self._idle:
            rate += (self.configured - rate) * -math.expm1(-(now - self._idle) / self.recovery_s)
        return rate
