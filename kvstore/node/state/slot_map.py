"""Blocks of a volume by where they lie, in about eight bytes each. Guarded by the table's lock.

Slots of one size do not overlap, so ``offset // size`` numbers them, and those of one span follow each other. A page holds the
blocks of ``_PAGE_SLOTS`` such numbers; pages without blocks are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.node.state.model import Block
from kvstore.tiers.contract import Slot

_PAGE_SLOTS: Final = 256
_Page = list[Block | None]


class PlaceMap:
    """Slot -> block."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], tuple[_Page, list[int]]] = {}  # by size and number; with how many blocks are on it

    def put(self, slot: Slot, block: Block) -> None:
        """A block lies in a slot from now on."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        page = self._pages.get((slot.size, number))
        if page is None:
            page = self._pages[slot.size, number] = ([None] * _PAGE_SLOTS, [0])
        blocks, count = page
        blocks[at] = block
        count[0] += 1

    def take(self, slot: Slot) -> None:
        """Nothing lies in a slot any more."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        blocks, count = self._pages[slot.size, number]
        if blocks[at] is None:
            raise KeyError(slot)
        blocks[at] = None
        count[0] -= 1
        if not count[0]:
            del self._pages[slot.size, number]

    def get(self, slot: Slot) -> Block | None:
        """The block that lies in a slot; None: none does."""
        number, at = divmod(slot.offset // slot.size, _PAGE_SLOTS)
        page = self._pages.get((slot.size, number))
        return None if page is None else page[0][at]

    def __iter__(self) -> Iterator[Block]:
        return (block for blocks, _ in self._pages.values() for block in blocks if block is not None)
