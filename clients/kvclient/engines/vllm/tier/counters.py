"""Counts of the tier, for vLLM's metrics endpoint."""

from __future__ import annotations

import logging

from kvclient.engines.fallbacks import LOOKUP_FAILURES, FallbackCounters

CONNECTED = "connected"
GAUGES = {CONNECTED: "1: the store answered the last lookup; 0: it did not, or the tier has no namespace."}
COUNTERS = {
    LOOKUP_FAILURES: "Lookups that the store did not answer in time: misses.",
    "load_missing_chunks": "Chunks found but not loaded: computed.",
    "store_missing_chunks": "Chunks that were not stored.",
    "load_local_path_bytes": "Bytes loaded from the DRAM of this host's node.",
    "load_prefill_path_bytes": "Bytes sent by other nodes, or read over this host's storage link by a load plan.",
    "load_decode_path_bytes": "Bytes read over the storage link of the decode host by a load plan.",
    "load_relay_path_bytes": "Bytes read over the storage links of other hosts by a load plan.",
    "reset_misses": "Chunks found but not loaded, since copies of before a reset of the cache had not ended: computed.",
    "stores_unsure": "Store jobs refused, since vLLM computed requests with and without an adapter in one step on a CPU.",
    "requests_skipped": "Requests that were neither loaded nor stored, because of adapters, unnamed media or KV of drafts.",
    "hints": "Hints about sessions, of requests that ended.",
    "hints_refused": "Hints that were invalid, or of requests whose chunks no open store keeps as a chain: ignored.",
    "labels_stored": "Labels of chunks that were stored, or stored again.",
    "labels_failed": "Labels of chunks that were not stored: routers that follow the store do not see these chunks.",
    "labels_dropped": "Runs of chunks without labels, since too many waited for them.",
    "events_retracted": "Announced chunks that were retracted although they are stored, since too many were announced.",
    "events_unconfirmed": "Announced chunks that were retracted, since no event of the store confirmed them within 10 s.",
    "events_refused": "Subscriptions to the store's events that it refused: no chunks are announced.",
    "resets": "Resets of the cache that demand that KV of earlier weights is not found.",
    "weights_epochs": "Weights epochs that began after the start, since the weights or their name changed.",
    "weights_checks_late": "Checks of the weights that not all workers answered in time.",
    "epochs_closed": "Failed resets, and epochs that could not begin: nothing is loaded or stored until a reset succeeds.",
    "bugs": "Failures that should be impossible; each is logged.",
}


def metric_name(name: str) -> str:
    """Return a count's name on vLLM's metrics endpoint."""
    return f"vllm:kvstore_tier_{name}"


class TierCounters(FallbackCounters):
    """Counts of the tier. Thread-safe, except ``take``: vLLM calls it in one thread."""

    def __init__(self) -> None:
        super().__init__(COUNTERS, logging.getLogger(__name__))
        self._taken = self.counts()
        self._told: bool | None = None

    def take(self) -> tuple[dict[str, int], bool | None]:
        """Return the counts since the last call, and whether the store answers, if that has changed."""
        before, self._taken = self._taken, self.counts()
        new = {name: count - before[name] for name, count in self._taken.items() if count != before[name]}
        told, self._told = self._told, self.connected
        return new, None if self._told == told else self._told

    def counts(self) -> dict[str, int]:
        """Return the counts since the start."""
        return super().totals()

    def totals(self) -> dict[str, int]:
        """Return the counts since the start, with ``connected``."""
        return {**self.counts(), CONNECTED: int(bool(self.connected))}
