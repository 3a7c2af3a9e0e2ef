"""What is not durable when a node ends gets another chance: whoever did not take it may do so by now.

Write-behind gives a batch up where its target fails: a storage node that is being restarted, a disk that is full for a moment.
Such blocks stay in DRAM and are not tried again while the node runs; and what is used in DRAM all the time is cold on its volume
and leaves that first. Both would end with the node. So at the end they are sent once more, until all are durable or their part
of the time is over. While nothing is taken, one block alone goes out and the others wait for its fate: each try sums the bytes
of what it sends, and an arena takes long to sum. What leaves a volume for their sake is not sent in turn: where DRAM holds more
than the volumes do, that would have no end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.block import Block
from kvstore.node.domain import Domain
from kvstore.node.table import BlockTable

log = logging.getLogger(__name__)

PAUSE_S = 0.25
"""Between tries while nothing is taken. Write-behind leaves a target that failed alone for longer: most of these cost nothing."""


def by_domain(blocks: Iterable[Block]) -> list[tuple[Domain, list[BlockKey]]]:
    """Keys of blocks, namespace by namespace, parents before their children."""
    found: dict[Domain, list[BlockKey]] = {}  # one object a namespace
    for block in sorted(blocks, key=lambda one: one.depth):
        found.setdefault(block.domain, []).append(block.key)
    return list(found.items())


def make_durable(
    table: BlockTable, clock: Clock, deadline_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, int]:
    """Waits until what was stored is durable; what was given up is sent again.

    Args:
        table: what the node holds; it writes behind.
        clock: time.
        deadline_s: when it is over.
        sleep: pauses.

    Returns:
        Whether all was written or given up in time, and how many blocks were sent again and became durable.
    """
    won, stuck = 0, False
    if not table.wait_written(deadline_s):
        return False, 0
    meant = {block.key for block in table.snapshot() if _can_be_saved(block)}
    while True:
        left = [block for block in table.snapshot() if block.key in meant and _can_be_saved(block)]
        if not left or clock.now_s() >= deadline_s:
            return True, won
        tried = left
        if stuck:
            sleep(min(PAUSE_S, max(0.0, deadline_s - clock.now_s())))
            tried = [min(left, key=lambda block: block.depth)]
        elif not won:
            log.warning("%d blocks lie in DRAM only, given up before or gone from their volume: they are sent again", len(left))
        for domain, keys in by_domain(tried):
            table.write_again(domain, keys)
        if not table.wait_written(deadline_s):
            break
        taken = {block.key for block in tried if block.durable}
        meant -= taken
        won += len(taken)
        stuck = not taken
    return False, won


def _can_be_saved(block: Block) -> bool:
    """Whether it would be lost with this process, and write-behind takes it."""
    return block.ours and not block.durable and block.dram is not None and block.nvme is None
