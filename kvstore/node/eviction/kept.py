"""Kept namespaces, whose blocks stay while there is a choice, and counts of blocks evicted despite a rule or hint.

Called under the table's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.core.types import Tier
from kvstore.node.eviction.usage import held_bytes
from kvstore.node.state.eviction_orders import EvictionOrder
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics

_limited: Final = LimitedLog(logging.getLogger(__name__))
KEPT_DIVISOR: Final = 2
"""Kept namespaces may hold the capacity of a tier divided by this; their coldest blocks beyond it are evicted first."""


def count_protected(residency: Residency, victims: Sequence[Block], tier: Tier) -> None:
    """Count victims that a rule or a hint should have kept: evicted only because another block size had no slot.

    See ``SpaceReclaimer.is_shut_out``.
    """
    if residency.accounts.kept and (kept := sum(block.namespace.kept for block in victims)):
        residency.counters.add(node_metrics.EVICTED_KEPT_BLOCKS, kept)
        _limited.warning("blocks of kept namespaces evicted: another size had no slot at all (blocks=%d)", kept)
    if tier is Tier.DRAM and not residency.arena_evictor.is_last_tier:
        return  # hints do not protect them there
    if hinted := sum(block.key in block.namespace.hinted for block in victims):
        residency.counters.add(node_metrics.EVICTED_HINTED_BLOCKS, hinted)
        _limited.warning("blocks that hints protect evicted: another size had no slot at all (blocks=%d)", hinted)


def beyond_kept(residency: Residency, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """If kept namespaces exceed their part of a tier: their orders, largest first, each with the bytes still to free."""
    kept = residency.accounts.kept
    if not kept:
        return
    volumes = [residency.dram] if tier is Tier.DRAM else [node_volume.volume for node_volume in residency.node_volumes]
    taken = {namespace: _taken_bytes(residency, namespace, tier) for namespace in kept}
    excess = sum(taken.values()) - sum(volume.usage().capacity_bytes for volume in volumes) // KEPT_DIVISOR
    for namespace in sorted(kept, key=lambda one: -taken[one]):
        if excess <= 0:
            return
        yield namespace.kept_orders[tier], excess
        excess -= taken[namespace]


def _taken_bytes(residency: Residency, namespace: NodeNamespace, tier: Tier) -> int:
    """Bytes that a namespace takes, without evictions in progress: payload and granted slots in DRAM, slots on volumes."""
    if tier is Tier.DRAM:
        return held_bytes(residency, [namespace], tier)
    return (residency.volume_evictor.held(namespace) - namespace.evicting_blocks) * namespace.slot_bytes
