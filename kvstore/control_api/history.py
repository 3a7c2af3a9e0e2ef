"""Figures of the last hour of the metadata server and of the nodes, added up per interval."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvstore.control_api import serializers
from kvstore.control_api.schemas import history as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.observe.fault_counters import FAULT
from kvstore.observe.history import INTERVAL_S, POINTS
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import METRICS

MAX_COUNTERS: Final = 1_024
MAX_LEVELS: Final = 64
MAX_HISTOGRAMS: Final = 16
MAX_BUCKETS: Final = 64
_MAX_LEVEL: Final = float(1 << 63)


def check_history(found: pb.DescribeHistoryResponse, step_s: int) -> pb.DescribeHistoryResponse:
    """Return valid figures unchanged. The checks bound the memory and time that a report can cost.

    Args:
        found: figures of one process.
        step_s: requested length of an interval.

    Raises:
        Unavailable: the figures are invalid.
    """
    reason = _reason(found, step_s)
    if reason:
        raise Unavailable(f"the server sent an invalid history: {reason}")
    return found


def _reason(found: pb.DescribeHistoryResponse, step_s: int) -> str:
    """Return the first error in the figures; empty: they are valid."""
    points = len(found.at_seconds)
    if points > POINTS + 1 or len(found.lengths_seconds) != points:
        return "wrong number of points"
    if any(at_s % step_s for at_s in found.at_seconds) or any(a >= b for a, b in pairwise(found.at_seconds)):
        return "wrong times of points"
    if len(found.counts) > MAX_COUNTERS or len(found.levels) > MAX_LEVELS or len(found.durations) > MAX_HISTOGRAMS:
        return "too many series"
    names = [*(one.name for one in found.counts), *(one.name for one in found.levels), *(one.name for one in found.durations)]
    if any(len(name) > MAX_NAME_BYTES for name in names):
        return "a name is too long"
    if any(len(one.values) != points for one in found.counts) or any(len(one.values) != points for one in found.levels):
        return "wrong number of values"
    if not all(math.isnan(value) or 0 <= value <= _MAX_LEVEL for level in found.levels for value in level.values):
        return "wrong levels"
    for timed in found.durations:
        bounds = timed.bounds_seconds
        if len(bounds) >= MAX_BUCKETS or len(timed.counts) != points * (len(bounds) + 1):
            return "wrong number of buckets"
        if not all(0 <= bound < math.inf for bound in bounds) or any(a >= b for a, b in pairwise(bounds)):
            return "wrong bounds of buckets"
    return ""


logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

MOST_FAULTS: Final = 500
RECENT_S: Final = 60
"""Latency of a single node is that of the loads of this time."""


class HistoryQueries:
    """Queries of the figures of the last hour.

    Args:
        rpc: calls to the store.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def last_hour(self, since_s: float, step_s: int, node_id: str | None = None) -> models.HistoryOfLastHour:
        """Figures of the metadata server and of all nodes that answer, or of one node alone.

        Raises:
            NotFound: the node does not exist.
        """
        request = pb.DescribeHistoryRequest(since_seconds=since_s, step_seconds=step_s)

        async def ask(node: NodeRpc) -> pb.DescribeHistoryResponse:
            return check_history(await node(node.stub.DescribeHistory, request), step_s)

        if node_id is not None:
            server, asked = None, await self._rpc.ask_nodes([await self._rpc.node(node_id)], ask)
        else:
            statuses = (await self._rpc.nodes()).values()
            server, asked = await asyncio.gather(self._server(request), self._rpc.ask_nodes(statuses, ask))
        now_s = time.time()
        points, faults = merge(server, asked.answers, step_s, now_s)
        return models.HistoryOfLastHour(
            step_s=step_s,
            now_s=now_s,
            points=points,
            faults=faults,
            load_by_node=load_by_node(asked.answers, step_s, now_s),
            unreached=serializers.unreached(asked.failed),
        )

    async def _server(self, request: pb.DescribeHistoryRequest) -> pb.DescribeHistoryResponse | None:
        """Figures of the metadata server; None if it does not answer, because those of the nodes are useful alone."""
        try:
            return check_history(await self._rpc.history(request), request.step_seconds)
        except KVStoreError as error:
            limited.warning("history lacks the metadata server: %s", error)
            return None


class _Sums:
    """Sums of one interval over several processes."""

    def __init__(self) -> None:
        self.seconds = 0
        self.nodes = 0
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.levels: defaultdict[str, float] = defaultdict(float)
        self.durations: dict[str, tuple[Sequence[float], list[int]]] = {}


def merge(
    server: pb.DescribeHistoryResponse | None, nodes: Mapping[str, pb.DescribeHistoryResponse], step_s: int, now_s: float
) -> tuple[list[models.HistoryEntry], list[models.FaultEntry]]:
    """Add up the intervals of several processes.

    The newest interval is left out until all processes have recorded it; otherwise sums would fall at the end of each chart. A
    process that is more than one interval behind does not delay the others. Intervals in the future, which a process with a wrong
    clock reports, and intervals older than an hour are left out.

    Args:
        server: checked figures of the metadata server.
        nodes: checked figures of nodes, by id.
        step_s: length of an interval.
        now_s: present Unix time.

    Returns:
        The intervals in order of time, and faults with the newest first.
    """
    sums: defaultdict[int, _Sums] = defaultdict(_Sums)
    faults: list[tuple[int, str, str, int]] = []
    newest: list[int] = []
    for node_id, found in [(None, server), *sorted(nodes.items())]:
        if found is None:
            continue
        shown = {
            position: at_s
            for position, at_s in enumerate(found.at_seconds)
            if now_s - INTERVAL_S * POINTS - step_s < at_s <= now_s + step_s
        }
        if not shown:
            continue
        newest.append(max(shown.values()))
        for position, at_s in shown.items():
            into = sums[at_s]
            into.seconds = max(into.seconds, found.lengths_seconds[position])
            into.nodes += node_id is not None
        _add(sums, faults, node_id or "", found, shown)
    faults.sort(key=lambda fault: (-fault[0], fault[1], fault[2]))
    complete_s = min((at_s for at_s in newest if at_s >= max(newest) - step_s), default=0)
    return [_entry(at_s, sums[at_s]) for at_s in sorted(sums) if at_s <= complete_s], [
        _fault(*one) for one in faults[:MOST_FAULTS]
    ]


