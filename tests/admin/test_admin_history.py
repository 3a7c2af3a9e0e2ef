"""Figures of several processes, added up per interval."""

from __future__ import annotations

import asyncio
import functools
import math
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.control_api.history import MOST_FAULTS, HistoryQueries, load_by_node, merge, quantile
from kvstore.control_api.store_rpc import NodeRpc, StoreEndpoint, StoreRpc
from kvstore.observe.counters import Counters
from kvstore.observe.history import History, Totals
from kvstore.rpc.codec import history_to_proto

AT_S = 1_700_000_000
NOW_S = AT_S + 100.5


def figures(**counts: list[int]) -> pb.DescribeHistoryResponse:
    lengths = len(next(iter(counts.values())))
    return pb.DescribeHistoryResponse(
        at_seconds=[AT_S + 10 * position for position in range(lengths)],
        lengths_seconds=[10] * lengths,
        counts=[pb.HistoryCounts(name=name.replace("__", "/"), values=values) for name, values in counts.items()],
    )


def test_figures_of_nodes_and_server_are_added() -> None:
    server = figures(lookups=[4, 0], lookup_blocks=[10, 0], hit_blocks=[9, 0], planned_decode_bytes=[0, 70])
    first = figures(dram_bytes=[5, 6])
    first.levels.add(name="dram_used", values=[math.nan, 30])
    first.levels.add(name="dram_capacity", values=[math.nan, 100])
    first.durations.add(name="load", bounds_seconds=[1.0, 2.0], counts=[2, 0, 0, 0, 0, 0])
    second = figures(dram_bytes=[1, 1], fault__kvstore_peer_fetch_failed_total=[0, 3])
    second.durations.add(name="load", bounds_seconds=[1.0, 2.0], counts=[0, 2, 0, 0, 0, 0])
    points, faults = merge(server, {"a": first, "b": second}, 10, NOW_S)
    assert [point.throughput.dram for point in points] == [6, 7]
    assert (points[0].hit_ratio, points[1].hit_ratio) == (0.9, None)
    assert points[1].throughput.planned_decode == 70
    assert [point.nodes for point in points] == [2, 2]
    assert points[0].dram is None
    assert points[1].dram is not None
    assert (points[1].dram.used_bytes, points[1].dram.capacity_bytes) == (30, 100)
    assert points[0].load is not None
    assert (points[0].load.count, points[0].load.p50_s, points[0].load.p99_s) == (4, 1.0, pytest.approx(1.98))
    assert points[1].load is None
    (fault,) = faults
    assert (fault.node_id, fault.at_s, fault.count, fault.what) == ("b", AT_S + 10, 3, "failed fetches from other nodes")
    assert points[1].faults == 3


def test_load_latency_of_a_node_covers_the_last_minute() -> None:
    slow, idle = pb.DescribeHistoryResponse(at_seconds=[AT_S, AT_S + 90], lengths_seconds=[10, 10]), figures(lookups=[1])
    slow.durations.add(name="load", bounds_seconds=[1.0, 2.0], counts=[50, 0, 0, 0, 4, 0])
    found = load_by_node({"a": slow, "b": idle}, 10, NOW_S)
    assert list(found) == ["a"]
    assert (found["a"].count, found["a"].p50_s) == (4, 1.5)


def test_load_latency_of_a_node_leaves_out_the_future() -> None:
    """Otherwise the last minute of a node whose clock is ahead would be as long as its clock is wrong."""
    ahead = pb.DescribeHistoryResponse(at_seconds=[AT_S + 90, AT_S + 110, AT_S + 900], lengths_seconds=[10] * 3)
    ahead.durations.add(name="load", bounds_seconds=[1.0], counts=[1, 0, 2, 0, 50, 0])
    assert load_by_node({"a": ahead}, 10, NOW_S)["a"].count == 3


def test_newest_interval_waits_for_all_processes() -> None:
    """A process that is further behind, such as one that has just started again, does not delay the others."""
    ahead, behind, far_behind = (figures(dram_bytes=[1] * count) for count in (5, 4, 2))
    points, _ = merge(None, {"a": ahead, "b": behind}, 10, NOW_S)
    assert [(point.at_s, point.throughput.dram) for point in points] == [(AT_S + 10 * place, 2) for place in range(4)]
    points, _ = merge(None, {"a": ahead, "c": far_behind}, 10, NOW_S)
    assert [point.throughput.dram for point in points] == [2, 2, 1, 1, 1]


def test_figures_without_metadata_server_and_nodes_are_empty() -> None:
    assert merge(None, {}, 10, NOW_S) == ([], [])


def test_faults_are_bounded_newest_first() -> None:
    many = {f"fault__metric_{number}": [1, 1] for number in range(MOST_FAULTS)}
    _, faults = merge(None, {"a": figures(**many)}, 10, NOW_S)
    assert len(faults) == MOST_FAULTS
    assert {fault.at_s for fault in faults} == {AT_S + 10}


