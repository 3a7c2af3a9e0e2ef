"""What a metric is, and which exist: each name that is counted or shown is declared in ``kvstore.observe.metric_definitions``.

Code counts *events*: plain names, so that counting is one dictionary entry. A metric shows one event, or several that differ in
a label: ``client_hit_local_dram_blocks_total`` is shown as ``kvstore_client_hit_blocks_total{path="local",tier="dram"}``. Labels
take few values, all of them known here, or as many as a stated limit allows; nothing that comes from outside becomes a label.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvstore.observe.metric_definitions import DECLARED, LATENCY_BUCKETS_S

PREFIX: Final = "kvstore_"
"""What every exposed name begins with."""


class Kind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Limit:
    """Values of a label that a configuration or a registration names: at most so many."""

    most: int


LabelValues = tuple[str, ...] | Limit


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as exposed, with its prefix.
        kind: how it behaves.
        help: one line.
        labels: names of its labels, and what values they take.
        events: the event behind each combination of label values, in the order of ``labels``; empty: it is shown from elsewhere.
        scale: what an event's total is multiplied by to be in the unit of the name.
        buckets: upper bounds of a histogram's buckets, without infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names that its samples have in a scrape."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def _metrics() -> Iterator[Metric]:
    for name, (kind, text, *rest) in DECLARED.items():
        more = rest[0] if rest else {}
        labels: dict[str, LabelValues] = {
            label: Limit(values) if isinstance(values, int) else tuple(values) for label, values in more.get("labels", {}).items()
        }
        pattern = more.get("events", "" if kind == "gauge" else name)
        events = {}
        if pattern:
            known = {label: values for label, values in labels.items() if not isinstance(values, Limit)}
            for chosen in itertools.product(*known.values()):
                events[pattern.format(**dict(zip(known, chosen, strict=True)))] = chosen
        buckets = more.get("buckets", LATENCY_BUCKETS_S) if kind == "histogram" else ()
        yield Metric(PREFIX + name, Kind(kind), text, labels, events, more.get("scale", 1.0), tuple(buckets))


METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _metrics()}
"""All metrics by exposed name."""

EVENTS: Final[Mapping[str, Metric]] = {event: metric for metric in METRICS.values() for event in metric.events}
"""The metric that shows each event."""

assert len(EVENTS) == sum(len(metric.events) for metric in METRICS.values()), "an event is shown by two metrics"


def event(metric: str, **labels: str) -> str:
    """The event behind one combination of label values: for tables made when a module is imported.

    Raises:
        KeyError: there is no such metric, or a value is not among those declared.
    """
    found = METRICS[PREFIX + metric]
    wanted = tuple(labels[label] for label in found.labels)
    for name, values in found.events.items():
        if values == wanted:
            return name
    raise KeyError(f"{metric} has no {labels}")


def check_sample(name: str, labels: Iterable[str]) -> Metric:
    """The metric of a sample that is shown from elsewhere than events.

    Raises:
        KeyError: it is not declared, or not with these labels.
    """
    metric = METRICS[PREFIX + name]
    if set(labels) != set(metric.labels):
        raise KeyError(f"{name} takes the labels {sorted(metric.labels)}, not {sorted(labels)}")
    return metric
