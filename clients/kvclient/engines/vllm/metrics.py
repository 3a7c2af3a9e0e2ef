"""The connector's counts in vLLM's own statistics: its periodic log line, and ``vllm:kvstore_…`` on its metrics endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvclient.engines.vllm.counters import COUNTERS

_LOGGED_MB = 1e6


@dataclass
class StoreStats(KVConnectorStats):
    """Counts of one interval, of one worker or the scheduler; all of them add up."""

    def reset(self) -> None:
        """Forgets them."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        """Another's, added."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """As they are logged: volumes in MB and speeds besides the counts."""
        shown: dict[str, int | float] = {name: value for name, value in self.data.items() if not name.endswith("_seconds")}
        for way in ("load", "store"):
            volume, seconds = self.data.get(f"{way}_bytes", 0), self.data.get(f"{way}_seconds", 0)
            if seconds:
                shown[f"{way} MB/s"] = round(volume / seconds / _LOGGED_MB, 1)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class StorePromMetrics(KVConnectorPromMetrics):
    """``vllm:kvstore_<count>_total`` by engine."""

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

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's."""
        for name, value in transfer_stats_data.items():
            counter = self._counters.get((name, engine_idx))
            if counter is not None:
                counter.inc(value)
