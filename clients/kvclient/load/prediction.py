"""How long a load will take, predicted from the client's own loads. For callers that may compute the blocks instead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Final

from kvclient.results import PATH_HBM, PATH_LOCAL, LoadResult, Lookup, Run
from kvstore.core.types import Tier
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
