"""Latencies in bounded memory: a histogram whose buckets are 2 % wide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

_WIDTH: Final = math.log(1.02)
_LEAST_S: Final = 1e-7


class LatencyHistogram:
    """Counts durations by buckets that grow by 2 %, so that a percentile is known to 1 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._longest_s = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        """Count durations."""
        for one in seconds:
            self._counts[round(math.log(max(one, _LEAST_S)) / _WIDTH)] += 1
            self._longest_s = max(self._longest_s, one)

    @property
    def count(self) -> int:
        """Durations counted."""
        return self._counts.total()

    def percentile_ms(self, percent: float) -> float | None:
        """Percentile in milliseconds; None: nothing was counted."""
        if not self._counts:
            return None
        wanted = self.count * percent / 100
        seen = 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return round(1000 * min(math.exp(bucket * _WIDTH), self._longest_s), 3)
        return round(1000 * self._longest_s, 3)

    def to_json(self) -> dict[str, float | None]:
        """p50, p99 and the longest, in milliseconds."""
        longest = round(1000 * self._longest_s, 3) if self._counts else None
        return {"p50": self.percentile_ms(50), "p99": self.percentile_ms(99), "max": longest}
