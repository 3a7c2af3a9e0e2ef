"""A namespace's time to live: blocks that nobody stored or loaded for so long leave this node, with all below them.

Whoever uses a block uses what is before it in its chain: a block leaves once neither it nor anything below it here was used for
that long. So chains leave from their ends and stay prefixes. Kept for namespaces with a time to live alone, from when it was
set, or the node was started: what was there before counts as used then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.eviction.quotas import EvictionOrder
from kvstore.tiers.eviction.policy import LruPolicy

if TYPE_CHECKING:
    from kvstore.node.state.model import Block
    from kvstore.node.table import BlockTable

MOST_EXPIRED: Final = 1_024
"""Blocks that leave at a time: so long the table's lock is held."""


class TtlOrder(EvictionOrder):
    """A namespace's blocks, whatever tier they lie in, by their last use. Guarded by the table's lock."""

    __slots__ = ("_clock", "ttl_s", "used_s")

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        super().__init__(LruPolicy())
        self._clock = clock
        self.ttl_s = ttl_s
        self.used_s: dict[BlockKey, float] = {}

    def insert(self, block: Block) -> None:
        """A block has come to a tier."""
        if block.key not in self.keys:
            super().insert(block)
            self.used_s[block.key] = self._clock.now_s()

    def remove(self, block: Block) -> None:
        """A block is about to leave a tier; it stays known while it lies in the other one."""
        if block.dram is None or block.nvme is None:
            super().remove(block)
            self.used_s.pop(block.key, None)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were used."""
        super().touch(keys)
        now_s = self._clock.now_s()
        self.used_s.update((key, now_s) for key in keys if key in self.keys)


def expired(table: BlockTable, order: TtlOrder) -> list[Block]:
    """Blocks whose time is over and that nobody uses, children first, ``MOST_EXPIRED`` at most. Under the table's lock.

    Those on volumes are marked as leaving.
    """
    if order.entering:
        return []
    blocks, used_s, now_s = table._blocks, order.used_s, table._clock.now_s()
    over_s = now_s - order.ttl_s
    fresh = False

    def may_leave(key: BlockKey) -> bool:
        nonlocal fresh
        if used_s[key] > over_s:
            fresh = True  # and so is all that comes after it: the order is that of use
            return True
        block = blocks[key]
        return table._idle(block) and (block.nvme_volume is None or block.nvme_volume.takes_changes(now_s))

    found: list[Block] = []
    for key in order.policy.coldest(may_leave):
        if fresh or len(found) >= MOST_EXPIRED:
            break
        found.append(blocks[key])
    for block in found:
        if block.nvme is not None:
            block.leave()
    return found
