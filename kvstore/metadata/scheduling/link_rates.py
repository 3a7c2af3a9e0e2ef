"""Choose the bandwidths that the planner starts from: configured, measured, link speed, or assumed, in this order. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvproto.v1.common_pb2 import (
    BANDWIDTH_SOURCE_ASSUMED,
    BANDWIDTH_SOURCE_CONFIGURED,
    BANDWIDTH_SOURCE_LINK,
    BANDWIDTH_SOURCE_MEASURED,
    BandwidthSource,
    NodeInfo,
)

ASSUMED_STORAGE_BYTES_PER_S: Final = 3_125_000_000.0
"""25 Gbit/s: assumed rate of a storage link. Loads soon replace it by an estimate."""
ASSUMED_COMPUTE_SHARE: Final = 8.0
"""A compute link is assumed to carry this multiple of the storage link, as on the hosts of the paper."""


class LinkRates(NamedTuple):
    """Bytes per second of a node's links, and the source of each figure."""

    storage: float
    storage_source: BandwidthSource
    compute: float
    compute_source: BandwidthSource


def link_rates(node: NodeInfo, read_bytes_per_s: int) -> LinkRates:
    """Choose the rates of one node.

    Args:
        node: its registration.
        read_bytes_per_s: measured read rate of its volumes, from its heartbeats; 0: not measured.
    """
    storage, storage_source = ASSUMED_STORAGE_BYTES_PER_S, BANDWIDTH_SOURCE_ASSUMED
    if node.storage_bytes_per_s:
        link = node.storage_source == BANDWIDTH_SOURCE_LINK
        storage, storage_source = float(node.storage_bytes_per_s), BANDWIDTH_SOURCE_LINK if link else BANDWIDTH_SOURCE_CONFIGURED
    if read_bytes_per_s and storage_source != BANDWIDTH_SOURCE_CONFIGURED:
        storage, storage_source = float(read_bytes_per_s), BANDWIDTH_SOURCE_MEASURED
    if node.compute_bytes_per_s:
        source = BANDWIDTH_SOURCE_LINK if node.compute_source == BANDWIDTH_SOURCE_LINK else BANDWIDTH_SOURCE_CONFIGURED
        return LinkRates(storage, storage_source, float(node.compute_bytes_per_s), source)
    basis = storage if storage_source == BANDWIDTH_SOURCE_CONFIGURED else ASSUMED_STORAGE_BYTES_PER_S
    return LinkRates(storage, storage_source, basis * ASSUMED_COMPUTE_SHARE, BANDWIDTH_SOURCE_ASSUMED)
