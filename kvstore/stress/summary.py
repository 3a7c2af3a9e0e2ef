"""Results of a stress run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.observe.program_version import program_version
from kvstore.replay.engine import ReplayTotals
from kvstore.stress.plan import OperationKind, StressPlan

_WIDTH: Final = math.log(1.02)
_LEAST_S: Final = 1e-7


class LatencyHistogram:
    """Counts durations by buckets that grow by 2 %, so that a percentile is known to 1 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._longest_s = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        """Count durations."""
        for one in seconds:
            self._counts[round(math.log(max(one, _LEAST_S)) / _WIDTH)] += 1
            self._longest_s = max(self._longest_s, one)

    @property
    def count(self) -> int:
        """Durations counted."""
        return self._counts.total()

    def percentile_ms(self, percent: float) -> float | None:
        """Percentile in milliseconds; None: nothing was counted."""
        if not self._counts:
            return None
        wanted = self.count * percent / 100
        seen = 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return round(1000 * min(math.exp(bucket * _WIDTH), self._longest_s), 3)
        return round(1000 * self._longest_s, 3)

    def to_json(self) -> dict[str, float | None]:
        """p50, p99 and the longest, in milliseconds."""
        longest = round(1000 * self._longest_s, 3) if self._counts else None
        return {"p50": self.percentile_ms(50), "p99": self.percentile_ms(99), "max": longest}


@dataclass(slots=True)
class PassSummary:
    """Totals of one pass over all clients."""

    name: str
    seconds: float = 0.0
    """Duration of the pass, including the filling and checking of payloads."""
    requests: int = 0
    failed: int = 0
    """Requests of which a call failed."""
    blocks: int = 0
    hits: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    wrong_bytes: int = 0
    operations: dict[OperationKind, LatencyHistogram] = field(default_factory=dict)
    """Latencies by operation. A load includes its lookup. With a rate they count from the intended start."""
    lookups: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Calls of lookups, those of loads included."""
    by_tier: Counter[str] = field(default_factory=Counter)
    by_path: Counter[str] = field(default_factory=Counter)
    by_node: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    rates: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds in calls, per session."""

    def add(self, session: int, tally: ReplayTotals, latencies: Mapping[OperationKind, Sequence[float]], failed: int = 0) -> None:
        """Add what a session did since its last report."""
        self.requests += tally.requests
        self.failed += failed
        self.blocks += tally.blocks_total
        self.hits += tally.blocks_hit
        self.stored_bytes += tally.bytes_stored
        self.loaded_bytes += tally.bytes_loaded
        self.wrong_bytes += tally.wrong_bytes
        for kind, seconds in latencies.items():
            self.operations.setdefault(kind, LatencyHistogram()).add(seconds)
        self.lookups.add(tally.lookup_s)
        self.by_tier.update(tally.bytes_by_tier)
        self.by_path.update(tally.bytes_by_path)
        self.by_node.update(tally.bytes_by_node)
        self.outcomes.update(tally.store_outcomes)
        self.errors.update(tally.errors)
        moved, spent_s = self.rates.get(session, (0, 0.0))
        self.rates[session] = (moved + tally.bytes_stored + tally.bytes_loaded, spent_s + sum(tally.load_s) + sum(tally.store_s))

    @property
    def bytes_per_s(self) -> float:
        """Sum of the sessions' rates while a call runs; the filling and checking of payloads does not count."""
        return sum(moved / seconds for moved, seconds in self.rates.values() if seconds)

    @property
    def hit_ratio(self) -> float:
        """Share of requested blocks that were loaded."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def all_failed(self) -> bool:
        """Whether each request had a failed call, and nothing was moved."""
        return 0 < self.requests == self.failed and not self.hits and not self.stored_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "requests": self.requests,
            "failed_requests": self.failed,
            "seconds": round(self.seconds, 3),
            "bytes_per_s": round(self.bytes_per_s),
            "stored_bytes": self.stored_bytes,
            "loaded_bytes": self.loaded_bytes,
            "operations": {
                kind.value: {"count": times.count, "latency_ms": times.to_json()}
                for kind, times in sorted(self.operations.items())
            },
            "operations_per_s": round(self.requests / self.seconds, 3) if self.seconds else 0.0,
            "lookup_ms": self.lookups.to_json(),
            "blocks": self.blocks,
            "hit_blocks": self.hits,
            "hit_ratio": round(self.hit_ratio, 6),
            "wrong_bytes": self.wrong_bytes,
            "by_tier": dict(self.by_tier),
            "by_path": dict(self.by_path),
            "by_node": dict(self.by_node),
            "store_outcomes": dict(self.outcomes),
            "errors": dict(self.errors),
        }


@dataclass(slots=True)
class StressResult:
    """Result of a run."""

    plan: StressPlan
    cold: PassSummary
    warm: PassSummary
    local_nodes: dict[int, str] = field(default_factory=dict)
    """Local node of each session; sessions without one are missing."""
    limit_kind: str = "memcpy"
    """``memcpy``, or ``socket`` if no client has a local node."""
    limit_bytes_per_s: float = 0.0
    removed_blocks: int | None = None
    """Blocks removed at the end; None: they could not be removed."""

    @property
    def expected_hit_ratio(self) -> float:
        """Hit ratio if the store kept every block."""
        return self.plan.hit_blocks / self.plan.request_blocks

    @property
    def problem(self) -> str | None:
        """Why the run failed, if it did."""
        if self.warm.wrong_bytes:
            return f"{self.warm.wrong_bytes:,} wrong bytes were loaded"
        if not self.cold.stored_bytes:
            return f"nothing was stored: {_errors(self.cold)}; kvstore status --detail names the cause"
        if self.warm.blocks and self.plan.hit_blocks and not self.warm.hits:
            return f"nothing was loaded: {_errors(self.warm)}; kvstore status --detail names the cause"
        if self.warm.all_failed:
            return f"every operation failed: {_errors(self.warm)}; kvstore status --detail names the cause"
        if set(+self.warm.outcomes) == {"skipped"}:
            return f"nothing was stored after the first pass: {_errors(self.warm)}; kvstore status --detail names the cause"
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ok": self.problem is None,
            "problem": self.problem,
            "clients": self.plan.clients,
            "sessions": self.plan.all_sessions,
            "mix": str(self.plan.mix),
            "rate": self.plan.rate,
            "block_bytes": self.plan.block_bytes,
            "request_blocks": self.plan.request_blocks,
            "stored_set_bytes": self.plan.stored_bytes,
            "expected_hit_ratio": self.expected_hit_ratio,
            "local_nodes": sorted(set(self.local_nodes.values())),
            "cold": self.cold.to_json(),
            "warm": self.warm.to_json(),
            "limit": {"kind": self.limit_kind, "bytes_per_s": round(self.limit_bytes_per_s)},
            "wrong_bytes": self.warm.wrong_bytes,
            "removed_blocks": self.removed_blocks,
            **program_version(),
        }


def _errors(one: PassSummary) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in one.errors.items()) or "the store is full or drains"
