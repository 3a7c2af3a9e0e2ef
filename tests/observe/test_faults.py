"""Selection of fault counters by the suffix of their names."""

from __future__ import annotations

import pytest

from kvstore.observe.fault_counters import NO_FAULTS, SUFFIXES, faults
from kvstore.observe.metric_definitions import EVENTS, METRICS


def test_faults_add_up_events_by_metric() -> None:
    totals = {
        "nvme_read_corrupt_blocks_total": 2,
        "nvme_read_timeout_blocks_total": 3,
        "peer_fetch_failed_total": 1,
        "peer_fetched_blocks_total": 9,
        "rpc_errors_not_found_total": 9,
        "write_back_errors_total": 0,
        "nobody_declared_this_failed_total": 9,
        "sessions": 9,
    }
    assert [(metric.name, total) for metric, total in faults(totals)] == [
        ("kvstore_nvme_read_failed_blocks_total", 5),
        ("kvstore_peer_fetch_failed_total", 1),
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_fault_suffix_has_a_metric(suffix: str) -> None:
    assert any(metric.name.endswith(suffix) for metric in EVENTS.values())


def test_excluded_metrics_exist() -> None:
    assert set(METRICS) >= NO_FAULTS
