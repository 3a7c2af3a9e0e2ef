"""Counts of the adapter, for LMCache's status, and a log line for each fallback."""

from __future__ import annotations

import logging
import threading

from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger("kvclient.engines.lmcache")

COUNTERS = {
    "stored_objects": "objects that were stored, or found stored",
    "loaded_objects": "objects that were loaded",
    "lookup_failures": "lookups that the store did not answer in time: misses",
    "load_missing_objects": "objects that were asked for and not loaded: computed",
    "store_missing_objects": "objects that were not stored",
    "tasks_refused": "tasks beyond max_pending, or after the end: they failed at once",
    "results_dropped": "results that LMCache did not fetch",
    "unknown_objects": "objects skipped because their encoding is unknown",
    "tasks_expired": "tasks whose deadline passed before they began",
    "weak_hashes": "objects skipped because their hash is too short",
    "keys_forgotten": "keys beyond max_known_keys: no longer counted or listed",
    "keys_gone": "keys that the store has evicted",
    "keys_deleted": "keys that LMCache deleted: hidden from this process",
    "listener_failures": "notifications that LMCache's listeners did not accept",
    "bugs": "failures that should be impossible",
}


class AdapterCounters:
    """Totals since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._limited = LimitedLog(_log)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count. ``name`` must be in ``COUNTERS``."""
        with self._lock:
            self._totals[name] += amount

    def failed(self, name: str, amount: int, event: str, error: object = None) -> None:
        """Count a fallback, and log it unless a line of its kind was written recently."""
        self.add(name, amount)
        self._limited.warning(f"{event} (amount=%d, error=%s)", amount, error)

    def bug(self, where: str, error: BaseException) -> None:
        """Count and log a failure that should be impossible."""
        self.add("bugs")
        self._limited.warning(f"{where} failed unexpectedly: its objects are misses (error=%r)", error)

    def totals(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._totals)
