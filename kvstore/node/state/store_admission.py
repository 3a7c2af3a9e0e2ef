"""Which keys of a run a store may write. Called under the table's lock.

Keys are derived from the chain, so each has one namespace, parent and depth: the first writer decides them. A run ends before a
key that it claims otherwise.
"""

from __future__ import annotations

import logging

from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey, BlockRun, StoreOutcome
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics

_limited = LimitedLog(logging.getLogger(__name__))


def admit(residency: Residency, grant: SlotGrant, *, heads: bool) -> list[int]:
    """Fill a grant's outcomes, reserve its keys that are neither held nor being written or loaded, and guard their parent.

    Args:
        residency: the blocks.
        grant: a store's, still empty.
        heads: whether each key is the head of a chain.

    Returns:
        Positions of the reserved keys.

    Raises:
        Conflict: the first key is held or being written with another namespace, parent or depth.
    """
    namespace, run, outcomes = grant.namespace, grant.run, grant.outcomes
    blocks, preparing, loading = residency.blocks, residency.preparing, residency.loading
    admitted: list[int] = []
    known: list[BlockKey] = []
    parent, depth = run.parent, run.depth
    for position, key in enumerate(run.keys):
        block, writer = blocks.get(key), preparing.get(key)
        if block is not None:
            if block.namespace is not namespace or block.parent != parent or block.depth != depth:
                break
            outcomes.append(StoreOutcome.EXISTS)
            known.append(key)
        elif writer is not None:
            claimed = (writer.namespace, writer.parents[key], writer.depths[key])
            if writer is not grant and claimed != (namespace, parent, depth):
                break
            outcomes.append(StoreOutcome.IN_PROGRESS)
        elif key in loading:  # a load may be fetching it from another node
            outcomes.append(StoreOutcome.IN_PROGRESS)
        else:
            outcomes.append(StoreOutcome.STORED)
            preparing[key] = grant  # the second occurrence of a key in a run is IN_PROGRESS
            grant.depths[key], grant.parents[key] = depth, parent
            admitted.append(position)
        if not heads:
            parent, depth = key, depth + 1
    if not outcomes and run.keys:
        raise _conflict(residency, namespace, run)
    outcomes += [StoreOutcome.SKIPPED] * (len(run.keys) - len(outcomes))
    residency.arena_evictor.touch(namespace, known)
    guarded = blocks.get(grant.parents[run.keys[admitted[0]]] or BlockKey(b"")) if admitted else None
    # a parent that one eviction would remove: its children must not push it out
    if guarded is not None and (guarded.dram is None or (guarded.clean and not guarded.durable)):
        guarded.pins += 1
        grant.guarded = guarded
    return admitted


def _conflict(residency: Residency, namespace: NodeNamespace, run: BlockRun) -> Conflict:
    """The error for a run whose first key has another namespace, parent or depth; counted and logged."""
    key = run.keys[0]
    block, writer = residency.blocks.get(key), residency.preparing.get(key)
    first = block.namespace if block is not None else writer.namespace if writer is not None else namespace
    depth = block.depth if block is not None else writer.depths[key] if writer is not None else run.depth
    reason = f"with another parent or depth (depth {depth})" if first is namespace else "for another namespace"
    error = Conflict(
        f"the key is held {reason}: derive keys from the chain, and give its parent and depth", key=key.hex(), depth=run.depth
    )
    residency.counters.add(node_metrics.STORE_CONFLICTS)
    _limited.warning("store refused: %s", error)
    return error