@given(
    counts=st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_quantile_is_within_bounds_and_monotonic(counts: list[int], shares: tuple[float, float]) -> None:
    bounds = [0.1, 1.0, 10.0]
    low, high = (quantile(bounds, counts, share) for share in sorted(shares))
    assert 0 <= low <= high <= 10.0


def test_quantile_above_last_bound_is_that_bound() -> None:
    assert quantile([0.1, 1.0], [0, 0, 5], 0.5) == 1.0


def test_history_of_process_survives_conversion() -> None:
    now = [float(AT_S)]
    count = [0]
    history = History(lambda: Totals({"lookups": count[0]}), lambda: now[0])
    for _ in range(3):
        now[0] += 10
        count[0] += 2
        history.record_if_due()
    points, _ = merge(history_to_proto(history, pb.DescribeHistoryRequest(since_seconds=AT_S + 10)), {}, 10, NOW_S)
    assert [(point.at_s, point.lookups) for point in points] == [(AT_S + 20, 2), (AT_S + 30, 2)]


class AnsweringRpc(StoreRpc):
    """Calls to a store whose nodes give prepared answers."""

    def __init__(self, answers: dict[str, pb.DescribeHistoryResponse]) -> None:
        super().__init__(StoreEndpoint(), Counters())
        self.prepared = answers

    async def nodes(self) -> dict[str, NodeStatus]:
        return {
            node_id: NodeStatus(node=NodeInfo(node_id=node_id, control_address="prepared"), alive=True)
            for node_id in self.prepared
        }

    async def history(self, request: pb.DescribeHistoryRequest) -> pb.DescribeHistoryResponse:
        return pb.DescribeHistoryResponse()

    async def ask_node(
        self,
        status: NodeStatus,
        ask: Callable[[NodeRpc], Awaitable[Any]],
        timeout_s: float | None = None,
        *,
        changes: bool = False,
    ) -> Any:
        return await ask(cast("NodeRpc", PreparedNode(self.prepared[status.node.node_id])))


class PreparedNode:
    """A node that gives a prepared answer to each call."""

    def __init__(self, answer: pb.DescribeHistoryResponse) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return self

    async def __call__(self, method: object, request: object) -> pb.DescribeHistoryResponse:
        return self._answer


def wide() -> pb.DescribeHistoryResponse:
    """A small answer that asks for a list of points times buckets."""
    answer = figures(dram_bytes=[1] * 4_000)
    answer.durations.add(name="load", bounds_seconds=[float(number) for number in range(8_000)])
    return answer


def spoiled(change: str, value: float = 0.0) -> pb.DescribeHistoryResponse:
    answer = recent()
    match change:
        case "lengths":
            del answer.lengths_seconds[1:]
        case "values":
            answer.counts[0].values.append(1)
        case "order":
            answer.at_seconds.reverse()
        case "step":
            answer.at_seconds[0] += 1
        case "level":
            answer.levels.add(name="dram_capacity", values=[value] * 3)
        case "bound":
            answer.durations.add(name="load", bounds_seconds=[1.0, value], counts=[1] * 9)
        case "series":
            for number in range(1_025):
                answer.counts.add(name=str(number), values=[1] * 3)
        case "name":
            answer.counts.add(name="x" * 600, values=[1] * 3)
    return answer


def recent() -> pb.DescribeHistoryResponse:
    """Three intervals, of which the last one ended just now."""
    answer = figures(dram_bytes=[5, 5, 5])
    newest = int(time.time()) // 10 * 10
    answer.at_seconds[:] = [newest - 20, newest - 10, newest]
    return answer


@pytest.mark.parametrize(
    "bad",
    [
        wide,
        *(functools.partial(spoiled, change) for change in ("lengths", "values", "order", "step", "series", "name")),
        *(functools.partial(spoiled, "level", value) for value in (math.inf, -1.0, 1e300)),
        *(functools.partial(spoiled, "bound", value) for value in (math.inf, math.nan, 1.0, -1.0)),
    ],
)
def test_invalid_figures_of_a_node_leave_the_others(bad: Callable[[], pb.DescribeHistoryResponse]) -> None:
    async def ask() -> tuple[list[int], list[str], int]:
        rpc = AnsweringRpc({"bad": bad(), "good": recent()})
        try:
            tracemalloc.start()
            found = await HistoryQueries(rpc).last_hour(0, 10)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await rpc.close()
        return [point.throughput.dram for point in found.points], [one.node_id for one in found.unreached], peak

    points, unreached, peak = asyncio.run(ask())
    assert (points, unreached) == ([5, 5, 5], ["bad"])
    assert peak < 10 << 20


@pytest.mark.parametrize("ahead_s", [60, 86_400, 1 << 40])
def test_node_with_a_clock_ahead_does_not_delay_others(ahead_s: int) -> None:
    now_s = AT_S + 45.0
    good = figures(dram_bytes=[1] * 5)
    ahead = figures(dram_bytes=[1] * 2)
    ahead.at_seconds[:] = [AT_S + ahead_s, AT_S + ahead_s + 10]
    alone, _ = merge(None, {"a": good}, 10, now_s)
    assert merge(None, {"a": good, "b": ahead}, 10, now_s)[0] == alone
    assert len(alone) == 5
