"""Derive the finding of metadata servers that one setting names and that have different indexes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.health import codes
from kvstore.health.findings import HealthFinding

_SHOWN: Final = 8


def differing_indexes(epochs: Mapping[str, bytes]) -> HealthFinding | None:
    """Return the finding, or None if all servers have one index.

    Args:
        epochs: index epoch of each server, by address.
    """
    if len(set(epochs.values())) < 2:
        return None
    named = [f"{address} (index epoch {epoch.hex()[:8]})" for address, epoch in sorted(epochs.items())[:_SHOWN]]
    facts = f"The metadata servers of one list have different indexes: {', '.join(named)}."
    return HealthFinding(codes.METADATA_SERVERS_DIFFER, "", facts)
