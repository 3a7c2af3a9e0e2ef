"""Declaration of metrics as typed objects. The metrics themselves are in ``kvstore.observe.metric_definitions``.

Code counts *events*: names in one registry per process (``kvstore.observe.counters``). A metric shows one event, or one event
per combination of its label values: ``client_hit_local_dram_blocks_total`` is exposed as
``kvstore_client_hit_blocks_total{path="local",tier="dram"}``. An event is a ``str`` at run time, so counting one costs an
update of a dictionary under a lock. For a type checker only a declaration makes an event, so no undeclared name can be counted.

Every label has few values, listed here, or a stated maximum number of values. Input from outside never becomes a label.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NewType

PREFIX: Final = "kvstore_"
"""Prefix of every exposed name."""
LATENCY_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Event = NewType("Event", str)
"""A counter's event: ``Counters.add``."""
TimedEvent = NewType("TimedEvent", str)
"""A histogram's event: ``Counters.observe``."""
SampledMetric = NewType("SampledMetric", str)
"""A metric whose value is read at each scrape: ``exposition.Sample``."""


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Limit:
    """Maximum number of values of a label whose values a configuration or a registration defines."""

    most: int


LabelValues = tuple[str, ...] | Limit
Labels = Mapping[str, LabelValues]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: exposed name, with its prefix.
        kind: its Prometheus type.
        help: one sentence, with the unit if the name has none.
        group: heading in the reference.
        labels: values of each label.
        events: event -> label values, in the order of ``labels``; empty if the metric is sampled.
        scale: factor from an event's total to the unit of the name.
        buckets: upper bounds of a histogram's buckets, without infinity.
    """

    name: str
    kind: Kind
    help: str
    group: str
    labels: Labels = field(default_factory=dict)
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in a scrape."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


DECLARED: Final[dict[str, Metric]] = {}
"""Declared metrics, by exposed name. Complete in ``metric_definitions.METRICS``."""


CounterFamily = dict[str | tuple[str, ...], Event]
"""Counters that differ in labels: ``family["quota"]``, with several labels ``family["local", "dram"]``."""
HistogramFamily = dict[str | tuple[str, ...], TimedEvent]
"""Histograms that differ in labels: ``family["dram"]``."""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that share a heading in the reference; its methods declare them.

    Names are without prefix. ``events`` is the pattern of a family's events, with ``{label}`` for each label.
    """

    title: str

    def counter(self, name: str, text: str, *, event: str = "", scale: float = 1.0) -> Event:
        """Declare a counter without labels. ``event`` is the counter's name in code, if it is not ``name``."""
        self._declare(name, Kind.COUNTER, text, {}, event or name, scale=scale)
        return Event(event or name)

    def counter_family(self, name: str, text: str, labels: Labels, events: str) -> CounterFamily:
        """Declare counters that differ in labels."""
        metric = self._declare(name, Kind.COUNTER, text, labels, events)
        return {_key(values): Event(event) for event, values in metric.events.items()}

    def histogram(self, name: str, text: str) -> TimedEvent:
        """Declare a histogram of seconds without labels."""
        self._declare(name, Kind.HISTOGRAM, text, {}, name, buckets=LATENCY_BUCKETS_S)
        return TimedEvent(name)

    def histogram_family(self, name: str, text: str, labels: Labels, events: str) -> HistogramFamily:
        """Declare histograms of seconds that differ in labels."""
        metric = self._declare(name, Kind.HISTOGRAM, text, labels, events, buckets=LATENCY_BUCKETS_S)
        return {_key(values): TimedEvent(event) for event, values in metric.events.items()}

    def gauge(self, name: str, text: str, labels: Labels | None = None) -> SampledMetric:
        """Declare a gauge."""
        self._declare(name, Kind.GAUGE, text, labels or {}, "")
        return SampledMetric(name)

    def sampled_counter(self, name: str, text: str, labels: Labels | None = None) -> SampledMetric:
        """Declare a counter whose total is read from elsewhere, e.g. from the kernel."""
        self._declare(name, Kind.COUNTER, text, labels or {}, "")
        return SampledMetric(name)

    def _declare(
        self,
        name: str,
        kind: Kind,
        text: str,
        labels: Labels,
        events: str,
        *,
        scale: float = 1.0,
        buckets: tuple[float, ...] = (),
    ) -> Metric:
        values = {label: listed for label, listed in labels.items() if not isinstance(listed, Limit)}
        by_event = (
            {events.format(**dict(zip(values, chosen, strict=True))): chosen for chosen in itertools.product(*values.values())}
            if events
            else {}
        )
        metric = Metric(PREFIX + name, kind, text, self.title, labels, by_event, scale, buckets)
        assert metric.name not in DECLARED, f"{metric.name} is declared twice"
        DECLARED[metric.name] = metric
        return metric


def _key(values: tuple[str, ...]) -> str | tuple[str, ...]:
    return values[0] if len(values) == 1 else values