def load_by_node(
    nodes: Mapping[str, pb.DescribeHistoryResponse], step_s: int, now_s: float
) -> dict[str, models.LatencyPercentiles]:
    """Return the latency of the loads of each node in the last minute. A node without loads is left out.

    Intervals in the future are left out, as in ``merge``.

    Args:
        nodes: checked figures of nodes, by id.
        step_s: length of an interval.
        now_s: present Unix time.
    """
    latencies: dict[str, models.LatencyPercentiles] = {}
    for node_id, found in sorted(nodes.items()):
        sums = _Sums()
        shown = {
            position: 0 for position, at_s in enumerate(found.at_seconds) if now_s - RECENT_S - step_s < at_s <= now_s + step_s
        }
        _add({0: sums}, [], node_id, found, shown)
        latency = _latency(sums, "load")
        if latency is not None:
            latencies[node_id] = latency
    return latencies


def _add(
    sums: Mapping[int, _Sums],
    faults: list[tuple[int, str, str, int]],
    node_id: str,
    found: pb.DescribeHistoryResponse,
    shown: Mapping[int, int],
) -> None:
    """Add the figures of one process.

    Args:
        sums: receives them, by end of the interval.
        faults: receives end, node, metric and count of each fault.
        node_id: the node; empty: the metadata server.
        found: its figures.
        shown: ends of the intervals to add, by position.
    """
    for series in found.counts:
        for position, at_s in shown.items():
            value = series.values[position]
            if value and series.name.startswith(FAULT):
                faults.append((at_s, node_id, series.name.removeprefix(FAULT), value))
                sums[at_s].counts["faults"] += value
            else:
                sums[at_s].counts[series.name] += value
    for level in found.levels:
        for position, at_s in shown.items():
            amount = level.values[position]
            if not math.isnan(amount):
                sums[at_s].levels[level.name] += amount
    for timed in found.durations:
        bounds = list(timed.bounds_seconds)
        width = len(bounds) + 1
        for position, at_s in shown.items():
            known, into = sums[at_s].durations.setdefault(timed.name, (bounds, [0] * width))
            if known == bounds:
                counts = timed.counts[position * width : (position + 1) * width]
                into[:] = [a + b for a, b in zip(into, counts, strict=True)]


def _fault(at_s: int, node_id: str, name: str, count: int) -> models.FaultEntry:
    known = METRICS.get(name)
    what = known.help if known is not None else name
    return models.FaultEntry(at_s=at_s, node_id=node_id or None, metric=name, what=what, count=count)


def _entry(at_s: int, found: _Sums) -> models.HistoryEntry:
    counts = found.counts
    asked, hit = counts["lookup_blocks"], counts["hit_blocks"]
    return models.HistoryEntry(
        at_s=at_s,
        seconds=found.seconds,
        lookups=counts["lookups"],
        hit_ratio=min(1.0, hit / asked) if asked else None,
        lookup=_latency(found, "lookup"),
        load=_latency(found, "load"),
        throughput=models.Throughput(
            dram=counts["dram_bytes"],
            nvme=counts["nvme_bytes"],
            peer=counts["peer_bytes"],
            data_plane=counts["served_bytes"],
            planned_prefill=counts["planned_prefill_bytes"],
            planned_decode=counts["planned_decode_bytes"],
            planned_relay=counts["planned_relay_bytes"],
        ),
        evicted_dram_blocks=counts["evicted_dram_blocks"],
        evicted_nvme_blocks=counts["evicted_nvme_blocks"],
        faults=counts["faults"],
        dram=_fill(found, "dram"),
        nvme=_fill(found, "nvme"),
        nodes=found.nodes,
    )


def _fill(found: _Sums, tier: str) -> models.TierFill | None:
    capacity = found.levels.get(f"{tier}_capacity")
    if not capacity:
        return None
    return models.TierFill(used_bytes=int(found.levels.get(f"{tier}_used", 0)), capacity_bytes=int(capacity))


def _latency(found: _Sums, name: str) -> models.LatencyPercentiles | None:
    bounds, counts = found.durations.get(name, ((), ()))
    if not sum(counts):
        return None
    p50_s, p95_s, p99_s = (quantile(bounds, counts, share) for share in (0.5, 0.95, 0.99))
    return models.LatencyPercentiles(count=sum(counts), p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Quantile of a histogram, interpolated linearly within its bucket.

    Args:
        bounds: upper bounds of the buckets, ascending.
        counts: values per bucket, and values above the last bound, for which that bound is returned.
        share: between 0 and 1.

    Example:
        >>> quantile([1.0, 2.0], [10, 10, 0], 0.75)
        1.5
    """
    rank = share * sum(counts)
    seen, lower = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return lower + (bound - lower) * (rank - seen) / count
        seen, lower = seen + count, bound
    return lower
