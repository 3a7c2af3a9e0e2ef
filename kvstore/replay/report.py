"""Results of a run: JSON for machines, tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstore.health.quantities import show_size
from kvstore.replay.engine import ReplayTotals

PERCENTILES = (50, 90, 99)


def milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 and max, in ms; None without measurements."""
    if not seconds:
        return {**{f"p{number}": None for number in PERCENTILES}, "max": None}
    values = np.percentile(np.asarray(seconds), PERCENTILES) * 1000
    return {
        **{f"p{number}": round(float(value), 3) for number, value in zip(PERCENTILES, values, strict=True)},
        "max": round(max(seconds) * 1000, 3),
    }


def tally_json(tally: ReplayTotals, seconds: float) -> dict[str, Any]:
    """Totals of a run, by their documented names."""
    return {
        "requests": tally.requests,
        "blocks_total": tally.blocks_total,
        "blocks_hit": tally.blocks_hit,
        "hit_ratio": tally.hit_ratio,
        "bytes_loaded": tally.bytes_loaded,
        "bytes_stored": tally.bytes_stored,
        "wrong_bytes": tally.wrong_bytes,
        "wrong_blocks": tally.wrong_blocks,
        "load_ms": milliseconds(tally.load_s),
        "lookup_ms": milliseconds(tally.lookup_s),
        "store_ms": milliseconds(tally.store_s),
        "seconds": round(seconds, 3),
        "by_tier": dict(tally.bytes_by_tier),
        "by_node": dict(tally.bytes_by_node),
        "short_loads": tally.short_loads,
        "blocks_not_delivered": tally.blocks_not_delivered,
        "stores": dict(tally.store_outcomes),
        "stores_skipped": tally.store_outcomes["skipped"],
        "errors": dict(tally.errors),
    }


def print_summary(title: str, rows: Mapping[str, str], console: Console) -> None:
    """A table of two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def tally_rows(tally: ReplayTotals, seconds: float) -> dict[str, str]:
    """Totals of a run, as text."""
    rows = {
        "requests": f"{tally.requests:,} in {seconds:.1f} s",
        "prompt blocks": f"{tally.blocks_total:,} in all requests",
        "hits": f"{tally.blocks_hit:,} ({tally.hit_ratio:.2%}), loaded instead of computed",
        "loaded": f"{show_size(tally.bytes_loaded)}, every byte checked",
        "  by tier": shares(tally.bytes_by_tier),
        "  by node": shares(tally.bytes_by_node),
        "stored": show_size(tally.bytes_stored),
        "load time": show_times(tally.load_s),
        "lookup time": show_times(tally.lookup_s),
        "store time": show_times(tally.store_s),
        "wrong bytes": f"{tally.wrong_bytes:,}",
    }
    if tally.store_outcomes["skipped"]:
        rows["stores skipped"] = f"{tally.store_outcomes['skipped']:,} blocks (no space or a full queue)"
    if tally.short_loads:
        rows["short loads"] = f"{tally.short_loads:,} ({tally.blocks_not_delivered:,} blocks computed again)"
    if tally.errors:
        rows["failures met"] = ", ".join(f"{kind}: {count}" for kind, count in sorted(tally.errors.items()))
    return rows


def show_times(seconds: Sequence[float]) -> str:
    """p50, p99 and the longest."""
    if not seconds:
        return "-"
    times = milliseconds(seconds)
    return f"p50 {times['p50']} ms, p99 {times['p99']} ms, longest {times['max']} ms"


def shares(sizes: Mapping[str, int]) -> str:
    """Bytes by name, most first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {show_size(size)}" for name, size in ordered if size) or "-"
