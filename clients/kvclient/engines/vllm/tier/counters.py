"""Counts of the tier, for vLLM's metrics endpoint, and a log line for each fallback."""

from __future__ import annotations

import logging
import threading

from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger(__name__)

CONNECTED = "connected"
GAUGES = {CONNECTED: "1: the store answered the last lookup; 0: it did not, or the tier has no namespace."}
COUNTERS = {
    "lookup_failures": "Lookups that the store did not answer in time: misses.",
    "load_missing_chunks": "Chunks found but not loaded: computed.",
    "store_missing_chunks": "Chunks that were not stored.",
    "load_local_path_bytes": "Bytes loaded from the DRAM of this host's node.",
    "load_prefill_path_bytes": "Bytes sent by other nodes, or read over this host's storage link by a load plan.",
    "load_decode_path_bytes": "Bytes read over the storage link of the decode host by a load plan.",
    "load_relay_path_bytes": "Bytes read over the storage links of other hosts by a load plan.",
    "requests_skipped": "Requests that were neither loaded nor stored, because they use an adapter.",
    "labels_stored": "Labels of chunks that were stored, or stored again.",
    "labels_failed": "Labels of chunks that were not stored: routers that follow the store do not see these chunks.",
    "labels_dropped": "Runs of chunks without labels, since too many waited for them.",
    "events_retracted": "Announced chunks that were retracted although they are stored, since too many were announced.",
    "events_unconfirmed": "Announced chunks that were retracted, since no event of the store confirmed them within 10 s.",
    "events_refused": "Subscriptions to the store's events that it refused: no chunks are announced.",
    "resets": "Resets of the cache: a new weights epoch began.",
    "bugs": "Failures that should be impossible; each is logged.",
}


def metric_name(name: str) -> str:
    """Return a count's name on vLLM's metrics endpoint."""
    return f"vllm:kvstore_tier_{name}"


class TierCounters:
    """Counts since the last ``take``, and totals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, int] = {}
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._limited = LimitedLog(_log)
        self._connected: bool | None = None
        self._told: bool | None = None

    def add(self, name: str, more: int = 1) -> None:
        """Add to a count. ``name`` must be in ``COUNTERS``."""
        with self._lock:
            self._totals[name] += more
            self._new[name] = self._new.get(name, 0) + more

    def failed(self, name: str, amount: int, event: str, error: BaseException | None = None) -> None:
        """Count a fallback, and log it unless a line of its kind was written recently."""
        self.add(name, amount)
        if name == "lookup_failures":
            self.set_connected(False)
        self._limited.warning(f"{event} (amount=%d, error=%s)", amount, error)

    def bug(self, where: str, error: BaseException) -> None:
        """Count and log a failure that should be impossible."""
        self.add("bugs")
        _log.error("%s failed: chunks are misses", where, exc_info=error)

    def answered(self) -> None:
        """Note that the store answers, and log it if it did not before."""
        if self._connected is False:
            self._limited.warning("store answers again")
        self.set_connected(True)

    def set_connected(self, connected: bool) -> None:
        """Note whether the store answers."""
        with self._lock:
            self._connected = connected

    def take(self) -> tuple[dict[str, int], bool | None]:
        """Return the counts since the last call, and whether the store answers, if that has changed."""
        with self._lock:
            taken, self._new = self._new, {}
            connected = None if self._connected == self._told else self._connected
            self._told = self._connected
            return taken, connected

    def totals(self) -> dict[str, int]:
        """Return the counts since the start."""
        with self._lock:
            return {**self._totals, CONNECTED: int(bool(self._connected))}
