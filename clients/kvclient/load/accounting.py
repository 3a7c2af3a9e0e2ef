"""Hit accounting: every requested block is a hit, by path and tier, or a miss, for one reason.

Requested blocks are those that a lookup did not find and those that a load was to bring: an engine that looks up a prompt and
then loads what was found has requested each block once. A repeated lookup requests the blocks again. Tokens are blocks times the
namespace's ``block_tokens``.

The times of loads also predict how long a load will take (``LoadPredictor``), for callers that may compute the blocks instead.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np

from kvclient.options import ClientOptions
from kvclient.results import PATH_HBM, PATH_LOCAL, LoadResult, Lookup, Outcomes, Run
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, KVStoreError
from kvstore.core.types import Outcome, Tier
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.metric_definitions.label_values import MISS_REASONS, NONE, PATHS
from kvstore.observe.metrics import Event
from kvstore.observe.slow_loads import LoadRecord, RecentLoads
from kvstore.observe.tracing import request_id
from kvstore.recompute.decisions import Segment
from kvstore.recompute.load_estimate import LoadEstimates

STORAGE_LINKS: Final = "storage links"
"""The NVMe of all other hosts: such loads are planned, and read over several links at once."""
_MOST_PENDING = 64


def sources_of(result: LoadResult) -> dict[Hashable, int]:
    """Return the bytes of a load by source, the faster tiers first.

    Bytes from several nodes and tiers are divided in proportion.
    """
    total = result.bytes_loaded
    here_only = result.bytes_by_path.keys() <= {PATH_HBM, PATH_LOCAL}
    sizes: dict[Hashable, int] = {}
    for tier, of_tier in sorted(result.bytes_by_tier.items()):
        if tier is Tier.NVME and not here_only:
            sizes[STORAGE_LINKS] = of_tier
            continue
        for node, of_node in result.bytes_by_node.items():
            sizes[node, tier] = round(of_node * of_tier / total)
    return sizes


def nearest_segments(runs: Sequence[Run], start: int, stop: int, known: LoadEstimates, own_node: str) -> list[Segment] | None:
    """Return the source of each of the blocks ``[start, stop)``, as consecutive blocks; None: some block has none.

    A load asks the nearest sources first. Among equally near ones, the cheapest that was measured counts.

    Args:
        runs: the replicas, from the index.
        start: first block.
        stop: position after the last block.
        known: estimates of sources.
        own_node: the node of this host; empty: none, or it is not known yet.
    """

    def source(run: Run) -> Hashable:
        return STORAGE_LINKS if run.tier is Tier.NVME and run.node_id != own_node else (str(run.node_id), run.tier)

    def per_byte_s(run: Run) -> float:
        line = known.line(source(run))
        return float("inf") if line is None else line.per_byte_s

    by_start = sorted(range(len(runs)), key=lambda number: runs[number].start)
    begun: list[tuple[int, float, int]] = []
    """A heap of runs that start at or before ``at``, the best first. Runs that have ended are removed from its top."""
    segments: list[Segment] = []
    at, following = start, 0
    while at < stop:
        while following < len(runs) and runs[by_start[following]].start <= at:
            number = by_start[following]
            heappush(begun, (runs[number].distance, per_byte_s(runs[number]), number))
            following += 1
        while begun and runs[begun[0][-1]].end <= at:
            heappop(begun)
        if not begun:
            return None
        best = runs[begun[0][-1]]
        end = min(stop, best.end, runs[by_start[following]].start if following < len(runs) else stop)
        nearest = source(best)
        if segments and segments[-1].source == nearest:
            segments[-1] = Segment(nearest, segments[-1].blocks + end - at)
        else:
            segments.append(Segment(nearest, end - at))
        at = end
    return segments


def bytes_by_source(segments: Sequence[Segment], blocks: int, block_bytes: int) -> dict[Hashable, int]:
    """Return the bytes that a load of the first blocks reads from each source."""
    sizes: dict[Hashable, int] = {}
    for source, count in segments:
        taken = min(count, blocks)
        blocks -= taken
        if taken:
            sizes[source] = sizes.get(source, 0) + taken * block_bytes
    return sizes


class LoadPredictor:
    """Estimates of one client. Thread-safe. A load only notes its sample; estimates are made when a prediction is asked for.

    Args:
        block_bytes: bytes per block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pending: deque[tuple[dict[Hashable, int], float]] = deque(maxlen=_MOST_PENDING)
        self._estimates = LoadEstimates()
        self._lock = threading.Lock()

    def record(self, result: LoadResult) -> None:
        """Note a load that brought everything."""
        if result.error is None and result.hit_blocks == len(result.outcomes):
            self._pending.append((sources_of(result), result.seconds))

    def seconds_from(self, node: str, tier: Tier, nbytes: int) -> float | None:
        """Return the predicted seconds of a load from one tier of a node; None: nothing was loaded from it yet."""
        with self._lock:
            self._record_pending()
            return self._estimates.seconds({(node, tier): nbytes})

    def _record_pending(self) -> None:
        while self._pending:
            self._estimates.record(*self._pending.popleft())

    def predict(self, lookup: Lookup, own_node: str) -> float | None:
        """Return the predicted seconds of a load by a client of ``own_node``; None: one of its sources was not measured yet."""
        with self._lock:
            self._record_pending()
            segments = nearest_segments(lookup.runs, 0, lookup.hit_blocks, self._estimates, own_node)
            if segments is None:
                return None
            return self._estimates.seconds(bytes_by_source(segments, lookup.hit_blocks, self._block_bytes))


