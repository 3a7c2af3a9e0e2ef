"""Which blocks are written below together, where they are written only when they must leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.core.types import BlockKey
from kvstore.node.state.model import Block


def with_parents(
    blocks: Mapping[BlockKey, Block], leaves: Sequence[Block], idle: Callable[[Block], bool], limit: int
) -> list[Block]:
    """Leaves, each followed by those above it that must be written below before they may leave, at most ``limit`` in all.

    Policies yield leaves, and a parent only once its children may leave: a chain would be written one block at a time.

    Args:
        blocks: all that the table has.
        leaves: those that a policy yielded and that may not leave yet, coldest first.
        idle: whether nobody uses a block.
        limit: how many are enough.
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
