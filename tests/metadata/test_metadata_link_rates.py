"""Tests of the initial link bandwidths of the planner and their sources."""

from __future__ import annotations

import pytest

from kvproto.v1.common_pb2 import (
    BANDWIDTH_SOURCE_ASSUMED,
    BANDWIDTH_SOURCE_CONFIGURED,
    BANDWIDTH_SOURCE_LINK,
    BANDWIDTH_SOURCE_MEASURED,
    BandwidthSource,
    NodeInfo,
)
from kvstore.metadata.scheduling.link_rates import LinkRates, link_rates

ASSUMED, CONFIGURED = BANDWIDTH_SOURCE_ASSUMED, BANDWIDTH_SOURCE_CONFIGURED
LINK, MEASURED = BANDWIDTH_SOURCE_LINK, BANDWIDTH_SOURCE_MEASURED


@pytest.mark.parametrize(
    ("storage", "storage_source", "measured", "rate", "source"),
    [
        (0, 0, 0, 3.125e9, ASSUMED),
        (0, 0, 7 * 10**9, 7e9, MEASURED),
        (5 * 10**9, LINK, 0, 5e9, LINK),
        (5 * 10**9, LINK, 7 * 10**9, 7e9, MEASURED),
        (5 * 10**9, CONFIGURED, 7 * 10**9, 5e9, CONFIGURED),
        (5 * 10**9, 0, 0, 5e9, CONFIGURED),
    ],
)
def test_link_rates_storage_takes_best_known(
    storage: int, storage_source: BandwidthSource, measured: int, rate: float, source: BandwidthSource
) -> None:
    found = link_rates(NodeInfo(storage_bytes_per_s=storage, storage_source=storage_source), measured)
    assert (found.storage, found.storage_source) == (rate, source)


@pytest.mark.parametrize(
    ("node", "rate", "source"),
    [
        (NodeInfo(compute_bytes_per_s=50 * 10**9, compute_source=LINK), 50e9, LINK),
        (NodeInfo(compute_bytes_per_s=50 * 10**9, compute_source=CONFIGURED), 50e9, CONFIGURED),
        (NodeInfo(storage_bytes_per_s=10**9, storage_source=CONFIGURED), 8e9, ASSUMED),
        (NodeInfo(), 25e9, ASSUMED),
    ],
)
def test_link_rates_compute_takes_best_known(node: NodeInfo, rate: float, source: BandwidthSource) -> None:
    found = link_rates(node, 0)
    assert (found.compute, found.compute_source) == (rate, source)


def test_link_rates_assumed_compute_ignores_fast_disks() -> None:
    assert link_rates(NodeInfo(), 56 * 10**9) == LinkRates(56e9, MEASURED, 25e9, ASSUMED)
