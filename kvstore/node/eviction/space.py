"""Space on one volume for slots of one size. Called under the table's lock.

1. The coldest blocks are evicted in the order of the policy until slots are free. Blocks of other sizes that are colder are
   evicted with them. Their slots help only once a whole span is empty, so the search passes at most ``OTHERS_LIMIT`` of them.
2. If that gives no space, or costs more per slot, the coldest span (or run of spans, for a large slot) is emptied: the one of
   whose blocks the search has passed the largest fraction. Descendants of its blocks are evicted with them, on any
   volume. A span is skipped if one of these blocks may not be evicted.
3. If only a span gives space, those with few descendants (``MOST_LEAVING``) come first: in mixed chains, all descendants of a
   span can be most of the volume.

A caller that needs more space asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final

from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Evictable, EvictionPolicy, Slot, Volume

_PAGE_SLOTS: Final = 256
_Page = list[Block | None]


class SlotMap:
    """Blocks of a volume by slot, in about eight bytes per block. Guarded by the table's lock.

    Slots of one size do not overlap, so ``offset // size`` numbers them, and slots of one span have consecutive numbers. A page
    holds the blocks of ``_PAGE_SLOTS`` numbers; pages without blocks are dropped.
    """

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


PLAN_LIMIT = 65_536
"""Maximum number of blocks that one search visits."""
OTHERS_LIMIT = 2_048
"""Maximum number of blocks of other sizes among those."""
SPANS_LIMIT = 1_024
"""Maximum number of spans that one search examines."""
WARM = 2
"""Cost of evicting a block that is not among the coldest, relative to one that is."""
MOST_LEAVING = 3
"""Maximum number of blocks to evict for a span, as a multiple of its own. It does not apply if no span meets it."""


class SpaceReclaimer:
    """One volume's blocks by slot, and the search for blocks to evict.

    Args:
        volume: the volume.
        blocks: the table's, by key.
        policy: the order of eviction.
    """

    def __init__(self, volume: Volume, blocks: Mapping[BlockKey, Block], policy: EvictionPolicy) -> None:
        self._volume = volume
        self._blocks = blocks
        self._policy = policy
        self.by_slot = SlotMap()
        self.held: dict[NodeNamespace, int] = {}
        """Number of blocks of each namespace on this volume."""

    def insert(self, block: Block, slot: Slot) -> None:
        """Insert a block that is in a slot of the volume now."""
        self.by_slot.put(slot, block)
        held, namespace = self.held, block.namespace
        held[namespace] = held.get(namespace, 0) + 1

    def remove(self, block: Block, slot: Slot) -> None:
        """Remove a block that has left the volume."""
        self.by_slot.take(slot)
        self.held[block.namespace] -= 1

    def victims(
        self,
        shape: BlockShape,
        counts: Sequence[int],
        order: Iterator[Block],
        slot_of: Callable[[Block], Slot | None],
        may_leave: Callable[[BlockKey], Evictable],
    ) -> list[Block]:
        """Return blocks to evict for a number of slots, or for some; children before parents. Empty: no space can be freed.

        Args:
            shape: of the new blocks.
            counts: numbers of slots, by preference.
            order: evictable blocks, coldest first, children before parents.
            slot_of: a block's slot on this volume; None if it is on another volume, from which it is evicted too.
            may_leave: whether a block may be evicted: the rule of ``order``.
        """
        coldest = _few_of_others(order, shape.block_bytes)
        met: list[Block] = []
        prefix: list[Block] = []
        for count in counts:
            again, met = met, []
            plan = self._volume.plan_eviction(shape, count, _slots(chain(again, coldest), slot_of, met), PLAN_LIMIT)
            if plan:
                prefix = [*(block for block in met if slot_of(block) is None), *map(self._blocks.__getitem__, plan)]
                break
        others_bytes = sum(block.nbytes for block in met if block.nbytes != shape.block_bytes)
        if prefix and others_bytes <= counts[-1] * shape.block_bytes:
            return prefix
        cold = [slot for block in met if (slot := slot_of(block)) is not None]
        span = self.coldest_span(shape, may_leave, cold, (PLAN_LIMIT,) if prefix else (MOST_LEAVING, PLAN_LIMIT))
        if not prefix or not span:
            return prefix or span
        passed = {block.key for block in met}
        cost = sum(block.nbytes * (1 if block.key in passed else WARM) for block in span)
        freed = sum(slot.size for block in span if (slot := slot_of(block)) is not None)
        slots = min(count, max(1, freed // shape.block_bytes))
        return span if cost / slots < others_bytes / count else prefix

    def coldest_span(
        self,
        shape: BlockShape,
        may_leave: Callable[[BlockKey], Evictable],
        cold: Sequence[Slot] = (),
        limits: Sequence[int] = (MOST_LEAVING, PLAN_LIMIT),
    ) -> list[Block]:
        """Return the blocks of the coldest span that can be emptied, and their descendants. Empty: none can be.

        Args:
            shape: of the new block.
            may_leave: whether a block may be evicted.
            cold: slots of the coldest blocks.
            limits: maximum numbers of blocks to evict, as multiples of a span's own; each is tried after the one before.
        """
        visited = limit = 0
        in_use = False  # a slot, by a reader or writer

        def leaves(key: BlockKey) -> bool:
            nonlocal visited
            visited += 1
            return visited <= limit and bool(may_leave(key))

        def held(slots: Sequence[Slot]) -> Iterator[BlockKey]:
            nonlocal in_use
            for slot in slots:
                block = self.by_slot.get(slot)
                if block is None:
                    in_use = True
                    return
                yield block.key

        for most in limits:
            visited = 0
            for slots in islice(self._volume.coldest_spans(shape, cold), SPANS_LIMIT):
                limit = min(PLAN_LIMIT, visited + most * len(slots))
                in_use = False
                found = self._policy.with_descendants(held(slots), leaves)
                if found and not in_use:
                    return [self._blocks[key] for key in found]
                if visited > PLAN_LIMIT:
                    break
        return []

    def is_shut_out(self, shape: BlockShape) -> bool:
        """Whether a block size has no slot on this volume, and protected blocks are there, which may occupy every span.

        Protected are blocks of kept namespaces, and those that hints protect.
        """
        here = [namespace for namespace, blocks in self.held.items() if blocks]
        has_protected = any(each.kept or each.hinted for each in here)
        return has_protected and all(each.shape.block_bytes != shape.block_bytes for each in here)

    def coldest_protected_span(self, shape: BlockShape, may_leave: Callable[[Block], bool]) -> list[Block]:
        """Return the result of ``coldest_span`` without regard to hints. If it is empty, disregard kept namespaces too."""
        blocks = self._blocks
        return self.coldest_span(
            shape, lambda key: not blocks[key].namespace.kept and may_leave(blocks[key])
        ) or self.coldest_span(shape, lambda key: may_leave(blocks[key]))


def _few_of_others(order: Iterator[Block], nbytes: int) -> Iterator[Block]:
    """Yield blocks of an order, until more than ``OTHERS_LIMIT`` have another size."""
    others = 0
    for block in order:
        if block.nbytes != nbytes:
            others += 1
            if others > OTHERS_LIMIT:
                return
        yield block


def _slots(order: Iterator[Block], slot_of: Callable[[Block], Slot | None], met: list[Block]) -> Iterator[tuple[BlockKey, Slot]]:
    """Yield keys and slots of blocks on a volume. Appends all visited blocks to ``met``."""
    for block in order:
        met.append(block)
        slot = slot_of(block)
        if slot is not None:
            yield block.key, slot
