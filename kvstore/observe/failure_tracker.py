"""What fails now: for health, which wants neither totals nor a state that changes with every try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SETTLED_S: Final = 10.0
"""A success ends a failure that is so old: on a disk that is full, one small write in ten succeeds."""
FORGOTTEN_S: Final = 60.0
"""What was not tried again for so long is not known to fail any more."""


@dataclass(frozen=True, slots=True)
class _Failure:
    began_s: float
    last_s: float
    why: str


class Failing:
    """One thing that is tried again and again. Times are of one monotonic clock. Thread-safe: its state is one reference."""

    def __init__(self) -> None:
        self._failure: _Failure | None = None

    def failed(self, now_s: float, why: object) -> None:
        """It failed."""
        known = self._now(now_s)
        self._failure = _Failure(now_s if known is None else known.began_s, now_s, str(why))

    def worked(self, now_s: float) -> None:
        """It did not."""
        known = self._failure
        if known is not None and now_s - known.last_s >= SETTLED_S:
            self._failure = None

    def over(self) -> None:
        """Nothing is left of it."""
        self._failure = None

    def why(self, now_s: float) -> str:
        """Why it failed last; empty: it does not fail now."""
        known = self._now(now_s)
        return "" if known is None else known.why

    def seconds(self, now_s: float) -> float:
        """For how long it has failed; 0: it does not fail now."""
        known = self._now(now_s)
        return 0.0 if known is None else max(now_s - known.began_s, 1e-9)

    def _now(self, now_s: float) -> _Failure | None:
        known = self._failure
        return known if known is not None and now_s - known.last_s < FORGOTTEN_S else None
