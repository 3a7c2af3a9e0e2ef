"""A namespace's time to live: blocks that nobody stored or loaded for so long leave this node, with all below them.

Whoever uses a block uses what is before it in its chain: a block leaves once neither it nor anything below it here was used for
that long. So chains leave from their ends and stay prefixes. Kept for namespaces with a time to live alone, from when it was
set, or the node was started: what was there before counts as used then.
"""

from __future__ import annotations

from typing import Final

from kvstore.core.types import BlockKey
from kvstore.node.state.eviction_orders import TtlOrder
from kvstore.node.state.model import Block
from kvstore.node.state.residency import Residency

MOST_EXPIRED: Final = 1_024
"""Blocks that leave at a time: so long the table's lock is held."""


def expired(residency: Residency, order: TtlOrder) -> list[Block]:
    """Blocks whose time is over and that nobody uses, children first, ``MOST_EXPIRED`` at most. Under the table's lock.

    Those on volumes are marked as leaving.
    """
    if order.entering:
        return []
    blocks, used_s, now_s = residency.blocks, order.used_s, residency.clock.now_s()
    over_s = now_s - order.ttl_s
    fresh = False

    def may_leave(key: BlockKey) -> bool:
        nonlocal fresh
        if used_s[key] > over_s:
            fresh = True  # and so is all that comes after it: the order is that of use
            return True
        block = blocks[key]
        return residency.is_idle(block) and (block.nvme_volume is None or block.nvme_volume.takes_changes(now_s))

    found: list[Block] = []
    for key in order.policy.coldest(may_leave):
        if fresh or len(found) >= MOST_EXPIRED:
            break
        found.append(blocks[key])
    residency.mark_evicting(block for block in found if block.nvme is not None)
    return found
