"""A volume of which some blocks are read only when the test allows it, and a node with such a volume."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, Outcome, Tier
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from support.node_harness import MIB, NodeHarness

WAIT_S = 20.0


class SlowSlab(NvmeSlab):
    """A volume that does not read some blocks before ``gate`` opens. The test sets ``gate``."""

    slow: frozenset[BlockKey] = frozenset()
    gate: threading.Event
    waiting = False
    """Whether a read waits for the gate."""
    blocks_read = 0

    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        self.blocks_read += len(items)
        if any(record.key in self.slow for _, record, _ in items):
            self.waiting = True
            self.gate.wait(WAIT_S)
        return super().read_with_checksums(items)


class SlowNode(NodeHarness):
    """A node with chains on its volume, and nothing in DRAM.

    Args:
        folder: of the volume.
        blocks: of each chain.
        chains: names of the chains.
    """

    def __init__(self, folder: Path, blocks: int, chains: Sequence[str] = ("chain",)) -> None:
        super().__init__(folder, volumes=[MIB], policy="reuse-distance", clock=MonotonicClock(), slab=SlowSlab)
        (slab,) = self.slabs
        assert isinstance(slab, SlowSlab)
        self.slab = slab
        self.slab.gate = threading.Event()
        self.chain, *self.others = (self.store_durably(name, blocks) for name in chains)
        assert evict_tier(self.table, Tier.DRAM) == blocks * len(chains)

    def close(self) -> None:
        self.slab.gate.set()
        super().close()
