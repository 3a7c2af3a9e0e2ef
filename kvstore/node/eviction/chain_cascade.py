"""Choice of dirty blocks that are written back together, for tables that write blocks only when they are evicted.

Used by pools in device memory. A node writes blocks back as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.core.types import BlockKey
from kvstore.node.state.model import Block


def with_parents(
    blocks: Mapping[BlockKey, Block], leaves: Sequence[Block], idle: Callable[[Block], bool], limit: int
) -> list[Block]:
    """Return leaves, each followed by its dirty ancestors, at most ``limit`` blocks in all.

    Policies yield a parent only after its children, so a chain would otherwise be written one block at a time.

    Args:
        blocks: all blocks of the table.
        leaves: dirty blocks that a policy yielded, coldest first.
        idle: whether a block is neither pinned nor in transfer.
        limit: maximum number of blocks to return.
    """
    found: dict[BlockKey, Block] = {}
    for leaf in leaves:
        block: Block | None = leaf
        while block is not None and block.key not in found and block.dram is not None and len(found) < limit:
            if block.clean or block.namespace is not leaf.namespace or not idle(block):
                break
            found[block.key] = block
            block = blocks.get(block.parent) if block.parent is not None else None
    return list(found.values())
