"""Which blocks of a node that drains must go to others, and who takes what. Pure.

Must go: what was stored there and lies on no other volume that stays. A volume takes as much as it has room for and no more, for
what it holds is as good as what comes. So there may be blocks left; a child never goes without its parent, or nobody would find
it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.state.change_log import Described, in_chains

SLOT_PAGE = 4096
"""Volumes give room in such pages, and a header takes one."""
RESERVE = 16
"""A volume is filled up to 1/n of its capacity: rounding, and slots of other sizes, take room too."""


class Sized(Described, Protocol):
    """A block and how large it is."""

    @property
    def nbytes(self) -> int:
        """Bytes of the Full Block."""


Held = TypeVar("Held", bound=Sized)


@dataclass(frozen=True, slots=True)
class Batch(Generic[Held]):
    """Blocks of one namespace that one node is to take, parents before their children."""

    node_id: NodeId
    namespace_id: NamespaceId
    blocks: Sequence[Held]


@dataclass(slots=True)
class Moves(Generic[Held]):
    """What is to go where, in this order; and what finds no room, or stays with a parent that finds none."""

    batches: list[Batch[Held]] = field(default_factory=list)
    left: list[Held] = field(default_factory=list)


def room_of(nbytes: int) -> int:
    """Bytes of a volume that a block takes."""
    return SLOT_PAGE + -(-nbytes // SLOT_PAGE) * SLOT_PAGE


def free_room(capacity_bytes: int, used_bytes: int) -> int:
    """Bytes that a volume has for blocks of others."""
    return max(0, capacity_bytes - capacity_bytes // RESERVE - used_bytes)


def plan_moves(
    held: Iterable[Held], safe: Container[BlockKey], room: Mapping[NodeId, int], window_bytes: int, window_blocks: int
) -> Moves[Held]:
    """Who takes what.

    Args:
        held: what was stored on the node.
        safe: keys that lie on another volume that stays.
        room: bytes free on each node that may take some.
        window_bytes: the most in one batch; a larger block is one by itself.
        window_blocks: the most blocks in one batch.
    """
    moves: Moves[Held] = Moves()
    free = dict(room)
    stays: set[BlockKey] = set()
    taker: NodeId | None = None
    batch: list[Held] = []
    batch_bytes = 0

    def close() -> None:
        nonlocal taker, batch_bytes
        if taker is not None and batch:
            moves.batches.append(Batch(taker, batch[0].namespace_id, list(batch)))
        batch.clear()
        taker, batch_bytes = None, 0

    for block in in_chains(sorted((one for one in held if one.key not in safe), key=lambda one: (one.namespace_id, one.depth))):
        size = room_of(block.nbytes)
        full = batch_bytes + block.nbytes > window_bytes or len(batch) >= window_blocks
        if batch and (full or batch[0].namespace_id != block.namespace_id):
            close()
        if taker is None or free[taker] < size:
            close()
            taker = max(free, key=lambda node_id: (free[node_id], node_id), default=None)
        if taker is None or free[taker] < size or block.parent in stays:
            if not batch:
                taker = None
            stays.add(block.key)
            moves.left.append(block)
            continue
        free[taker] -= size
        batch.append(block)
        batch_bytes += block.nbytes
    close()
    return moves
