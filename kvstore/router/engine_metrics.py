"""What an engine says of itself in its Prometheus text: pure. By vLLM's names; of other engines nothing is known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvstore.core.limits import MAX_DEPTH
from kvstore.router.ledger import DECODING_SHARE, EngineLoad

_LINE: Final = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:cache_config_info"
    rb"|process_start_time_seconds)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL: Final = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,12})"')


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's own figures.

    Attributes:
        running: requests in its batch.
        waiting: requests that wait within it.
        capacity_tokens: of KV that fit into its HBM; 0: not known.
        used_tokens: of KV that are in use by requests.
        started_s: when its process started; 0: not known.
    """

    running: int = 0
    waiting: int = 0
    capacity_tokens: int = 0
    used_tokens: int = 0
    started_s: float = 0.0

    def beyond(self, known: EngineLoad) -> EngineLoad | None:
        """What the engine does beyond what is known of; None: nothing. A guess: its mean request stands for each."""
        more = self.running + self.waiting - known.sequences
        if more <= 0:
            return None
        mean = self.used_tokens // max(1, self.running)
        computing = min(more, self.waiting)
        return EngineLoad(more, mean * computing + mean * (more - computing) // DECODING_SHARE, mean * more)


def parse_metrics(text: bytes) -> EngineMetrics:
    """Reads the figures; of several data-parallel ranks behind one address, their sum. What is missing or odd counts as 0."""
    sums: dict[bytes, float] = {}
    usages: list[float] = []
    capacity = 0
    for name, labels, value in _LINE.findall(text):
        if name == b"vllm:cache_config_info":
            found = {key: int(number) for key, number in _LABEL.findall(labels)}
            capacity += found.get(b"num_gpu_blocks", 0) * found.get(b"block_size", 0)
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
    )


def _number(text: bytes) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number < 1e15 else 0.0  # also not a number
