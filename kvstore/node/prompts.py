"""The decode side's wait for a whole prompt: its blocks come from a prefill engine, from loads over this node, or from both.

Room for the whole prompt is taken in the decode buffer before anything is pinned, all or none; then every block is pinned as
soon as it is resident, so that none leaves again while the others are on their way. What is not here in time is answered as such:
the decode engine loads or recomputes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.block import Block
from kvstore.node.buffers import StagingBuffer
from kvstore.node.domain import Domain
from kvstore.node.loader import Part
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters


class Prompts:
    """Prompts that decode engines of this host wait for. Thread-safe; ``arrive`` may be driven from any thread."""

    def __init__(self, node_id: NodeId, table: BlockTable, buffer: StagingBuffer, counters: Counters) -> None:
        self._node_id = node_id
        self._table = table
        self._buffer = buffer
        self._counters = counters

    def arrive(self, domain: Domain, keys: Sequence[BlockKey], deadline_s: float) -> Iterator[Part]:
        """Yields the prompt's blocks, once all are resident or the deadline has passed. Their pins are the caller's.

        Nothing is yielded before, so that the time in which the caller must have copied begins when it can.
        """
        with self._buffer.room(len(keys) * domain.shape.block_bytes, deadline_s) as admitted:
            if not admitted:
                yield Part(0, [Outcome.NO_ROOM] * len(keys), [None] * len(keys), Tier.DRAM, self._node_id)
                return
            found: list[Block | None] = [None] * len(keys)
            left = len(keys)
            vigil = self._table.watch(domain, keys)
            try:
                while left and (came := self._table.came(vigil, deadline_s)):
                    for position, block in came:
                        found[position] = block
                    left -= len(came)
            finally:
                self._table.unwatch(vigil)
            outcomes = [Outcome.HIT if block is not None else Outcome.TIMEOUT for block in found]
            self._counters.add("prompts_incomplete_total" if left else "prompts_complete_total")
            yield Part(0, outcomes, found, Tier.DRAM, self._node_id)
