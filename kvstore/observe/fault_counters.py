"""Counters of faults: failures, not rejections, delays or misses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.observe.metric_definitions import EVENTS, METRICS
from kvstore.observe.metrics import Metric

SUFFIXES: Final = (
    "_bugs_total", "_errors_total", "_failed_total", "_failed_blocks_total", "_failures_total", "_timeouts_total",
    "_stalled_total", "_stalls_total", "_stalled_peers_total", "_stuck_threads_total", "_broken_total", "_lost_total",
    "_interrupted_total", "_overflow_total", "_gone_total", "_given_up_total", "_bad_frames_total", "_dropped_blocks_total",
    "corrupt_blocks_total", "quarantined_blocks_total", "_lost_blocks_total", "_expired_total",
)  # fmt: skip
"""Suffixes of their names, so that a new counter of faults is found by its name."""
NO_FAULTS: Final = frozenset({"kvstore_rpc_errors_total"})
"""Counters with such a suffix that also count ordinary rejections."""


FAULT: Final = "fault/"
"""Prefix of a fault's name among the figures of the last hour."""


def fault_counts(totals: Mapping[str, int]) -> dict[str, int]:
    """Totals of faults for the history of the last hour, by the prefixed name of the metric."""
    return {f"{FAULT}{metric.name}": total for metric, total in faults(totals)}


def faults(totals: Mapping[str, int]) -> list[tuple[Metric, int]]:
    """Add up the faults in a process's totals.

    Args:
        totals: totals by event.

    Returns:
        Metrics of faults with their totals, by name, without those that are 0.
    """
    found: dict[str, int] = {}
    for event, total in totals.items():
        metric = EVENTS.get(event)
        if metric is not None and total and metric.name.endswith(SUFFIXES) and metric.name not in NO_FAULTS:
            found[metric.name] = found.get(metric.name, 0) + total
    return [(METRICS[name], total) for name, total in sorted(found.items())]
