"""Reference of all metrics, one table per group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from docs_site.markdown import code, plain, table
from kvstore.observe.metric_definitions import METRICS
from kvstore.observe.metrics import Limit, Metric

_MOST_VALUES: Final = 12


def pages() -> str:
    """A table for each group."""
    parts = []
    for group, found in _groups():
        rows = [(code(metric.name), metric.kind.value, plain(metric.help), _labels(metric)) for metric in found]
        parts.append(f"## {group}\n\n{table(('metric', 'kind', 'what it counts or shows', 'labels'), rows)}")
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[Metric]]]:
    """Headings, with the metrics below each, in the order of their declarations."""
    groups: dict[str, list[Metric]] = {}
    for metric in METRICS.values():
        groups.setdefault(metric.group, []).append(metric)
    yield from groups.items()


def _labels(metric: Metric) -> str:
    parts = []
    for label, values in metric.labels.items():
        if isinstance(values, Limit):
            parts.append(f"{code(label)}: {values.most:,} at most")
        elif len(values) > _MOST_VALUES:
            parts.append(f"{code(label)}: {len(values)} values")
        else:
            parts.append(f"{code(label)}: {', '.join(values)}")
    return "; ".join(parts)