_limited = LimitedLog(logging.getLogger("kvclient"), interval_s=1.0)

_TIER_NAMES: Final = {0: NONE, **{int(tier): tier.name.lower() for tier in Tier}}
_HITS: Final = {
    (path, tier): (
        client_metrics.HIT_BLOCKS[path, name],
        client_metrics.HIT_TOKENS[path, name],
        client_metrics.LOAD_SECONDS[path, name],
    )
    for path in (*PATHS, NONE)
    for tier, name in _TIER_NAMES.items()
}
_MISSES: Final = {reason: (client_metrics.MISSED_BLOCKS[reason], client_metrics.MISSED_TOKENS[reason]) for reason in MISS_REASONS}
_LOADS: Final = (client_metrics.LOADS, client_metrics.LOAD_BLOCKS, client_metrics.LOAD_HIT_BLOCKS)
_NOTHING: Final = (NONE, 0)
_OUTCOME_REASONS: Final = {
    Outcome.CORRUPT: "corrupt",
    Outcome.UNAVAILABLE: "node_lost",
    Outcome.TIMEOUT: "deadline",
    Outcome.NO_SPACE: "capacity",
}


def count_asked(counters: Counters, block_tokens: int, hits: Mapping[tuple[str, int], int], missed: Mapping[str, int]) -> None:
    """Count requested blocks.

    Args:
        counters: the client's.
        block_tokens: tokens per block.
        hits: blocks by path and tier.
        missed: blocks by reason, see ``MISS_REASONS``.
    """
    names: list[Event] = []
    blocks: list[int] = []
    for source, count in hits.items():
        names += _HITS.get(source, _HITS[_NOTHING])[:2]
        blocks += (count, count * block_tokens)
    for reason, count in missed.items():
        names += _MISSES[reason]
        blocks += (count, count * block_tokens)
    asked = sum(hits.values()) + sum(missed.values())
    names += (client_metrics.ASKED_BLOCKS, client_metrics.ASKED_TOKENS)
    blocks += (asked, asked * block_tokens)
    counters.add_all(names, blocks)


class LoadTrace:
    """Facts about one load that explain its result: the hits of its lookup, and the time of each phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.named_blocks: int | None = None
        """Number of leading blocks that its lookup found; None: all, or the load did no lookup."""
        self.index_failed = False
        """Whether its lookup failed."""
        self.spent_s: dict[str, float] = {}
        """Seconds by phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the ``with`` statement to a phase. Concurrent phases count in full."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self._clock.now_s() - began_s


def missed_reasons(outcomes: Outcomes, trace: LoadTrace, *, cancelled: bool) -> dict[str, int]:
    """Return the number of blocks of a load that did not arrive, by reason."""
    missed: dict[str, int] = {}
    found = np.bincount(outcomes, minlength=len(Outcome) + 1).tolist()
    for outcome, reason in _OUTCOME_REASONS.items():
        if found[outcome]:
            missed[reason] = found[outcome]
    if found[Outcome.MISS]:
        named = len(outcomes) if trace.named_blocks is None else trace.named_blocks
        evicted = int(np.count_nonzero(outcomes[:named] == Outcome.MISS))
        if evicted:
            missed["evicted"] = evicted
        if found[Outcome.MISS] > evicted:
            missed["index_down" if trace.index_failed else "unknown"] = found[Outcome.MISS] - evicted
    if cancelled and "node_lost" in missed:  # the caller cancelled the reads
        missed["deadline"] = missed.get("deadline", 0) + missed.pop("node_lost")
    left = len(outcomes) - found[Outcome.HIT] - sum(missed.values())
    return {**missed, "other": left} if left else missed


