"""Write-back when a node stops: pending blocks first, then blocks that exist only in DRAM.

1. Pending write-backs are finished: they were promised.
2. DRAM-only blocks (write-back gave them up, or a volume evicted them) are written hottest first, by the DRAM eviction policy.
   Parents are hotter than their children, so a chain is written from its head.
3. From then on nothing is evicted from a volume to free space. A block size that finds no free slot is given up.
4. While no volume (or storage node) takes blocks, one block is tried at a time until the deadline.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.durability.requeue import fits_some, is_dram_only, requeue
from kvstore.node.durability.writeback import BATCH_BLOCKS
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable

log = logging.getLogger(__name__)

RETRY_S = 0.25
"""Pause between two attempts while no volume accepts blocks."""


def flush_on_shutdown(
    table: BlockTable, clock: Clock, deadline_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, int]:
    """Write back as many blocks as there is space for.

    Args:
        table: the node's blocks; its write-back threads run.
        clock: time.
        deadline_s: when to stop.
        sleep: pauses.

    Returns:
        Whether no block was left to write at the deadline, and how many DRAM-only blocks became durable.
    """
    if not table.wait_written(deadline_s):
        return False, 0
    table.stop_nvme_eviction()
    queue = deque(_hottest_first(table))
    if queue:
        log.warning("blocks exist only in DRAM: writing them to free slots, hottest first (blocks=%d)", len(queue))
    saved = 0
    stuck = False
    while queue:
        if clock.now_s() >= deadline_s:
            return False, saved
        if stuck:
            sleep(min(RETRY_S, max(0.0, deadline_s - clock.now_s())))
        batch = [queue.popleft() for _ in range(1 if stuck else min(BATCH_BLOCKS, len(queue)))]
        requeue(table, batch)
        if not table.wait_written(deadline_s):
            return False, saved
        saved += sum(block.durable for block in batch)
        refused = [block for block in batch if is_dram_only(block)]
        stuck = bool(refused) and not _takes_blocks(table, clock, batch)
        if stuck:
            queue.extendleft(reversed(refused))
        else:
            full = {block.nbytes for block in refused}
            queue = deque(block for block in queue if block.nbytes not in full)
    return True, saved


def _hottest_first(table: BlockTable) -> list[Block]:
    """DRAM-only blocks that fit some volume, hottest first, parents before children; those of kept namespaces first.

    The policy may leave out blocks of kept namespaces. Parents may form a ring, as clients choose the keys.
    """
    volumes = table.node_volumes
    dram_only = {
        block.key: block
        for block in sorted(table.snapshot(), key=lambda block: block.depth)
        if is_dram_only(block) and (not volumes or fits_some(block, volumes))
    }
    if not dram_only:
        return []
    coldest = dict.fromkeys(key for key in table.coldest_in_dram() if key in dram_only)
    unnamed = [key for key in dram_only if key not in coldest]
    ordered: dict[BlockKey, Block] = {}
    for key in (*unnamed, *reversed(coldest)):
        chain: list[Block] = []
        block = dram_only.get(key)
        while block is not None and block.key not in ordered:
            chain.append(block)
            block = dram_only.get(block.parent) if block.parent is not None and len(chain) < len(dram_only) else None
        ordered.update((each.key, each) for each in reversed(chain))
    return list(ordered.values())


def _takes_blocks(table: BlockTable, clock: Clock, batch: list[Block]) -> bool:
    """Whether blocks are refused for lack of space, not because all volumes that could hold them fail."""
    if any(block.durable for block in batch):
        return True
    now_s = clock.now_s()
    return any(volume.takes_changes(now_s) for volume in table.node_volumes if fits_some(batch[0], [volume]))
