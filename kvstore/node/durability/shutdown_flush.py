"""Write-back when a node stops: pending blocks first, then blocks that exist only in DRAM, hottest first.

From then on nothing is evicted from a volume. A block size that finds no free slot is given up. While no volume (or storage node)
takes blocks, one block is tried at a time until the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count, islice

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.durability.writeback import BATCH_BLOCKS
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable

log = logging.getLogger(__name__)

RETRY_S = 0.25
"""Pause between two attempts while no volume accepts blocks."""
ORDER_SLICE = 256
ORDER_TRIES = 4
HAND_OVER_S = 1e-5
"""Pause between two holds of the table's lock, so that a waiting thread gets it."""


def flush_on_shutdown(
    table: BlockTable, clock: Clock, deadline_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, int]:
    """Write back as many blocks as there is space for, while the write-back threads run.

    Returns:
        Whether no block was left to write at the deadline, and how many DRAM-only blocks became durable.
    """
    if not table.wait_written(deadline_s):
        return False, 0
    with table.residency.lock:
        table.residency.evicts_nvme = False
    if queue := _hottest_first(table):
        log.warning("blocks exist only in DRAM: writing them to free slots, hottest first (blocks=%d)", len(queue))
    saved, stuck = 0, False
    while queue and clock.now_s() < deadline_s:
        if stuck:
            sleep(max(0.0, min(RETRY_S, deadline_s - clock.now_s())))
        batch = queue[: 1 if stuck else BATCH_BLOCKS]
        table.requeue_writeback(sorted(batch, key=lambda block: block.namespace_id))  # write-back takes one namespace at a time
        if not table.wait_written(deadline_s):
            break
        saved += sum(block.durable for block in batch)
        refused = {block.nbytes for block in batch if block.only_in_dram}
        accepted = any(block.durable for block in batch) or any(one.takes_changes(clock.now_s()) for one in table.node_volumes)
        stuck = bool(refused) and not accepted
        if not stuck:
            queue = [block for block in queue[len(batch) :] if block.nbytes not in refused]
    return not queue, saved


def _hottest_first(table: BlockTable) -> list[Block]:
    """Blocks that exist only in DRAM: those of kept namespaces, then hottest first, parents before children."""
    blocks = sorted((block for block in table.snapshot() if block.only_in_dram), key=lambda block: block.depth)
    heat = heat_in_dram(table) if blocks else {}
    most = max(heat.values(), default=0) + 1
    for block in reversed(blocks):
        least = heat.setdefault(block.key, most)
        if block.parent is not None and block.parent in heat:  # a parent is as hot as its hottest child
            heat[block.parent] = max(heat[block.parent], least)
    return sorted(blocks, key=lambda block: -heat[block.key])


def heat_in_dram(table: BlockTable) -> dict[BlockKey, int]:
    """Number the keys in DRAM by the policy's order, the coldest first.

    Those of kept namespaces, and blocks that hints protect, may be left out. The lock is held for ``ORDER_SLICE`` keys at a time.
    If the order changes in between, except by uses, it is read again. After ``ORDER_TRIES`` attempts it is returned incomplete.
    """
    lock, evictor = table.residency.lock, table.residency.arena_evictor
    heat: dict[BlockKey, int] = {}
    for _ in range(ORDER_TRIES):
        heat, numbers = {}, count()
        with lock:
            order, version = evictor.evictable_keys(), evictor.version
        while True:
            with lock:
                if evictor.version != version:
                    break
                part = list(islice(order, ORDER_SLICE))
            heat.update(zip(part, numbers, strict=False))
            if len(part) < ORDER_SLICE:
                return heat
            time.sleep(HAND_OVER_S)
    return heat
