"""Whose claim counts, where two name different places for one key.

A key is a hash over everything before it, so it has one place: one parent, one depth, one namespace. Where a run says another
than the block that is held, one of the two was a slip of its writer, most often a parent that was forgotten, and under the wrong
place no lookup ever finds the block. The bytes do not tell who was right, but chains do:

* a block whose parent is held here, right before it, stays against a run of which that cannot be said: a parent that was
  forgotten once harms nothing. But not for good, for it is no proof: it gives way to the third such claim;
* else the claim made last wins, so that a writer that is right mends what one that was not had stored;
* a key of another namespace never gives way: namespaces do not know each other.

A block gives way only to a store that takes its place now. One that is in use is waited for, or the store is refused; it is
never marked to leave later, for by then it might be nobody's turn.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey, BlockRun
from kvstore.node.state.model import Block
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics

if TYPE_CHECKING:
    from kvstore.node.state.namespaces import NodeNamespace
    from kvstore.node.table import BlockTable

_limited = LimitedLog(logging.getLogger(__name__))
PATIENCE = 2
"""Claims that a block behind its parent stays against."""


@dataclass(frozen=True, slots=True)
class PlaceConflict:
    """A key that cannot be stored where a run says."""

    position: int
    """In the run."""
    key: BlockKey
    depth: int
    """Where the run says that it stands."""
    reason: str
    passes: bool = False
    """Once whoever uses or writes it now is done."""

    def error(self) -> Conflict:
        """What the writer is told."""
        hint = (
            "try again, once it is not" if self.passes else "use a key for one prefix of one namespace only, and give its place"
        )
        return Conflict(f"the key {self.reason}: {hint}", key=self.key.hex(), depth=self.depth)


def make_way(table: BlockTable, namespace: NodeNamespace, run: BlockRun, deadline_s: float, *, heads: bool = False) -> int:
    """How many leading keys of a run may be stored where it says. The caller holds the table's lock.

    What is in the way leaves. Where it cannot leave now and is in the way of the first key, waits for it, holding nothing; a
    writer that got a part asks again for the rest. ``heads``: each of the keys is the head of a chain of its own.

    Raises:
        Conflict: the first key cannot be stored there, in time.
    """
    while (conflict := _first_conflict(table, namespace, run, heads=heads)) is not None:
        if conflict.position:
            return conflict.position
        if not conflict.passes or not table._wait(table._changed, deadline_s):
            table._counters.add(node_metrics.STORE_CONFLICTS)
            error = conflict.error()
            _limited.warning("a store was refused: %s", error)
            raise error
    return len(run.keys)


def _first_conflict(table: BlockTable, namespace: NodeNamespace, run: BlockRun, *, heads: bool) -> PlaceConflict | None:
    """The first key of a run that cannot be stored there; blocks before it that stood in the way have left."""
    parent, depth = run.parent, run.depth
    for position, key in enumerate(run.keys):
        block, writer = table._blocks.get(key), table._preparing.get(key)
        if block is not None and block.namespace is namespace:
            if (block.depth != depth or block.parent != parent) and key not in run.keys[:position]:
                linked = (position > 0 and not heads) or _stands(table, namespace, parent, depth - 1)
                if not linked and _stands(table, namespace, block.parent, block.depth - 1) and block.disputed < PATIENCE:
                    block.dispute()
                    return PlaceConflict(position, key, depth, f"is held behind its parent, as block {block.depth} of a chain")
                if not table._idle(block) or key in table._loading:
                    reason = f"is held as block {block.depth} of a chain and in use"
                    return PlaceConflict(position, key, depth, reason, passes=True)
                _displace(table, block, depth)
        elif block is not None or (writer is not None and writer.namespace is not namespace):
            return PlaceConflict(position, key, depth, "is held for another namespace")
        elif writer is not None and (writer.depths[key] != depth or writer.parents[key] != parent):
            reason = f"is being written as block {writer.depths[key]} of a chain"
            return PlaceConflict(position, key, depth, reason, passes=True)
        if not heads:
            parent, depth = key, depth + 1
    return None


def _stands(table: BlockTable, namespace: NodeNamespace, key: BlockKey | None, depth: int) -> bool:
    """Whether a key is held, or being written, at a depth."""
    if key is None:
        return False
    block, writer = table._blocks.get(key), table._preparing.get(key)
    if block is not None:
        return block.namespace is namespace and block.depth == depth
    return writer is not None and writer.namespace is namespace and writer.depths[key] == depth


def _displace(table: BlockTable, block: Block, depth: int) -> None:
    """A block that nobody uses leaves all tiers, for it is about to be stored at another depth."""
    table._counters.add(node_metrics.STORE_DISPLACED_BLOCKS)
    _limited.warning(
        "block %s was stored as block %d of a chain, and is now as block %d: one writer gave a wrong parent or depth",
        block.key.hex(), block.depth, depth,
    )  # fmt: skip
    node_volume, slot = block.nvme_volume, block.nvme
    if node_volume is not None and slot is not None:
        table._durable.remove(block, node_volume)
        table._log.removed(node_volume.volume_id, block.key)
        node_volume.outdated.add(block.key, slot)
        block.unsettle()
    block.elsewhere = False  # the storage node, too, has it at another place
    if block.dram is not None:
        table._evict_dram(block)
    else:
        table._drop_if_nowhere(block)
