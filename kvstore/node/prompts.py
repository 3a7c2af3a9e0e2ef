"""The decode side's wait for a whole prompt: its blocks come from a prefill engine, from loads over this node, or from its NVMe.

Room for the whole prompt is taken in the decode buffer before anything is pinned, all or none; then every block is pinned as
soon as it is resident, so that none leaves again while the others are on their way. What lies on this node's own NVMe is brought
in at once: nobody else will, for a prefill engine sends only what this node lacks. What is not here in time is answered as such:
the decode engine loads or recomputes it. Who leaves gives room and pins back at once: others wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.block import Block
from kvstore.node.buffers import StagingBuffer
from kvstore.node.domain import Domain
from kvstore.node.loader import Loader, Part
from kvstore.node.provider import runs_of_equal
from kvstore.node.table import BlockTable
from kvstore.node.wanted import over
from kvstore.observe.counters import Counters


class Prompts:
    """Prompts that decode engines of this host wait for. Thread-safe; ``arrive`` may be driven from any thread."""

    def __init__(self, node_id: NodeId, table: BlockTable, loader: Loader, buffer: StagingBuffer, counters: Counters) -> None:
        self._node_id = node_id
        self._table = table
        self._loader = loader
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
                self._bring(domain, keys, deadline_s)
                while left and (came := self._table.came(vigil, deadline_s)):
                    for position, block in came:
                        found[position] = block
                    left -= len(came)
            finally:
                self._table.unwatch(vigil)
            outcomes = [Outcome.HIT if block is not None else Outcome.TIMEOUT for block in found]
            fate = "complete" if not left else "left" if over() else "incomplete"
            self._counters.add(f"prompts_{fate}_total")
            yield Part(0, outcomes, found, Tier.DRAM, self._node_id)

    def _bring(self, domain: Domain, keys: Sequence[BlockKey], deadline_s: float) -> None:
        """Reads what lies on NVMe here into DRAM, where the vigil pins it."""
        durable = self._table.on_nvme(domain, keys)
        for start, stop in ((start, stop) for start, stop in runs_of_equal(durable) if durable[start]):
            for part in self._loader.load(domain, keys[start:stop], deadline_s):
                if part.tier is not Tier.DRAM:
                    self._counters.add("prompt_nvme_blocks_total", len(part.pinned()))
                self._table.unpin(part.pinned())
