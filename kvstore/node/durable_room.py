"""Who leaves a node's durable volumes, so that others may come. Everything here is called under the table's lock.

The blocks of a chain lie on all volumes of a node, so that one load reads from all of them. Hence one order over all volumes:
children leave before their parents wherever they lie, or what is left of a chain would take room that no lookup finds. Room on a
volume is made by what is coldest, down to enough of that volume; what is colder on the others leaves with it, which makes
room there for the batches that come next.

A volume that takes no changes (read-only, or left alone after an error) does not hold up the others: what is met of it is set
aside, out of the order, until it takes changes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.block import Block, Home
from kvstore.tiers.contract import EvictionPolicy, Slot

PLAN_LIMIT = 65_536
"""Blocks that one search for room may look at, on the volume and on the others."""


class DurableRoom:
    """The order in which blocks leave the durable volumes of one node.

    Args:
        blocks: the table's, by key.
        policy: the order.
        homes: the volumes.
        clock: time.
    """

    def __init__(self, blocks: Mapping[BlockKey, Block], policy: EvictionPolicy, homes: Sequence[Home], clock: Clock) -> None:
        self._blocks = blocks
        self._policy = policy
        self._homes = homes
        self._clock = clock

    def __len__(self) -> int:
        return len(self._policy) + sum(len(home.aside) for home in self._homes)

    def insert(self, block: Block) -> None:
        """A block has come to a volume."""
        self._policy.insert(block.key, block.parent)

    def remove(self, block: Block, home: Home) -> None:
        """A block has left a volume."""
        if home.aside.pop(block.key, None) is None:
            self._policy.remove(block.key)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were used on their volumes."""
        self._policy.touch(keys)

    def coldest(self, home: Home, may_leave: Callable[[Block], bool]) -> Iterator[tuple[BlockKey, Slot]]:
        """What may leave one volume, with its slots, coldest first; children before their parents where both lie there."""
        self._take_back()
        for block in self._order(lambda block: block.nvme_home is not home or may_leave(block)):
            if block.nvme_home is home and block.nvme is not None:
                yield block.key, block.nvme

    def victims(self, home: Home, shape: BlockShape, counts: Sequence[int], *may_leave: Callable[[Block], bool]) -> list[Block]:
        """Blocks of all volumes that leave for the sake of slots on one; empty: no room can be made.

        Args:
            home: the volume.
            shape: of the blocks to come.
            counts: how many of them, by preference: the first for which so much can leave.
            may_leave: whether a block may; by preference, all counts with the first rule before any with the next.
        """
        self._take_back()
        for rule, count in product(may_leave, counts):
            others: list[Block] = []
            unfit: list[Block] = []
            plan = home.volume.room_plan(shape, count, self._down_to(home, rule, others, unfit), PLAN_LIMIT)
            for block in unfit:
                if block.nvme_home is not None:
                    self._policy.remove(block.key)
                    block.nvme_home.aside[block.key] = block
            if plan:
                return [*others, *(self._blocks[key] for key in plan)]
        return []

    def _down_to(
        self, home: Home, may_leave: Callable[[Block], bool], others: list[Block], unfit: list[Block]
    ) -> Iterator[tuple[BlockKey, Slot]]:
        """As ``coldest``, noting what is met on other volumes: what is to leave, and what cannot now."""
        fit = {id(each) for each in self._homes if each.takes_changes(self._clock.now_s())} | {id(home)}
        for block in self._order(lambda block: id(block.nvme_home) not in fit or may_leave(block)):
            if block.nvme_home is home and block.nvme is not None:
                yield block.key, block.nvme
                continue
            met = others if id(block.nvme_home) in fit else unfit
            met.append(block)
            if len(met) == PLAN_LIMIT:
                return

    def _order(self, passes: Callable[[Block], bool]) -> Iterator[Block]:
        return (self._blocks[key] for key in self._policy.coldest(lambda key: passes(self._blocks[key])))

    def _take_back(self) -> None:
        """What was set aside of volumes that take changes again is in the order again, as newcomers."""
        for home in self._homes:
            if home.aside and home.takes_changes(self._clock.now_s()):
                for block in home.aside.values():
                    self._policy.insert(block.key, block.parent)
                home.aside.clear()
