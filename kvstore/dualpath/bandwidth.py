"""Bandwidth of a node's storage link, estimated from transfers.

The estimate is the credited bytes divided by the time in which the queue was not empty. Both decay exponentially in *busy*
time, so that idle gaps do not count and any number of parts may be in flight. A burst of reports only shifts bytes by a short
time. A prior (the configured rate, weighted like one time constant) stabilises the start. While a link is idle, its estimate
returns slowly to the configured rate, so that a link that was slow once is tried again.

A queue that makes no progress loses its weight: of the time since the last bytes, only the time that the pending bytes would
need counts. Otherwise a dead client, or one byte that is never reported, would lower the estimate for all.
"""

from __future__ import annotations

import math

from kvstore.core.errors import InvalidArgument

MEMORY_S = 0.5
"""Busy time after which a report weighs 1/e."""
RECOVERY_S = 30.0
"""Idle time after which an estimate has returned 63 % of the way to the configured rate."""
LEAST_SHARE = 1e-3
"""Floor of an estimate as a share of the configured rate: a stalled link stays comparable, and divisions stay finite."""
MOST_SHARE = 32.0
"""Upper bound of the estimate, as a multiple of the configured rate: it limits the effect of wrong reports."""


class BandwidthEstimator:
    """Estimator of one link.

    Args:
        configured: bytes/s assumed at the start.
        memory_s: time constant, in busy seconds.
        recovery_s: time constant of the return to ``configured``, in idle seconds.
    """

    __slots__ = ("_busy", "_bytes", "_idle", "_learnt", "_mark", "_since", "_waited", "configured", "memory_s", "recovery_s")

    def __init__(self, configured: float, *, memory_s: float = MEMORY_S, recovery_s: float = RECOVERY_S) -> None:
        if not (configured > 0 and math.isfinite(configured)):
            raise InvalidArgument("bandwidth must be positive", bytes_per_second=configured)
        self.configured = configured
        self.memory_s = memory_s
        self.recovery_s = recovery_s
        self._bytes = configured * memory_s
        self._busy = memory_s
        self._mark = configured  # the estimate as of the last bytes
        self._waited = 0.0  # busy time that has counted since
        self._since: float | None = None  # settled until then; None while idle
        self._idle: float | None = None  # idle since then
        self._learnt = False  # bytes have arrived

    def begin(self, now: float) -> None:
        """Record that the queue is no longer empty."""
        if self._since is None:
            rate = self.rate(now)
            self._bytes = rate * self._busy
            self._mark, self._waited = rate, 0.0
            self._since, self._idle = now, None

    def end(self, now: float) -> None:
        """Record that the queue became empty."""
        if self._since is not None:
            self.credit(0, now)
            self._since, self._idle = None, now

    def credit(self, nbytes: int, now: float, pending: float = math.inf) -> None:
        """Record bytes that arrived, and the time that passed while the queue was not empty.

        Args:
            nbytes: bytes that arrived over this link since the last call.
            now: current time.
            pending: bytes in the queue since then.
        """
        if self._since is None:
            return
        passed = now - self._since
        if passed > 0:
            self._since = now
        else:
            passed = 0.0
        if not nbytes:
            left = pending / self._mark - self._waited
            if left < passed:
                passed = left
            if passed <= 0:
                return
            self._waited += passed
        kept = math.exp(-passed / self.memory_s)
        self._busy = self._busy * kept + passed
        total, most = self._bytes * kept + nbytes, self.configured * MOST_SHARE * self._busy
        self._bytes = total if total < most else most
        if nbytes:
            self._learnt = True
            self._mark, self._waited = self.rate(now), 0.0

    def has_learnt(self, now: float) -> bool:
        """Return whether the estimate is mostly measured. After ``recovery_s`` of idle time it is mostly configured again."""
        return self._learnt and (self._idle is None or now - self._idle < self.recovery_s)

    def rate(self, now: float) -> float:
        """Return the estimate in bytes/s, greater than zero."""
        rate, least = self._bytes / self._busy, self.configured * LEAST_SHARE
        if rate < least:
            rate = least
        if self._idle is not None and now > self._idle:
            rate += (self.configured - rate) * -math.expm1(-(now - self._idle) / self.recovery_s)
        return rate