class HitAccounting:
    """Metrics, recent loads and slow-load lines of one client.

    Args:
        block_tokens: tokens per block.
        block_bytes: bytes per block.
        incidents: counters and log of the client.
        options: define which loads are slow.
    """

    def __init__(self, block_tokens: int, block_bytes: int, incidents: LimitedLog, options: ClientOptions) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._counters = incidents.counters
        self._slow_s = options.slow_load_s
        self.recent = RecentLoads()
        self.predictor = LoadPredictor(block_bytes)

    def not_found(self, missed: int, error: KVStoreError | None) -> None:
        """Count the blocks that an engine's lookup did not find, or could not, because of an error."""
        if missed:
            reason = "unknown" if error is None else "index_down"
            count_asked(self._counters, self._block_tokens, {}, {reason: missed})

    def refused(self, blocks: int, error: KVStoreError) -> None:
        """Count the blocks of a call that was not done or failed unexpectedly."""
        if blocks:
            kinds = {CapacityExceeded: "capacity", DeadlineExceeded: "deadline"}
            count_asked(self._counters, self._block_tokens, {}, {kinds.get(type(error), "other"): blocks})

    def account(
        self, result: LoadResult, sources: Mapping[tuple[str, int], int], trace: LoadTrace, *, cancelled: bool = False
    ) -> None:
        """Count a load that has ended, and keep it among the recent ones.

        Args:
            result: its result.
            sources: its hits by path and tier.
            trace: facts about it.
            cancelled: whether its caller cancelled it.
        """
        counters, blocks = self._counters, len(result.outcomes)
        hits = sum(sources.values())
        missed = missed_reasons(result.outcomes, trace, cancelled=cancelled) if hits < blocks else {}
        count_asked(counters, self._block_tokens, sources, missed)
        most = max(sources, key=lambda source: sources[source]) if sources else _NOTHING
        counters.observe(_HITS.get(most, _HITS[_NOTHING])[2], result.seconds)
        counters.add_all(_LOADS, (1, blocks, hits))
        for path, size in result.bytes_by_path.items():
            counters.add(client_metrics.LOADED_BYTES[path], size)
        load = _Ended(
            request_id.get(),
            result.seconds,
            blocks,
            result.hit_blocks if missed else blocks,
            sources,
            missed,
            trace.spent_s,
            result.error,
            self._block_bytes,
        )
        self.recent.add(load.seconds, load.record)
        self.predictor.record(result)
        if tracing.on():
            tracing.note(blocks=blocks, hit_blocks=load.hit_blocks, reason=load.reason())
        if result.seconds > self._slow_s:
            counters.add(client_metrics.SLOW_LOADS)
            record = load.record()
            _limited.warning(
                "load slow: %s (seconds=%.3f, blocks=%d, of=%d, reason=%s, parts=%s)",
                record.request_id,
                result.seconds,
                hits,
                blocks,
                record.reason,
                record.parts,
            )


@dataclass(frozen=True, slots=True)
class _Ended:
    """Facts about a load that has ended. Its record is formatted on request."""

    request_id: str
    seconds: float
    blocks: int
    hit_blocks: int
    sources: Mapping[tuple[str, int], int]
    missed: Mapping[str, int]
    spent_s: Mapping[str, float]
    error: KVStoreError | None
    block_bytes: int

    def record(self) -> LoadRecord:
        parts: dict[str, object] = {f"{phase}_s": round(spent, 6) for phase, spent in self.spent_s.items()}
        parts |= {f"{path}_{_TIER_NAMES[tier]}_bytes": count * self.block_bytes for (path, tier), count in self.sources.items()}
        parts |= {f"missed_{name}_blocks": count for name, count in self.missed.items()}
        seconds = round(self.seconds, 6)
        return LoadRecord(self.request_id, seconds, self.blocks, self.hit_blocks, self.reason(), parts)

    def reason(self) -> str:
        """Return a short text: the longest phase of a load, its hits and its misses. Phases overlap, so no share is named."""
        said = []
        if self.spent_s:
            phase = max(self.spent_s, key=lambda name: self.spent_s[name])
            said.append(f"longest phase: {phase} ({self.spent_s[phase]:.3f} s)")
        said += [f"{count} blocks {path} {_TIER_NAMES[tier]}" for (path, tier), count in self.sources.items()]
        said += [f"{count} missed: {reason}" for reason, count in self.missed.items()]
        if self.error is not None:
            said.append(str(self.error))
        return "; ".join(said)
