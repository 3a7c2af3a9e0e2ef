"""What is to outlive a node where its volumes cannot take all of it: the hottest, with all that is above it. Pure.

A block that does not find room stays out for good: what is left of the room never grows faster than what is still missing
above the block shrinks. So each is climbed from about once, and what is below it is out at once. Parents are what clients said:
they may be nowhere, or each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from kvstore.core.types import BlockKey
from kvstore.node.eviction.quotas import PIN_PART, Account, durable_share
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace

Above = Callable[[Block], Block | None]


def what_stays(
    hottest: Iterable[Block],
    above: Above,
    room_bytes: int,
    room_for: Callable[[Block], int],
    share_of: Callable[[NodeNamespace], int | None] = durable_share,
    *,
    may_lie_elsewhere: bool = False,
) -> dict[BlockKey, Block]:
    """Which blocks are to be on the volumes in the end, as far as there is room.

    Args:
        hottest: what lies in DRAM, pinned first, then from the hottest to the coldest.
        above: the parent of a block, in whatever tier, of its namespace; None where it is not here.
        room_bytes: of all volumes.
        room_for: bytes of it that a block takes.
        share_of: bytes of payload that a namespace's tenant may hold on volumes; None: any.
        may_lie_elsewhere: what is not here may well be where the blocks go to.

    Returns:
        Them, by key, in that order, but parents before their children. Pins count up to their part of the room; what is pinned
        beyond it comes after all else that a lookup can find. Last comes what none can, by what is known here: an ancestor of it
        is nowhere, or it is its own.
    """
    plan = _Plan(above, room_bytes, room_for, share_of, may_lie_elsewhere)
    for block in hottest:
        plan.offer(block)
    for block in (*plan.beyond, *plan.unfound):
        plan.offer(block, late=True)
    return plan.stays


class _Plan:
    """What stays so far, and what is known of the rest."""

    def __init__(
        self,
        above: Above,
        room_bytes: int,
        room_for: Callable[[Block], int],
        share_of: Callable[[NodeNamespace], int | None],
        may_lie_elsewhere: bool,
    ) -> None:
        self._above = above
        self._room_for = room_for
        self._share_of = share_of
        self._may_lie_elsewhere = may_lie_elsewhere
        self._left = room_bytes
        self._left_for_pins = room_bytes // PIN_PART
        self._shares: dict[Account | None, int] = {}
        self.stays: dict[BlockKey, Block] = {}
        self._out: set[BlockKey] = set()
        self._narrow: dict[BlockKey, int] = {}
        """Blocks that would find room -> bytes of the smallest below each that would not."""
        self.beyond: list[Block] = []
        """Pinned, beyond the part of pins."""
        self.unfound: list[Block] = []
        self._waits: dict[BlockKey, list[Block]] = {}
        """Those put off and what is above them -> where such as are below them wait, too."""

    def offer(self, block: Block, *, late: bool = False) -> None:
        """The next coldest. ``late``: nothing is put off any more."""
        if block.key in self.stays or block.key in self._out:
            return
        least = None if block.parent is None else self._narrow.get(block.parent)
        if least is not None and self._room_for(block) >= least:
            self._out.add(block.key)
            return
        new = self._climb(block, late=late)
        if new:
            self._take(new, late=late)

    def _climb(self, block: Block, *, late: bool) -> list[Block]:
        """A block and those above it that do not stay yet, parents first; none where it is out, or put off."""
        met: dict[BlockKey, Block] = {}
        one = block
        while one.key not in self.stays:
            if one.key in self._out:
                self._out.update(met)
                return []
            if not late and (waiting := self._waits.get(one.key)) is not None:
                return self._put_off(block, met, waiting)
            met[one.key] = one
            parent = self._above(one)
            if parent is None or parent.key in met:
                if one.parent is not None and not late and not self._may_lie_elsewhere:
                    return self._put_off(block, met, self.unfound)
                break
            one = parent
        return list(met.values())[::-1]

    def _put_off(self, block: Block, met: Iterable[BlockKey], waiting: list[Block]) -> list[Block]:
        waiting.append(block)
        self._waits.update(dict.fromkeys(met, waiting))
        return []

    def _take(self, new: Sequence[Block], *, late: bool) -> None:
        """All of a block and those above it stay, or it is out, or put off."""
        block = new[-1]
        share = self._share_of(block.namespace)
        allowed = inf if share is None else self._shares.setdefault(block.namespace.account, share)
        needed = payload = 0
        for at, one in enumerate(new):
            takes = self._room_for(one)
            needed += takes
            payload += one.nbytes if takes else 0
            if needed > self._left or payload > allowed:
                self._out.update(each.key for each in new[at:])
                if one is block and block.parent is not None:
                    self._narrow[block.parent] = takes
                return
        if block.namespace.pinned and not late:
            if needed > self._left_for_pins:
                self._put_off(block, (one.key for one in new), self.beyond)
                return
            self._left_for_pins -= needed
        self._left -= needed
        if share is not None:
            self._shares[block.namespace.account] -= payload
        self.stays.update((one.key, one) for one in new)
