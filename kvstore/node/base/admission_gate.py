"""Whether this node takes anything new. It does not while it drains, nor once it ends; what it holds it serves all the same.

Shut, it answers stores with skips, brings nothing here for anybody (the caller asks the other nodes itself) and stages nothing.
Let in is only what was promised before: bytes for a prompt that somebody here already waits for.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.types import BlockKey, BlockRun, StoreOutcome
from kvstore.node.state.grants import StoreGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics


class Gate:
    """Asked by whatever would begin something new. Plain attributes, each set by one thread."""

    def __init__(self, table: BlockTable, counters: Counters) -> None:
        self.draining = False
        self.stopping = False
        self._table = table
        self._counters = counters

    @property
    def shut(self) -> bool:
        """Whether nothing new is taken."""
        return self.draining or self.stopping

    def refuse(self, namespace: NodeNamespace, run: BlockRun) -> StoreGrant:
        """A store that gets no slots: up to the first block that is not held, EXISTS, from there on SKIPPED."""
        held = self._table.held(namespace, run.keys)
        first = held.index(False) if False in held else len(held)
        outcomes = [StoreOutcome.EXISTS] * first + [StoreOutcome.SKIPPED] * (len(held) - first)
        self._counters.add(node_metrics.STORE_SKIPPED_SHUT_BLOCKS, len(held) - first)
        return StoreGrant(namespace, run, outcomes)

    def stores_under_way(self) -> int:
        """Blocks whose slots somebody is writing to."""
        return self._table.stores_in_progress()

    def awaits(self, keys: Iterable[BlockKey]) -> bool:
        """Whether somebody here already waits for one of the keys."""
        return self._table.is_awaited(keys)
