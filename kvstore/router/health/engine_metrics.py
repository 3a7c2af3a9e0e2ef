"""Parse the Prometheus metrics that an engine exports: pure. Only vLLM's metric names are known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvstore.core.limits import MAX_DEPTH
from kvstore.router.placement.inflight import DECODING_SHARE, EngineWork

_LINE: Final = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:cache_config_info"
    rb"|vllm:kvstore_cache_info"
    rb"|process_start_time_seconds)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_CACHE: Final = re.compile(rb'cache="([A-Za-z0-9._-]{1,64})"')
_MAX_CACHES: Final = 1_024
_LABEL: Final = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,12})"')


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Metrics of one engine.

    Attributes:
        running: requests in the batch.
        waiting: requests in the engine's queue.
        capacity_tokens: tokens of KV that fit into HBM; 0 if unknown.
        used_tokens: tokens of KV that requests use.
        started_s: start time of the process; 0 if unknown.
        caches: names of its prefix caches among the store's nodes that it publishes now, one per data-parallel rank.
    """

    running: int = 0
    waiting: int = 0
    capacity_tokens: int = 0
    used_tokens: int = 0
    started_s: float = 0.0
    caches: tuple[str, ...] = ()

    def foreign_work(self, known: EngineWork) -> EngineWork | None:
        """Estimate the work that neither this router nor the scheduler sent: each unknown request counts as a mean one.

        Args:
            known: work that the router knows.

        Returns:
            The estimate; None if the engine runs only known requests.
        """
        unknown = self.running + self.waiting - known.sequences
        if unknown <= 0:
            return None
        mean = self.used_tokens // max(1, self.running)
        computing = min(unknown, self.waiting)
        return EngineWork(unknown, mean * computing + mean * (unknown - computing) // DECODING_SHARE, mean * unknown)


def parse_metrics(text: bytes) -> EngineMetrics:
    """Parse an engine's metrics. Data-parallel ranks at one address are summed; missing or invalid values count as 0."""
    sums: dict[bytes, float] = {}
    usages: list[float] = []
    caches: list[str] = []
    capacity = 0
    for name, labels, value in _LINE.findall(text):
        if name == b"vllm:cache_config_info":
            found = {key: int(number) for key, number in _LABEL.findall(labels)}
            capacity += found.get(b"num_gpu_blocks", 0) * found.get(b"block_size", 0)
            continue
        if name == b"vllm:kvstore_cache_info":
            if _number(value) == 0:
                continue  # not published now: the token was denied, or the index cannot be reached
            caches += [cache.decode() for cache in _CACHE.findall(labels)]
            continue
        number = _number(value)
        if name == b"vllm:kv_cache_usage_perc":
            usages.append(min(number, 1.0))
        else:
            sums[name] = sums.get(name, 0.0) + number
    capacity = min(capacity, MAX_DEPTH << 16)
    return EngineMetrics(
        running=int(sums.get(b"vllm:num_requests_running", 0)),
        waiting=int(sums.get(b"vllm:num_requests_waiting", 0)),
        capacity_tokens=capacity,
        used_tokens=int(capacity * sum(usages) / len(usages)) if usages else 0,
        started_s=sums.get(b"process_start_time_seconds", 0.0),
        caches=tuple(caches[:_MAX_CACHES]),
    )


def _number(text: bytes) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number < 1e15 else 0.0  # excludes NaN as well
