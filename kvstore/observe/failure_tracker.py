"""Current failure of a repeated operation, for health reports. Health needs a stable state, not totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SETTLE_S: Final = 10.0
"""A success ends a failure only if the last error is this old: on a full disk, one small write in ten succeeds."""
FORGET_S: Final = 60.0
"""A failure ends if the operation was not tried again for this long."""


@dataclass(frozen=True, slots=True)
class _Failure:
    began_s: float
    last_s: float
    reason: str


class FailureTracker:
    """State of one operation that is tried repeatedly. Thread-safe. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._failure: _Failure | None = None

    def failed(self, now_s: float, reason: object) -> None:
        """Record a failure."""
        known = self._current(now_s)
        self._failure = _Failure(now_s if known is None else known.began_s, now_s, str(reason))

    def succeeded(self, now_s: float) -> None:
        """Record a success."""
        known = self._failure
        if known is not None and now_s - known.last_s >= SETTLE_S:
            self._failure = None

    def clear(self) -> None:
        """Forget the failure, e.g. because nothing is left to do."""
        self._failure = None

    def reason(self, now_s: float) -> str:
        """Reason of the last failure; empty: the operation does not fail now."""
        known = self._current(now_s)
        return "" if known is None else known.reason

    def seconds(self, now_s: float) -> float:
        """Duration of the failure; 0: the operation does not fail now."""
        known = self._current(now_s)
        return 0.0 if known is None else max(now_s - known.began_s, 1e-9)

    def _current(self, now_s: float) -> _Failure | None:
        known = self._failure
        return known if known is not None and now_s - known.last_s < FORGET_S else None
