"""The pages of the engine's block pool that the connector pins until they have been read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvclient.engines.vllm.scheduler.contracts import BlockPool

FREES_WAIT_S = 0.5
"""Time for which the engine waits for pages before it preempts a request. It begins again with each page that becomes free."""


class PinnedPages:
    """Pins of stores and handoffs. Called by one thread.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pins: Counter[int] = Counter()
        """By page: how often it is pinned."""
        self._waits_since_s: float | None = None

    def pin(self, pool: BlockPool, blocks: Sequence[Any]) -> None:
        """Pin blocks of the pool."""
        pool.touch(blocks)
        self._pins.update(block.block_id for block in blocks)

    def unpin(self, pool: BlockPool, blocks: Sequence[Any]) -> None:
        """Unpin blocks. The last ones of a chain are evicted first."""
        for block in blocks:
            if block.ref_cnt == self._pins[block.block_id] == 1:
                self._waits_since_s = None
            self._pins[block.block_id] -= 1
            if not self._pins[block.block_id]:
                del self._pins[block.block_id]
        pool.free_blocks(reversed(blocks))

    def frees_soon(self, pool: BlockPool) -> bool:
        """Whether the engine should wait for pages rather than preempt a request, because only pins hold some of them.

        Pages of running requests are not free once they are unpinned. The wait is bounded, since a store may take seconds.
        """
        if not any(pool.blocks[page].ref_cnt == pins for page, pins in self._pins.items()):
            self._waits_since_s = None
            return False
        now_s = self._clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return now_s - self._waits_since_s < FREES_WAIT_S
