"""Time to live of a namespace: blocks unused for that long are evicted with all blocks below them.

A use of a block is a use of all blocks before it in its chain. A block expires once neither it nor a descendant was used for the
time to live, so chains expire from their ends and stay prefixes. Uses are tracked only for namespaces with a time to live, from
when it was set or the node started; blocks that exist then count as used at that moment.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import Final

from kvstore.core.types import BlockKey
from kvstore.node.state.eviction_orders import TtlOrder
from kvstore.node.state.model import Block
from kvstore.node.state.residency import Residency

MOST_EXPIRED: Final = 1_024
"""Blocks expired under one hold of the table's lock."""


def mark_expired(residency: Residency, order: TtlOrder) -> list[Block]:
    """Return expired idle blocks, children first, at most ``MOST_EXPIRED``. Those on volumes are marked as evicting.

    Called under the table's lock.
    """
    if order.entering:
        return []
    blocks, used_s, now_s = residency.blocks, order.used_s, residency.clock.now_s()
    over_s = now_s - order.ttl_s

    def may_leave(key: BlockKey) -> bool:
        block = blocks[key]
        is_fresh = used_s[key] > over_s  # it is yielded, and ends the search: the order is by last use
        return is_fresh or (residency.is_idle(block) and (block.nvme_volume is None or block.nvme_volume.takes_changes(now_s)))

    over = takewhile(lambda key: used_s[key] <= over_s, order.policy.coldest(may_leave))
    found = [blocks[key] for key in islice(over, MOST_EXPIRED)]
    residency.mark_evicting(block for block in found if block.nvme is not None)
    return found
