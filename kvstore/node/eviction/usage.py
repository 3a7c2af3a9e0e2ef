"""Bytes that namespaces hold on this node. Called under the table's lock."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.types import Tier
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency


def held_bytes(residency: Residency, namespaces: Iterable[NodeNamespace], tier: Tier) -> int:
    """Bytes that namespaces hold in a tier, including slots granted to stores."""
    total = 0
    for namespace in namespaces:
        in_dram = tier is Tier.DRAM
        blocks = (
            residency.arena_evictor.held(namespace) + namespace.granted if in_dram else residency.volume_evictor.held(namespace)
        )
        total += blocks * namespace.shape.block_bytes
    return total
