"""Blocks of a volume by slot, in about eight bytes per block. Guarded by the table's lock.

Slots of one size do not overlap, so ``offset // size`` numbers them, and slots of one span have consecutive numbers. A page
holds the blocks of ``_PAGE_SLOTS`` numbers; pages without blocks are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.node.state.model import Block
from kvstore.tiers.contract import Slot

_PAGE_SLOTS: Final = 256
_Page = list[Block | None]


class SlotMap:
    """Map from slot to block."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], tuple[_Page, list[int]]] = {}  # by slot size and page number: blocks, and their count

    def put(self, slot: Slot, block: Block) -> None:
        """Insert a block."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        page = self._pages.get((slot.size, number))
        if page is None:
            page = self._pages[slot.size, number] = ([None] * _PAGE_SLOTS, [0])
        blocks, count = page
        blocks[at] = block
        count[0] += 1

    def take(self, slot: Slot) -> None:
        """Remove the block of a slot."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        blocks, count = self._pages[slot.size, number]
        if blocks[at] is None:
            raise KeyError(slot)
        blocks[at] = None
        count[0] -= 1
        if not count[0]:
            del self._pages[slot.size, number]

    def get(self, slot: Slot) -> Block | None:
        """The block of a slot, or None."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        page = self._pages.get((slot.size, number))
        return None if page is None else page[0][at]

    def __iter__(self) -> Iterator[Block]:
        return (block for blocks, _ in self._pages.values() for block in blocks if block is not None)
