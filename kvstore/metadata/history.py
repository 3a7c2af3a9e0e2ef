"""Figures of a metadata server for the history of the last hour."""

from __future__ import annotations

from typing import Final

from kvstore.index.contract import PrefixIndex
from kvstore.observe.counters import Counters
from kvstore.observe.fault_counters import fault_counts
from kvstore.observe.history import Totals
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import metadata as metadata_metrics

_COUNTS: Final = {
    "lookups": metadata_metrics.LOOKUPS,
    "lookup_blocks": metadata_metrics.LOOKUP_KEYS,
    "hit_blocks": metadata_metrics.LOOKUP_HIT_BLOCKS,
    **{f"planned_{side}_bytes": metadata_metrics.PLANNED_BYTES[side] for side in ("prefill", "decode", "relay")},
}
_LOOKUP: Final = common_metrics.RPC_SECONDS["Lookup"]


def read_totals(counters: Counters, index: PrefixIndex) -> Totals:
    """Totals of lookups, plans and faults, and the size of the index."""
    counted, distributions = counters.snapshot(), counters.distributions()
    stats = index.stats()
    return Totals(
        counts={name: counted.get(event, 0) for name, event in _COUNTS.items()} | fault_counts(counted),
        durations={"lookup": distributions[_LOOKUP]} if _LOOKUP in distributions else {},
        levels={"index_blocks": stats.blocks, "index_bytes": stats.bytes},
    )
