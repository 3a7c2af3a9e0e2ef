"""Who leaves a volume for the sake of slots of one size. Everything here is called under the table's lock.

The coldest leave, in the order of the policy, until slots of the size are free: among blocks of one size that is all there is.
Where blocks of other sizes are colder, their slots are of no use before a whole span is empty, and where chains lie mixed that
takes nearly everything. So the search looks at no more than ``LOOK`` of those. If that gives no room, or costs more,
one place is emptied (a span, or as many beside each other as one slot takes): its blocks leave with their descendants, which are
to leave before them wherever they lie, and nothing else. It takes the place for whose sake the least leaves, what is not among
the coldest counted twice. Whoever needs more room than it gives asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf

from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.slot_map import PlaceMap
from kvstore.tiers.contract import EvictionPolicy, ReclaimableSpan, Slot, Volume

PLAN_LIMIT = 65_536
"""Blocks that one search for room may look at, on the volume and on the others."""
LOOK = 2_048
"""Of those, how many may be of other sizes than the one that room is needed for."""
VISITS = 4_096
"""Blocks visited after which no more places to empty are compared, once there is one."""
MOST_VISITS = 8 * VISITS
"""Blocks visited after which none is looked for any more, where all had something in use."""
WARM = 2
"""What it costs that a block leaves which is not among the coldest, against one that is."""


class SpaceReclaimer:
    """One volume's blocks by where they lie, and the search for those that leave it.

    Args:
        volume: whose room it is.
        blocks: the table's, by key.
        policy: the order in which they leave.
    """

    def __init__(self, volume: Volume, blocks: Mapping[BlockKey, Block], policy: EvictionPolicy) -> None:
        self._volume = volume
        self._blocks = blocks
        self._policy = policy
        self.by_place = PlaceMap()
        self.held: dict[NodeNamespace, int] = {}
        """Blocks of each namespace here."""

    def insert(self, block: Block, slot: Slot) -> None:
        """A block lies in a slot of the volume from now on."""
        self.by_place.put(slot, block)
        held, namespace = self.held, block.namespace
        held[namespace] = held.get(namespace, 0) + 1

    def remove(self, block: Block, slot: Slot) -> None:
        """It no longer does."""
        self.by_place.take(slot)
        self.held[block.namespace] -= 1

    def victims(
        self,
        shape: BlockShape,
        counts: Sequence[int],
        order: Iterator[Block],
        slot_of: Callable[[Block], Slot | None],
        may_leave: Sequence[Callable[[BlockKey], bool | None]],
    ) -> list[Block]:
        """Blocks whose leaving makes room for a count, or for some of it; children before parents. Empty: none can be made.

        Args:
            shape: of the blocks to come.
            counts: how many of them, by preference.
            order: what may leave, coldest first, children before parents.
            slot_of: a block's slot on this volume; None where it lies on another, which it leaves with the rest.
            may_leave: whether a block may that stands in the way, by preference: the first rule is that of ``order``, and those
                after it count only where there is a plan by the first, which costs more.
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

        def affordable(place: ReclaimableSpan, used_bytes: int) -> bool:  # against what the prefix spends on as many slots
            return not prefix or used_bytes < spent * min(1.0, max(1, place.size // shape.block_bytes) / count)

        cold = [slot for block in others if (slot := slot_of(block)) is not None]
        places = [each for each in self._volume.reclaimable_spans(shape, cold) if affordable(each, each.used_bytes)]
        known = {block.key for block in met}
        for rule in may_leave if prefix else may_leave[:1]:
            place, vacated = self._vacated(places, known, rule, size_of)
            if place is not None and affordable(place, sum(map(size_of, vacated))):
                return vacated
        return prefix

    def among_pins(
        self, shape: BlockShape, slot_of: Callable[[Block], Slot | None], may_leave: Callable[[BlockKey], bool | None]
    ) -> list[Block]:
        """What leaves, pinned by order or not, where nothing else made room and blocks of a size have no slot here at all.

        A few pinned blocks, one in each place, would keep every other size out for as long as they are pinned. Once the size has
        a place, it makes room among its own.

        Args:
            shape: of the blocks to come.
            slot_of: as in ``victims``.
            may_leave: whether a block may, pinned or not.
        """
        pinned = False
        for namespace, blocks in self.held.items():
            if blocks and namespace.shape.block_bytes == shape.block_bytes:
                return []
            pinned |= bool(blocks and namespace.pinned)

        def size_of(block: Block) -> int:
            slot = slot_of(block)
            return block.nbytes if slot is None else slot.size

        return self._vacated(self._volume.reclaimable_spans(shape, []), set(), may_leave, size_of)[1] if pinned else []

    def _vacated(
        self,
        places: Sequence[ReclaimableSpan],
        cold: set[BlockKey],
        may_leave: Callable[[BlockKey], bool | None],
        size_of: Callable[[Block], int],
    ) -> tuple[ReclaimableSpan | None, list[Block]]:
        """The place that is emptied at the least cost, and what leaves for it; None where none can be."""
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
        """All that leaves with the blocks of a place, those included. None: something of it may not."""
        keys: list[BlockKey] = []
        for slot in self._volume.slots_in(place):
            block = self.by_place.get(slot)
            if block is None:
                return None  # the slot of somebody who reads or writes
            keys.append(block.key)
        found = self._policy.with_descendants(keys, may_leave)
        return None if found is None else [self._blocks[key] for key in found]


def _few_of_others(order: Iterator[Block], nbytes: int) -> Iterator[Block]:
    """What there is, until more than ``LOOK`` of it is of another size."""
    others = 0
    for block in order:
        if block.nbytes != nbytes:
            others += 1
            if others > LOOK:
                return
        yield block


def _slots(order: Iterator[Block], slot_of: Callable[[Block], Slot | None], met: list[Block]) -> Iterator[tuple[BlockKey, Slot]]:
    """Keys and slots of what lies on a volume; ``met`` gets all that was come across."""
    for block in order:
        met.append(block)
        slot = slot_of(block)
        if slot is not None:
            yield block.key, slot
