"""All metrics, from the one place that declares them, in its groups."""

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
    told = []
    for label, values in metric.labels.items():
        if isinstance(values, Limit):
            told.append(f"{code(label)}: {values.most:,} at most")
        elif len(values) > _MOST_VALUES:
            told.append(f"{code(label)}: {len(values)} values")
        else:
            told.append(f"{code(label)}: {', '.join(values)}")
    return "; ".join(told)
