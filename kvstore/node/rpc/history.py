"""Figures of a node for the history of the last hour."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters, HistogramTotals
from kvstore.observe.fault_counters import fault_counts
from kvstore.observe.history import Totals
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.observe.metric_definitions.label_values import NONE

_COUNTS: Final = {
    **{f"{reach}_bytes": node_metrics.LOADED_BYTES[reach] for reach in ("dram", "nvme", "peer")},
    "served_bytes": transport_metrics.BYTES_SENT,
    "received_bytes": transport_metrics.BYTES_RECEIVED,
    "evicted_dram_blocks": node_metrics.EVICTED_DRAM_BLOCKS,
    "evicted_nvme_blocks": node_metrics.EVICTED_NVME_BLOCKS,
}
_LOADS: Final = [node_metrics.LOAD_SECONDS[reach] for reach in ("dram", "nvme", "peer", NONE)]


def read_totals(counters: Counters, table: BlockTable) -> Totals:
    """Totals of loads, evictions and faults, and the fill of the tiers."""
    counted, distributions = counters.snapshot(), counters.distributions()
    loads = _added(distributions[event] for event in _LOADS if event in distributions)
    levels: dict[str, float] = {}
    for volume in (table.dram, *(node_volume.volume for node_volume in table.node_volumes)):
        tier, usage = volume.tier.name.lower(), volume.usage()
        levels[f"{tier}_used"] = levels.get(f"{tier}_used", 0) + usage.used_bytes
        levels[f"{tier}_capacity"] = levels.get(f"{tier}_capacity", 0) + usage.capacity_bytes
    return Totals(
        counts={name: counted.get(event, 0) for name, event in _COUNTS.items()} | fault_counts(counted),
        durations={} if loads is None else {"load": loads},
        levels=levels,
    )


def _added(parts: Iterable[HistogramTotals]) -> HistogramTotals | None:
    """Add histograms with equal buckets; None if there are none."""
    added: HistogramTotals | None = None
    for part in parts:
        if added is None:
            added = HistogramTotals(part.bounds, list(part.counts), part.total)
        else:
            added.counts = [a + b for a, b in zip(added.counts, part.counts, strict=True)]
    return added
