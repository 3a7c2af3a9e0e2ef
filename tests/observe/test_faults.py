"""Which counters tell of faults."""

from __future__ import annotations

import pytest

from kvstore.observe.fault_counters import ENDINGS, ORDINARY, faults
from kvstore.observe.metrics import EVENTS, METRICS


def test_faults_are_added_up_by_metric() -> None:
    totals = {
        "nvme_read_corrupt_blocks_total": 2,
        "nvme_read_timeout_blocks_total": 3,
        "peer_fetch_failed_total": 1,
        "peer_fetched_blocks_total": 9,
        "rpc_errors_not_found_total": 9,
        "write_behind_errors_total": 0,
        "nobody_declared_this_failed_total": 9,
        "sessions": 9,
    }
    assert [(metric.name, total) for metric, total in faults(totals)] == [
        ("kvstore_nvme_read_failed_blocks_total", 5),
        ("kvstore_peer_fetch_failed_total", 1),
    ]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_finds_something(ending: str) -> None:
    assert any(metric.name.endswith(ending) for metric in EVENTS.values())


def test_what_is_left_out_is_there() -> None:
    assert set(METRICS) >= ORDINARY
