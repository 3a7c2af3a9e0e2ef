"""Totals, histograms and gauges of a process in Prometheus format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore.observe.counters import Counters, HistogramTotals
from kvstore.observe.metric_definitions import EVENTS, METRICS, SHOWN_AT_ZERO
from kvstore.observe.metrics import PREFIX, Kind, Metric

log = logging.getLogger(__name__)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Sample(NamedTuple):
    """A value that is read at a scrape."""

    metric: str
    """Declared name, without prefix."""
    value: float
    labels: Mapping[str, str] = {}


Gauges = Callable[[], Iterable[Sample]]


class StoreCollector(Collector):
    """Collector for ``prometheus_client``. Register it in a registry of your own, or in the engine's.

    Args:
        counters: registries whose totals are added up; iterated at each scrape.
        gauges: called at each scrape. If one raises, its samples are missing.
        process: a key of ``SHOWN_AT_ZERO``: its totals are exposed from the start; empty: they appear with their first event.
    """

    def __init__(
        self,
        counters: Iterable[Counters],
        gauges: Sequence[Gauges] = (),
        *,
        process: str = "",
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        prefixes = SHOWN_AT_ZERO[process] if process else ()
        self._zeros = [name for name, metric in EVENTS.items() if metric.kind is Kind.COUNTER and name.startswith(prefixes)]

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        totals = dict.fromkeys(self._zeros, 0)
        for counters in self._counters:
            for name, value in counters.snapshot().items():
                totals[name] = totals.get(name, 0) + value
        undeclared = 0
        for name, value in totals.items():
            metric = EVENTS.get(name)
            if metric is None:
                undeclared += value
                continue
            self._add(families, metric, metric.events[name], value * metric.scale)
        self._add(families, METRICS[f"{PREFIX}undeclared_events_total"], (), undeclared)
        for name, found in self._distributions().items():
            metric = EVENTS.get(name)
            if metric is not None:
                self._add_histogram(families, metric, metric.events[name], found)
        for gauges in self._gauges:
            try:
                samples = list(gauges())
            except Exception:  # the other samples are exposed nevertheless
                log.exception("gauges not collected: %s", getattr(gauges, "__qualname__", gauges))
                continue
            for sample in samples:
                metric = _metric_of(sample)
                self._add(families, metric, [sample.labels[label] for label in metric.labels], sample.value)
        yield from families.values()

    def describe(self) -> Iterable[Family]:
        """No families: ``collect`` at registration would read gauges before they are ready."""
        return ()

    def _distributions(self) -> dict[str, HistogramTotals]:
        added: dict[str, HistogramTotals] = {}
        for counters in self._counters:
            for name, found in counters.distributions().items():
                known = added.setdefault(name, HistogramTotals(found.bounds, [0] * len(found.counts)))
                known.counts = [one + other for one, other in zip(known.counts, found.counts, strict=True)]
                known.total += found.total
        return added

    def _family(self, families: dict[str, Family], metric: Metric) -> Family:
        family = families.get(metric.name)
        if family is None:
            kinds = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
            family = kinds[metric.kind](metric.name, metric.help, labels=list(metric.labels))
            families[metric.name] = family
        return family

    def _add(self, families: dict[str, Family], metric: Metric, labels: Sequence[str], value: float) -> None:
        family = self._family(families, metric)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def _add_histogram(self, families: dict[str, Family], metric: Metric, labels: Sequence[str], found: HistogramTotals) -> None:
        family = self._family(families, metric)
        assert isinstance(family, HistogramMetricFamily)
        bounds = [*(repr(bound) for bound in found.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        family.add_metric(labels, buckets, found.total)


def _metric_of(sample: Sample) -> Metric:
    metric = METRICS[PREFIX + sample.metric]
    if set(sample.labels) != set(metric.labels):
        raise KeyError(f"{sample.metric} requires the labels {sorted(metric.labels)}, got {sorted(sample.labels)}")
    return metric


def registry_of(collector: StoreCollector) -> CollectorRegistry:
    """A registry with this collector and the process's CPU, memory and open files."""
    from prometheus_client.process_collector import ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
