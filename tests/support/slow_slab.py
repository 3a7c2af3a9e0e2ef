"""A volume of which some blocks are read only when the test allows it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.core.types import BlockKey, Outcome
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab

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
