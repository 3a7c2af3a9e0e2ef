"""Admission gate of a node: whether it accepts new work. It does not while it drains, nor after shutdown begins.

A closed gate skips stores, fetches no blocks of other nodes (the caller reads them there itself) and stages nothing. It still
admits work that was promised earlier: bytes for a prompt that a caller on this host already waits for. Blocks that the node
holds are served as before.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.types import BlockKey, BlockRun, StoreOutcome
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics


class AdmissionGate:
    """The gate. Parts that begin new work check it. Its attributes are plain, each set by one thread."""

    def __init__(self, table: BlockTable, counters: Counters) -> None:
        self.draining = False
        self.stopping = False
        self._table = table
        self._counters = counters

    @property
    def closed(self) -> bool:
        """Whether the node rejects new work."""
        return self.draining or self.stopping

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
