"""Counters: one thread-safe registry a process.

A fallback, a drop, a quarantine: whatever makes the store do less than asked is counted, so that it can be seen. Names
follow Prometheus custom (unit or ``_total`` last) and are what ``GetStats``, ``GetNodeStats`` and the metrics endpoint show.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence


class Counters:
    """Named totals since the process started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to a total; a name appears with its first event."""
        with self._lock:
            self._totals[name] += amount

    def add_all(self, names: Sequence[str], amounts: Sequence[int]) -> None:
        """Adds to several totals at once."""
        with self._lock:
            for name, amount in zip(names, amounts, strict=True):
                self._totals[name] += amount

    def get(self, name: str) -> int:
        """One total; 0 before its first event."""
        return self._totals.get(name, 0)

    def snapshot(self) -> Mapping[str, int]:
        """All totals, as of now."""
        with self._lock:
            return dict(self._totals)
