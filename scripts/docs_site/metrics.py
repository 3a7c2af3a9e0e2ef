"""All metrics, from the one place that declares them, in its groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

from docs_site.markdown import code, plain, table
from kvstore.observe import metric_definitions as names
from kvstore.observe.metrics import METRICS, PREFIX, Limit, Metric

_GROUP: Final = re.compile(r"    # -+ (.+)")
_NAME: Final = re.compile(r'    "(\w+)": \(')
_MOST_VALUES: Final = 12


def pages() -> str:
    """A table for each group.

    Raises:
        LookupError: a metric stands in no group.
    """
    parts = []
    told = 0
    for group, found in _groups():
        heading = group if group.startswith("gRPC") else group[:1].upper() + group[1:]
        rows = [(code(metric.name), metric.kind.value, plain(metric.help), _labels(metric)) for metric in found]
        parts.append(f"## {heading}\n\n{table(('metric', 'kind', 'what it counts or shows', 'labels'), rows)}")
        told += len(found)
    if told != len(METRICS):
        raise LookupError(f"{len(METRICS) - told} metrics of kvstore/observe/metric_definitions.py stand below no group")
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[Metric]]]:
    """Headings among the declarations, with the metrics below each."""
    group, found = "", list[Metric]()
    for line in inspect.getsource(names).splitlines():
        if heading := _GROUP.fullmatch(line):
            if found:
                yield group, found
            group, found = heading[1], []
        elif group and (name := _NAME.match(line)) and PREFIX + name[1] in METRICS:
            found.append(METRICS[PREFIX + name[1]])
    if found:
        yield group, found


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
