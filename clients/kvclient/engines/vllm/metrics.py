"""The connector's counts in vLLM's own statistics: its periodic log line, and ``vllm:kvstore_…`` on its metrics endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvclient.engines.vllm.counters import COUNTERS

CACHE_INFO = "cache"
"""Key among the counts: the name of the published prefix cache, and 1 while it is published, else 0."""
COPY_RATES = "copy_rates"
"""Key among the counts: copy strategies by rank of the worker; see ``WorkerConnector.copy_rates``. Sent when they change."""
_FACTS = frozenset({CACHE_INFO, COPY_RATES})
_LOGGED_MB = 1e6


@dataclass
class StoreStats(KVConnectorStats):
    """Counts of one interval, from one worker or the scheduler. vLLM adds them up."""

    def reset(self) -> None:
        """Set all counts to zero. vLLM calls this after it logged them."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        """Add the counts of another worker or interval."""
        for name, value in other.data.items():
            if name == COPY_RATES:
                self.data[name] = {**self.data.get(name, {}), **value}
            else:
                self.data[name] = value if name in _FACTS else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts and the mean speeds in MB/s for vLLM's log line."""
        shown: dict[str, int | float] = {name: value for name, value in self.data.items() if name not in _FACTS}
        shown = {name: value for name, value in shown.items() if not name.endswith("_seconds")}
        for direction in ("load", "store"):
            volume, seconds = self.data.get(f"{direction}_bytes", 0), self.data.get(f"{direction}_seconds", 0)
            if seconds:
                shown[f"{direction} MB/s"] = round(volume / seconds / _LOGGED_MB, 1)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StorePromMetrics(KVConnectorPromMetrics):
    """Prometheus counters ``vllm:kvstore_<count>_total`` per engine, and the name of its cache, by which routers know it."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[name, engine] = metric.labels(*values)
        self._cache_info = self._gauge_cls(
            name="vllm:kvstore_cache_info",
            documentation="Name of this engine's own prefix cache among the store's nodes; 1 while it is published, else 0.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "cache"],
        )
        by_copy = [*labelnames, "worker", "group", "direction", "strategy"]
        self._copy_strategy = self._gauge_cls(
            name="vllm:kvstore_copy_strategy",
            documentation="Strategies of copies between host memory and the KV cache on a device; 1 for those in use, else 0.",
            multiprocess_mode="mostrecent",
            labelnames=by_copy,
        )
        self._copy_rate = self._gauge_cls(
            name="vllm:kvstore_copy_bytes_per_second",
            documentation="Speed of each copy strategy, as measured by trial copies at start.",
            multiprocess_mode="mostrecent",
            labelnames=by_copy,
        )
        self._labels = per_engine_labelvalues

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one interval. vLLM calls this when it collects statistics."""
        if CACHE_INFO in transfer_stats_data:
            name, is_published = transfer_stats_data[CACHE_INFO]
            self._cache_info.labels(*self._labels[engine_idx], name).set(is_published)
        self._show_copies(transfer_stats_data.get(COPY_RATES, {}), engine_idx)
        for name, value in transfer_stats_data.items():
            counter = self._counters.get((name, engine_idx))
            if counter is not None:
                counter.inc(value)

    def _show_copies(self, rates: Mapping[str, Any], engine_idx: int) -> None:
        for worker in rates:
            for group, direction, strategy, in_use, rate in rates[worker]:
                labels = (*self._labels[engine_idx], worker, str(group), direction, strategy)
                self._copy_strategy.labels(*labels).set(int(in_use))
                if rate:
                    self._copy_rate.labels(*labels).set(rate)
