"""Placement of second copies: which node takes them, and which node has to see to it. Pure.

Theory of operation.

1. The nodes are ranked for each *unit* of blocks by rendezvous hashing. A node's partner is the first of the ranking in another
   zone; without a known other zone, on another host; without another host, the first other node. If a node leaves, only the units
   whose partner it was get another one.
2. A unit is a piece of a chain without branches, of ``UNIT_BLOCKS`` blocks at most. So few partners hold one chain. A branch
   begins a new unit, because otherwise all chains with one system prompt would have the same partner.
3. A block is held twice if another holder is as far away as a partner would be. The holders are read from the index, not derived
   from today's ranking, so no copy moves if nodes join or units change.
4. If a node is lost, the blocks that it probably shared follow from the ranking before its loss: it was their partner, or it
   asked its partner to copy them. These are checked first.
5. If several nodes hold a block and all are too close to each other, e.g. in one zone, the first of them in the ranking acts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import xxhash

from kvstore.core.types import BlockKey, NodeId

UNIT_BLOCKS: Final = 256
"""Blocks of a chain without branches that have the same partner."""
PARTNERS: Final = 3
"""Nodes that are asked in turn, if the first one is full or does not answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node with durable volumes, whose blocks count as copies.

    Attributes:
        node_id: the node.
        zone: its failure domain; empty: unknown.
        host: its host.
        takes: whether it makes and takes copies now: it is alive and does not drain.
    """

    node_id: NodeId
    zone: str = ""
    host: str = ""
    takes: bool = True


class Members:
    """The nodes, as one of them sees them.

    Args:
        here: the node that asks.
        members: all nodes whose blocks count. If ``here`` is not among them, it gets no partners.
    """

    def __init__(self, here: NodeId, members: Iterable[Member]) -> None:
        self.here = here
        self._by_id = {member.node_id: member for member in members}
        self._reach = {member.node_id: self._farthest(member) for member in self._by_id.values()}

    @property
    def reach(self) -> int:
        """Distance of the partners: 3 another zone, 2 another host, 1 another node, 0 no partner."""
        return self._reach.get(self.here, 0)

    def _farthest(self, member: Member) -> int:
        return max((_distance(member, other) for other in self._by_id.values() if other.takes), default=0)

    def partners(self, unit: bytes) -> list[NodeId]:
        """The nodes to ask for a copy, best first; may be empty."""
        here = self._by_id.get(self.here)
        if here is None or not self.reach:
            return []
        return sorted(self._far_from(here), key=lambda node_id: _rank(unit, node_id), reverse=True)[:PARTNERS]

    def _far_from(self, member: Member) -> list[NodeId]:
        reach = self._reach[member.node_id]
        return [one.node_id for one in self._by_id.values() if one.takes and 0 < _distance(member, one) == reach]

    @property
    def count(self) -> int:
        """Number of nodes whose blocks count."""
        return len(self._by_id)

    def with_lost(self, before: Members, lost: Collection[NodeId]) -> Members:
        """These nodes, and some of earlier ones as they were before they were lost: they took blocks."""
        members = {**self._by_id}
        members.update((node_id, replace(one, takes=True)) for node_id, one in before._by_id.items() if node_id in lost)
        return Members(self.here, members.values())

    def probably_shared(self, unit: bytes, others: Collection[NodeId]) -> bool:
        """Whether this node and one of some others are the holders of a unit's blocks, according to the ranking."""
        here = self._by_id.get(self.here)
        if here is None:
            return False
        if self._first(here, unit) in others:
            return True
        return any(self._first(self._by_id[other], unit) == self.here for other in others if other in self._by_id)

    def _first(self, member: Member, unit: bytes) -> NodeId | None:
        return max(self._far_from(member), key=lambda node_id: _rank(unit, node_id), default=None)

    def must_copy(self, unit: bytes, holders: Collection[NodeId]) -> bool:
        """Whether this node has to get another copy made.

        Args:
            unit: unit of the block.
            holders: nodes with a durable replica of it. This node is one of them, whether it is named or not.
        """
        counted = {self.here, *holders} & self._by_id.keys()
        wanting = [one for one in counted if self._by_id[one].takes and not self._is_safe(one, counted)]
        return self.here in wanting and self.here == max(wanting, key=lambda node_id: _rank(unit, node_id))

    def _is_safe(self, node_id: NodeId, holders: Collection[NodeId]) -> bool:
        """Whether one of the holders is as far from a node as its partner would be, or it has no partner."""
        member = self._by_id[node_id]
        return any(_distance(member, self._by_id[other]) >= self._reach[node_id] for other in holders)


def _distance(one: Member, other: Member) -> int:
    if one.node_id == other.node_id:
        return 0
    if one.zone and other.zone and one.zone != other.zone:
        return 3
    return 2 if one.host != other.host else 1


def _rank(unit: bytes, node_id: NodeId) -> tuple[int, NodeId]:
    return xxhash.xxh3_64_intdigest(unit + node_id.encode()), node_id


class LinkedBlock(Protocol):
    """A block with its place in its chain."""

    key: BlockKey
    parent: BlockKey | None

    @property
    def depth(self) -> int:
        """Position in its chain."""


def unit_of(
    block: LinkedBlock, held: Mapping[BlockKey, LinkedBlock], children: Callable[[BlockKey], int], known: dict[BlockKey, BlockKey]
) -> BlockKey:
    """The unit of a block: the key of its first block. A unit begins at a branch, and at each ``UNIT_BLOCKS`` blocks of depth.

    Args:
        block: the block.
        held: the blocks of this node. A unit also begins after a block that is not held.
        children: number of children that a block has here.
        known: units found before, which are added to.
    """
    passed = []
    unit = block
    while unit.key not in known:
        passed.append(unit.key)
        parent = held.get(unit.parent) if unit.parent is not None else None
        if parent is None or unit.depth % UNIT_BLOCKS == 0 or parent.depth != unit.depth - 1 or children(parent.key) > 1:
            known[unit.key] = unit.key
            break
        unit = parent
    found = known[unit.key]
    known.update(dict.fromkeys(passed, found))
    return found
