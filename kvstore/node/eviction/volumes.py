"""Who leaves a node's durable volumes, so that others may come. Everything here is called under the table's lock.

The blocks of a chain lie on all volumes of a node, so that one load reads from all of them. Hence one order over all volumes:
children leave before their parents wherever they lie, or what is left of a chain would take room that no lookup finds. Room on a
volume is made by what is coldest, down to enough of that volume; what is colder on the others leaves with it, which makes
room there for the batches that come next. Where blocks of other sizes are in the way: ``kvstore.node.eviction.space``.

A volume that takes no changes (read-only, or left alone after an error) does not hold up the others: what is met of it is set
aside, out of the order, until it takes changes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.eviction.space import PLAN_LIMIT, Room
from kvstore.node.state.model import Block, Home
from kvstore.node.state.namespaces import Domain
from kvstore.node.state.policy_rows import BlockRows
from kvstore.node.state.slot_map import PlaceMap
from kvstore.tiers.contract import EvictionPolicy, Rows, Slot


class DurableRoom:
    """The order in which blocks leave the durable volumes of one node.

    Args:
        blocks: the table's, by key.
        make_policy: makes the order, which keeps its rows where it is told.
        homes: the volumes.
        clock: time.
    """

    def __init__(
        self,
        blocks: Mapping[BlockKey, Block],
        make_policy: Callable[[Rows], EvictionPolicy],
        homes: Sequence[Home],
        clock: Clock,
    ) -> None:
        self._blocks = blocks
        self._rows = BlockRows(blocks)
        policy = self._policy = make_policy(self._rows)
        self._homes = homes
        self._clock = clock
        self._rooms = {id(home): Room(home.volume, blocks, policy) for home in homes}

    def __len__(self) -> int:
        return len(self._policy) + sum(len(home.aside) for home in self._homes)

    def insert(self, block: Block) -> None:
        """A block has come to a volume."""
        if block.nvme is not None and block.nvme_home is not None:
            self._rooms[id(block.nvme_home)].insert(block, block.nvme)
        self._policy.insert(block.key, block.parent)
        for order in block.domain.nvme_orders:
            order.insert(block)

    def remove(self, block: Block, home: Home) -> None:
        """A block has left a volume."""
        if block.nvme is not None:
            self._rooms[id(home)].remove(block, block.nvme)
        if home.aside.pop(block.key, None) is None:
            self._leave_order(block)
        for order in block.domain.nvme_orders:
            order.remove(block)

    def _leave_order(self, block: Block) -> None:
        self._policy.remove(block.key)
        self._rows.keep(block)

    def touch(self, domain: Domain, keys: Sequence[BlockKey]) -> None:
        """Blocks of a namespace were used on their volumes."""
        self._policy.touch(keys)
        for order in domain.nvme_orders:
            order.touch(keys)

    def restore(self, domain: Domain, keys: Sequence[BlockKey]) -> None:
        """Blocks of a namespace that is not pinned any more may leave again."""
        self._policy.restore(keys)
        for order in domain.nvme_orders:
            order.policy.restore(keys)

    def held(self, domain: Domain) -> int:
        """Blocks of a namespace on all volumes."""
        return sum(room.held.get(domain, 0) for room in self._rooms.values())

    def held_on(self, home: Home) -> dict[Domain, int]:
        """Blocks of each namespace on one."""
        return self._rooms[id(home)].held

    def by_place(self, home: Home) -> PlaceMap:
        """The blocks of a volume by where they lie on it."""
        return self._rooms[id(home)].by_place

    def coldest(self, home: Home, may_leave: Callable[[Block], bool]) -> Iterator[tuple[BlockKey, Slot]]:
        """What may leave one volume, with its slots, coldest first; children before their parents where both lie there."""
        self._take_back()
        blocks = self._blocks

        def leaves(key: BlockKey) -> bool | None:
            block = blocks[key]
            return None if block.domain.pinned else block.nvme_home is not home or may_leave(block)

        for key in self._policy.coldest(leaves):
            block = blocks[key]
            if block.nvme_home is home and block.nvme is not None:
                yield key, block.nvme

    def victims(self, home: Home, shape: BlockShape, counts: Sequence[int], *may_leave: Callable[[Block], bool]) -> list[Block]:
        """Blocks of all volumes that leave for the sake of slots on one, or of some of them; empty: no room can be made.

        Args:
            home: the volume.
            shape: of the blocks to come.
            counts: how many of them, by preference: the first for which so much can leave.
            may_leave: whether a block may; by preference, all counts with the first rule before any with the next.
        """
        self._take_back()
        fit = {id(each) for each in self._homes if each.takes_changes(self._clock.now_s())} | {id(home)}

        def slot_of(block: Block) -> Slot | None:
            return block.nvme if block.nvme_home is home else None

        def passing(rule: Callable[[Block], bool]) -> Callable[[BlockKey], bool | None]:
            def leaves(key: BlockKey) -> bool | None:
                block = self._blocks[key]
                return None if block.domain.pinned else id(block.nvme_home) not in fit or rule(block)

            return leaves

        rules = [passing(rule) for rule in may_leave]
        for number, rule in enumerate(rules):
            unfit: list[Block] = []
            order = (self._blocks[key] for key in self._policy.coldest(rule))
            met = _up_to_limit(order, lambda block: id(block.nvme_home) in fit, slot_of, unfit)
            found = self._rooms[id(home)].victims(shape, counts, met, slot_of, rules[number:])
            unfit += (block for block in found if id(block.nvme_home) not in fit)
            for block in unfit:
                if block.nvme_home is not None:
                    self._leave_order(block)
                    block.nvme_home.aside[block.key] = block
            victims = [block for block in found if id(block.nvme_home) in fit]
            if victims:
                return victims
        return self._rooms[id(home)].among_pins(
            shape, slot_of, lambda key: id(self._blocks[key].nvme_home) in fit and may_leave[-1](self._blocks[key])
        )

    def _take_back(self) -> None:
        """What was set aside of volumes that take changes again is in the order again, as newcomers."""
        for home in self._homes:
            if home.aside and home.takes_changes(self._clock.now_s()):
                for block in home.aside.values():
                    self._policy.insert(block.key, block.parent)
                home.aside.clear()


def _up_to_limit(
    order: Iterator[Block], fit: Callable[[Block], bool], slot_of: Callable[[Block], Slot | None], unfit: list[Block]
) -> Iterator[Block]:
    """What may leave now, on a volume and on others, with a limit on what is passed by there; into ``unfit`` goes what cannot."""
    others = 0
    for block in order:
        if not fit(block):
            unfit.append(block)
        else:
            yield block
            others += slot_of(block) is None
        if PLAN_LIMIT in (others, len(unfit)):
            return
