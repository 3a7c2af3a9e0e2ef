"""Space on one volume for slots of one size. Called under the table's lock.

Among blocks of one size, the coldest are evicted in the order of the policy until slots are free. If blocks of other sizes are
colder, their slots help only once a whole span is empty, which can take nearly all blocks if chains are mixed. So the search
looks at no more than ``LOOK`` of those. If that gives no space, or costs more, one span (or as many adjacent slots as one new
slot needs) is emptied: its blocks are evicted with their descendants on any volume, and nothing else. It is the span for which
the least is evicted; blocks that are not among the coldest count twice. A caller that needs more space asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf

from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.slot_map import SlotMap
from kvstore.tiers.contract import EvictionPolicy, ReclaimableSpan, Slot, Volume

PLAN_LIMIT = 65_536
"""Maximum number of blocks that one search for space visits, on the volume and on the others."""
LOOK = 2_048
"""Maximum number of blocks of other sizes among those."""
VISITS = 4_096
"""Blocks visited after which no more spans are compared, if one was found."""
MOST_VISITS = 8 * VISITS
"""Blocks visited after which the search ends, if every span had a block in use."""
WARM = 2
"""Cost of evicting a block that is not among the coldest, relative to one that is."""


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
        may_leave: Sequence[Callable[[BlockKey], bool | None]],
    ) -> list[Block]:
        """Return blocks to evict for a number of slots, or for some; children before parents. Empty: no space can be freed.

        Args:
            shape: of the new blocks.
            counts: numbers of slots, by preference.
            order: evictable blocks, coldest first, children before parents.
            slot_of: a block's slot on this volume; None if it is on another volume, from which it is evicted too.
            may_leave: rules whether a block that occupies the space may be evicted, by preference: the first rule is that of
                ``order``. Later rules apply only if there is a plan by the first rule, which costs more.
        """
        coldest = _few_of_others(order, shape.block_bytes)
        met: list[Block] = []
        plan: list[BlockKey] | None = None
        for count in counts:
            again, met = met, []
            plan = self._volume.plan_eviction(shape, count, _slots(chain(again, coldest), slot_of, met), PLAN_LIMIT)
            if plan:
                break
        prefix = [*(block for block in met if slot_of(block) is None), *map(self._blocks.__getitem__, plan)] if plan else []

        def size_of(block: Block) -> int:
            slot = slot_of(block)
            return block.nbytes if slot is None else slot.size

        others = [block for block in met if block.nbytes != shape.block_bytes]
        spent = sum(map(size_of, others))
        if not others or (prefix and spent <= counts[-1] * shape.block_bytes):
            return prefix

        def affordable(place: ReclaimableSpan, used_bytes: int) -> bool:  # compared with the cost of the prefix for as many slots
            return not prefix or used_bytes < spent * min(1.0, max(1, place.size // shape.block_bytes) / count)

        cold = [slot for block in others if (slot := slot_of(block)) is not None]
        places = [each for each in self._volume.reclaimable_spans(shape, cold) if affordable(each, each.used_bytes)]
        known = {block.key for block in met}
        for rule in may_leave if prefix else may_leave[:1]:
            place, vacated = self._vacated(places, known, rule, size_of)
            if place is not None and affordable(place, sum(map(size_of, vacated))):
                return vacated
        return prefix

    def among_kept(
        self, shape: BlockShape, slot_of: Callable[[Block], Slot | None], may_leave: Callable[[BlockKey], bool | None]
    ) -> list[Block]:
        """Return blocks to evict, kept namespaces included, for a block size without any slot on this volume.

        A few kept blocks, one in each span, would keep every other size out for as long as they are kept. Once the size has a
        span, it frees space among its own blocks.

        Args:
            shape: of the new blocks.
            slot_of: as in ``victims``.
            may_leave: whether a block may be evicted, kept or not.
        """
        kept = False
        for namespace, blocks in self.held.items():
            if blocks and namespace.shape.block_bytes == shape.block_bytes:
                return []
            kept |= bool(blocks and namespace.kept)

        def size_of(block: Block) -> int:
            slot = slot_of(block)
            return block.nbytes if slot is None else slot.size

        return self._vacated(self._volume.reclaimable_spans(shape, []), set(), may_leave, size_of)[1] if kept else []

    def _vacated(
        self,
        places: Sequence[ReclaimableSpan],
        cold: set[BlockKey],
        may_leave: Callable[[BlockKey], bool | None],
        size_of: Callable[[Block], int],
    ) -> tuple[ReclaimableSpan | None, list[Block]]:
        """Return the span that is emptied at the least cost, and the blocks to evict for it. None: none can be."""
        best: tuple[ReclaimableSpan | None, list[Block]] = None, []
        least: float = inf
        cost = visits = 0

        def visit(key: BlockKey) -> bool:
            nonlocal cost, visits
            visits += 1
            cost += size_of(self._blocks[key]) * (1 if key in cold else WARM)
            return cost < least and bool(may_leave(key))

        for number, place in enumerate(places):
            if visits > (MOST_VISITS if best[0] is None or number < 2 else VISITS):
                break
            if place.cold_bytes + WARM * (place.used_bytes - place.cold_bytes) >= least:
                continue
            cost = 0
            found = self._leaving(place, visit)
            if found is not None:
                best, least = (place, found), cost
        return best

    def _leaving(self, place: ReclaimableSpan, may_leave: Callable[[BlockKey], bool]) -> list[Block] | None:
        """Return the blocks of a span and their descendants. None: one of them may not be evicted."""
        keys: list[BlockKey] = []
        for slot in self._volume.slots_in(place):
            block = self.by_slot.get(slot)
            if block is None:
                return None  # a reader or writer uses the slot
            keys.append(block.key)
        found = self._policy.with_descendants(keys, may_leave)
        return None if found is None else [self._blocks[key] for key in found]


def _few_of_others(order: Iterator[Block], nbytes: int) -> Iterator[Block]:
    """Yield blocks of an order, until more than ``LOOK`` have another size."""
    others = 0
    for block in order:
        if block.nbytes != nbytes:
            others += 1
            if others > LOOK:
                return
        yield block


def _slots(order: Iterator[Block], slot_of: Callable[[Block], Slot | None], met: list[Block]) -> Iterator[tuple[BlockKey, Slot]]:
    """Yield keys and slots of blocks on a volume. Appends all visited blocks to ``met``."""
    for block in order:
        met.append(block)
        slot = slot_of(block)
        if slot is not None:
            yield block.key, slot
