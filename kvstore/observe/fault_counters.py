"""Which counters tell of faults: things that went wrong, not things that were declined, were slow or were not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.observe.metrics import EVENTS, METRICS, Metric

ENDINGS: Final = (
    "_bugs_total", "_errors_total", "_failed_total", "_failed_blocks_total", "_failures_total", "_timeouts_total",
    "_stalled_total", "_stalls_total", "_stalled_peers_total", "_stuck_threads_total", "_broken_total", "_lost_total",
    "_interrupted_total", "_overflow_total", "_gone_total", "_given_up_total", "_bad_frames_total", "_dropped_blocks_total",
    "corrupt_blocks_total", "quarantined_blocks_total", "_lost_blocks_total", "_expired_total",
)  # fmt: skip
"""How their names end: a counter that is added is among them by its name."""
ORDINARY: Final = frozenset({"kvstore_rpc_errors_total"})
"""Answers that say no: to be found in names that end so, and part of every day."""


def faults(totals: Mapping[str, int]) -> list[tuple[Metric, int]]:
    """The faults among a process's totals by event, added up by metric, by name; without those that never were."""
    found: dict[str, int] = {}
    for event, total in totals.items():
        metric = EVENTS.get(event)
        if metric is not None and total and metric.name.endswith(ENDINGS) and metric.name not in ORDINARY:
            found[metric.name] = found.get(metric.name, 0) + total
    return [(METRICS[name], total) for name, total in sorted(found.items())]
