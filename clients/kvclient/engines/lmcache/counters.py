"""Counts of the adapter, for LMCache's status."""

from __future__ import annotations

import logging

from kvclient.engines.fallbacks import LOOKUP_FAILURES, FallbackCounters

COUNTERS = {
    "stored_objects": "objects that were stored, or found stored",
    "loaded_objects": "objects that were loaded",
    LOOKUP_FAILURES: "lookups that the store did not answer in time: misses",
    "objects_refused": "objects that were not looked up: no such object can be stored, or the adapter is closed",
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
    "namespaces_closed": "models and layouts whose connection was closed for others: opened again when they are used",
    "listener_failures": "notifications that LMCache's listeners did not accept",
    "bugs": "failures that should be impossible",
}


class AdapterCounters(FallbackCounters):
    """Counts of one adapter. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(COUNTERS, logging.getLogger(__name__))
