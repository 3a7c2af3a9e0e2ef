"""Rows of the volumes' eviction policy, kept in the blocks: a second dict of keys would double the memory of the table.

A policy also knows keys that are not in the table (parents of blocks on volumes): a dict here has their rows. Guarded by the
table's lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.core.types import BlockKey
from kvstore.node.state.model import Block


class BlockRows:
    """See ``kvstore.tiers.contract.Rows``.

    Args:
        blocks: the table's, by key.
    """

    __slots__ = ("_blocks", "_of_absent")

    def __init__(self, blocks: Mapping[BlockKey, Block]) -> None:
        self._blocks = blocks
        self._of_absent: dict[BlockKey, int] = {}

    def get(self, key: BlockKey, default: int, /) -> int:
        """The row of a key, or ``default``."""
        block = self._blocks.get(key)
        if block is not None and block.row:
            return block.row
        return self._of_absent.get(key, default)

    def __setitem__(self, key: BlockKey, row: int, /) -> None:
        block = self._blocks.get(key)
        if block is None:
            self._of_absent[key] = row
        else:
            block.row = row

    def __delitem__(self, key: BlockKey, /) -> None:
        if self._of_absent.pop(key, None) is None:
            self._blocks[key].row = 0

    def keep(self, block: Block) -> None:
        """Keep the row of a block that leaves the table, if it has one."""
        if block.row:
            self._of_absent[block.key], block.row = block.row, 0
