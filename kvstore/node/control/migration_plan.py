"""Plan of a migration: which blocks of a draining node move to which node. Pure.

A block moves if it was stored on the node and no volume of a remaining node holds it. A volume gets only as many blocks as fit in
its free space, because its own blocks are worth as much. So some blocks may be unplaced. A child never moves without its parent,
as no lookup would find it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.state.change_log import ChainedBlock, in_chains

SLOT_PAGE = 4096
"""Volumes allocate in units of this size, and the slot header needs one."""
RESERVE = 16
"""1/n of a volume's capacity is not planned with: rounding and slots of other sizes need space too."""


class SizedBlock(ChainedBlock, Protocol):
    """A block with its size."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full block."""


Held = TypeVar("Held", bound=SizedBlock)


@dataclass(frozen=True, slots=True)
class Batch(Generic[Held]):
    """Blocks of one namespace for one node, parents before their children."""

    node_id: NodeId
    namespace_id: NamespaceId
    blocks: Sequence[Held]


@dataclass(slots=True)
class MigrationBatches(Generic[Held]):
    """Batches in order, and blocks without a target: no node has space for them or for their parent."""

    batches: list[Batch[Held]] = field(default_factory=list)
    unplaced: list[Held] = field(default_factory=list)


def slot_space(nbytes: int) -> int:
    """Return the bytes of a volume that a block needs."""
    return SLOT_PAGE + -(-nbytes // SLOT_PAGE) * SLOT_PAGE


def free_space(capacity_bytes: int, used_bytes: int) -> int:
    """Return the bytes of a volume that a migration may use."""
    return max(0, capacity_bytes - capacity_bytes // RESERVE - used_bytes)


def plan_moves(
    held: Iterable[Held], safe: Container[BlockKey], free_bytes: Mapping[NodeId, int], window_bytes: int, window_blocks: int
) -> MigrationBatches[Held]:
    """Plan the migration.

    Args:
        held: blocks stored on the node.
        safe: keys that a volume of a remaining node holds.
        free_bytes: free space of each target node.
        window_bytes: maximum size of a batch; a larger block is a batch on its own.
        window_blocks: maximum number of blocks in a batch.
    """
    moves: MigrationBatches[Held] = MigrationBatches()
    free = dict(free_bytes)
    unplaced: set[BlockKey] = set()
    target: NodeId | None = None
    batch: list[Held] = []
    batch_bytes = 0

    def close() -> None:
        nonlocal target, batch_bytes
        if target is not None and batch:
            moves.batches.append(Batch(target, batch[0].namespace_id, list(batch)))
        batch.clear()
        target, batch_bytes = None, 0

    for block in in_chains(sorted((one for one in held if one.key not in safe), key=lambda one: (one.namespace_id, one.depth))):
        size = slot_space(block.nbytes)
        full = batch_bytes + block.nbytes > window_bytes or len(batch) >= window_blocks
        if batch and (full or batch[0].namespace_id != block.namespace_id):
            close()
        if target is None or free[target] < size:
            close()
            target = max(free, key=lambda node_id: (free[node_id], node_id), default=None)
        if target is None or free[target] < size or block.parent in unplaced:
            if not batch:
                target = None
            unplaced.add(block.key)
            moves.unplaced.append(block)
            continue
        free[target] -= size
        batch.append(block)
        batch_bytes += block.nbytes
    close()
    return moves
