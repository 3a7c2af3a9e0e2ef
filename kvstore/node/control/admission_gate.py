"""Admission gate of a node: whether it accepts new work. It does not while it drains, nor after shutdown begins.

A closed gate skips stores, fetches no blocks of other nodes (the caller reads them there itself) and stages nothing. It still
admits work that was promised earlier: bytes for a prompt that a caller on this host already waits for. Blocks that the node
holds are served as before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvstore.core.types import BlockKey, BlockRun, StoreOutcome
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics


class AdmissionGate:
    """The gate. Parts that begin new work check it. Thread-safe."""

    def __init__(self, table: BlockTable, counters: Counters) -> None:
        self.closed = False
        """Whether the node rejects new work."""
        self._draining = False
        self._stopping = False
        self._lock = threading.Lock()
        self._table = table
        self._counters = counters

    def set_draining(self, draining: bool) -> None:
        """Close the gate while the node drains, or open it again unless the node stops."""
        with self._lock:
            self._draining = draining
            self.closed = draining or self._stopping

    def stop(self) -> None:
        """Close the gate for good."""
        with self._lock:
            self._stopping = self.closed = True

    def reject(self, namespace: NodeNamespace, run: BlockRun) -> SlotGrant:
        """Return a store without slots: EXISTS up to the first block that is not held, SKIPPED from there on."""
        found = self._table.find(namespace, run.keys)
        skipped = len(found) - found.index(None) if None in found else 0
        outcomes = [StoreOutcome.EXISTS] * (len(found) - skipped) + [StoreOutcome.SKIPPED] * skipped
        self._counters.add(node_metrics.STORE_SKIPPED_CLOSED_BLOCKS, skipped)
        return SlotGrant(namespace, run, outcomes)

    def stores_under_way(self) -> int:
        """Blocks whose slots a writer may be writing to."""
        return len(self._table.residency.preparing)

    def awaits(self, keys: Iterable[BlockKey]) -> bool:
        """Whether a caller on this host already waits for one of the keys."""
        return any(key in self._table.residency.waiters for key in keys)
