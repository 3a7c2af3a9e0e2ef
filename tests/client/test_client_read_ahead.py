"""Reads ahead: a plan is used once, by the load of the same blocks, and revoked by a load that comes too early; calls are few."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, found, plan_of
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, KVClient, Paths
from kvclient.load.paths import Plan, PlannedPart
from kvclient.load.read_ahead import ReadAhead
from kvclient.results import NodeRef
from kvproto.v1 import metadata_pb2
from kvstore.core.types import NodeId
from support.wait import wait_until

MakeClient = Callable[..., KVClient]

BLOCKS = np.arange(3, 9)
PLAN = Plan(7, 0, (), "split", "")


class Call(grpc.Future):  # type: ignore[type-arg]
    """A call of which only ``cancel`` and ``done`` are used."""

    def __init__(self) -> None:
        self.cancelled_calls = 0

    def cancel(self) -> bool:
        self.cancelled_calls += 1
        return True

    def done(self) -> bool:
        return self.cancelled_calls > 0

    def _unused(self, *_: Any) -> Any:
        raise AssertionError

    cancelled = running = result = exception = traceback = add_done_callback = _unused


def planned(*parts: PlannedPart) -> tuple[ReadAhead, Call]:
    """A read ahead from depth 10 whose blocks ``BLOCKS`` are planned, and the call that holds them."""
    ahead, call = ReadAhead(Paths(decode_node="d"), 10), Call()
    ahead.begin_plan()
    ahead.use_plan(BLOCKS, Plan(7, 0, parts, "split", ""))
    assert ahead.begin_call(lambda: call, planned=True) is call
    ahead.end_plan()
    return ahead, call


def part(index: int, start: int, count: int) -> PlannedPart:
    return PlannedPart(index, start, count, "decode", NodeRef(NodeId("d"), "c", "d"))


def test_plan_ahead_is_used_once() -> None:
    ahead, call = planned(part(0, 0, 2), part(1, 2, 4))
    plan = ahead.plan_for(10 + BLOCKS)
    assert plan is not None
    assert [(one.start, one.count) for one in plan.parts] == [(0, 2), (2, 4)]
    assert not call.cancelled_calls, "the load takes the blocks from where they are"
    assert ahead.plan_for(10 + BLOCKS) is None


@given(st.sets(st.sampled_from(BLOCKS.tolist()), min_size=1), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_plan_ahead_serves_some_of_its_blocks(wanted: set[int], counts: list[int]) -> None:
    starts = [0, *np.cumsum(counts).tolist()]
    parts = [
        part(at, start, min(count, 6 - start)) for at, (start, count) in enumerate(zip(starts, counts, strict=False)) if start < 6
    ]
    parts += [part(9, parts[-1].start + parts[-1].count, 6 - parts[-1].start - parts[-1].count)]
    ahead, _ = planned(*[one for one in parts if one.count])
    depths = np.array(sorted(wanted)) + 10
    plan = ahead.plan_for(depths)
    assert plan is not None
    whole = {one.index: {int(BLOCKS[at]) + 10 for at in range(one.start, one.start + one.count)} for one in parts}
    served = [int(depth) for one in plan.parts for depth in depths[one.start : one.start + one.count]]
    assert served == depths.tolist()
    for one in plan.parts:
        assert set(depths[one.start : one.start + one.count].tolist()) <= whole[one.index]


@pytest.mark.parametrize("depths", [BLOCKS, BLOCKS + 11, np.arange(0)], ids=["other chain", "beyond", "none"])
def test_load_of_other_blocks_revokes_the_plan(depths: np.ndarray[Any, Any]) -> None:
    ahead, call = planned(part(0, 0, 6))
    near = Call()
    ahead.begin_call(lambda: near, planned=False)
    assert ahead.plan_for(depths) is None
    assert call.cancelled_calls == 1, "two hosts would read the same block"
    assert not near.cancelled_calls
    assert not ahead.plan_is_wanted


def test_plan_ahead_whose_calls_have_ended_is_not_used() -> None:
    ahead, call = planned(part(0, 0, 6))
    call.cancel()
    assert ahead.plan_for(10 + BLOCKS) is None


@pytest.mark.parametrize("planned", [False, True])
def test_load_before_the_first_call_revokes_the_plan(planned: bool) -> None:
    ahead = ReadAhead(Paths())
    ahead.begin_plan()
    if planned:
        ahead.use_plan(BLOCKS, PLAN)
    assert not ahead.ended
    assert ahead.plan_for(BLOCKS) is None
    assert not ahead.plan_is_wanted
    ahead.use_plan(BLOCKS, PLAN)
    assert ahead.begin_call(Call, planned=True) is None
    ahead.end_plan()
    assert ahead.plan_for(BLOCKS) is None
    assert ahead.ended


def test_load_between_calls_uses_the_plan() -> None:
    ahead, first = ReadAhead(Paths()), Call()
    ahead.begin_plan()
    ahead.use_plan(BLOCKS, Plan(7, 0, (part(0, 0, 2), part(1, 2, 4)), "split", ""))
    ahead.begin_call(lambda: first, planned=True)
    plan = ahead.plan_for(BLOCKS)
    assert plan is not None
    assert len(plan.parts) == 2, "the load reads the other part from the planned node itself"
    assert not first.cancelled_calls
    assert ahead.begin_call(Call, planned=True) is None


def test_end_before_the_plan_prevents_later_calls() -> None:
    ahead, first = ReadAhead(Paths()), Call()
    ahead.begin_call(lambda: first, planned=False)
    ahead.begin_plan()
    ahead.end()
    ahead.end()
    ahead.use_plan(BLOCKS, PLAN)
    assert ahead.begin_call(Call, planned=True) is None
    ahead.end_plan()
    assert first.cancelled_calls
    assert ahead.ended
    assert ahead.plan_for(BLOCKS) is None


def test_paths_of_read_ahead_are_those_given() -> None:
    assert ReadAhead(None).paths is None
    ahead = ReadAhead(Paths(decode_node="d", policy="split"))
    assert ahead.paths == Paths(decode_node="d", policy="split")
    assert ahead.paths is not None
    assert ahead.paths.ahead is ahead


# ---- calls ----
@pytest.fixture
def far(make_node: Callable[..., FakeNode]) -> FakeNode:
    """Another host's node."""
    return make_node("far")


def test_read_ahead_in_many_pieces_is_cut(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, far: FakeNode, make_client: MakeClient
) -> None:
    client = make_client(near)
    metadata.plan_script = lambda request: plan_of(far, request.blocks)
    lookup = found(spec, 24, *[(at, 1, far if at % 2 else near) for at in range(24)])
    ahead = client.read_ahead(lookup, paths=Paths(decode_node="far"))
    assert ahead is not None
    wait_until(lambda: ahead.ended)
    assert (near.names().count("ReadAhead"), far.names().count("ReadAhead")) == (8, 0)
    assert client.stats()["client_reads_ahead_refused_total"] == 1


@pytest.mark.parametrize("late", [False, True])
def test_read_ahead_planned_late_calls_no_node(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    far: FakeNode,
    clock: SkewedClock,
    make_client: MakeClient,
    late: bool,
) -> None:
    client = make_client(near)
    budgets_ms = []

    def plan(request: metadata_pb2.PlanLoadRequest) -> metadata_pb2.LoadPlan:
        budgets_ms.append(request.budget_ms)
        clock.ahead_s += 30.0 if late else 10.0
        return plan_of(far, request.blocks)

    metadata.plan_script = plan
    ahead = client.read_ahead(found(spec, 4, (0, 4, far)), deadline_s=20.0, paths=Paths(decode_node="far"))
    assert ahead is not None
    wait_until(lambda: ahead.ended)
    assert budgets_ms[0] <= 20_000
    assert far.names().count("ReadAhead") == (0 if late else 1)
    assert client.stats().get("client_reads_ahead_failed_total", 0) == late


def test_read_ahead_that_waited_too_long_is_not_planned(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, far: FakeNode, clock: SkewedClock, make_client: MakeClient
) -> None:
    client, answers = make_client(near), threading.Event()
    client.context.ahead_threads.submit(answers.wait, 30)
    client.context.ahead_threads.submit(answers.wait, 30)
    ahead = client.read_ahead(found(spec, 4, (0, 4, far)), deadline_s=5.0, paths=Paths(decode_node="far"))
    assert ahead is not None
    clock.ahead_s += 6.0
    answers.set()
    wait_until(lambda: ahead.ended)
    assert "PlanLoad" not in metadata.calls
    assert client.stats()["client_reads_ahead_failed_total"] == 1


def test_read_ahead_thread_that_fails_is_counted(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    far: FakeNode,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvclient.load.read_ahead.storage_runs", broken)
    client = make_client(near)
    ahead = client.read_ahead(found(spec, 4, (0, 4, far)), paths=Paths(decode_node="far"))
    assert ahead is not None
    wait_until(lambda: ahead.ended)
    assert client.stats()["client_bugs_total"] == 1
    assert "RuntimeError: a bug" in caplog.text


def test_close_does_not_make_plans_that_wait(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, far: FakeNode, make_client: MakeClient
) -> None:
    client, answers = make_client(near, breaker_failures=1_000), threading.Event()
    metadata.plan_script = lambda _: (answers.wait(30), metadata_pb2.LoadPlan(plan_id=1))[1]
    calls = 40
    try:
        lookup = found(spec, 4, (0, 4, far))
        begun = [client.read_ahead(lookup, paths=Paths(decode_node="far")) for _ in range(calls)]
        wait_until(lambda: "PlanLoad" in metadata.calls)
        client.close()
        assert all(one is not None and one.ended for one in begun)
        assert metadata.calls.count("PlanLoad") < calls
        client.context.metadata.report_loads({1: ()}, finished=True)  # type: ignore[union-attr]
        assert client.stats()["client_reports_dropped_total"] == 1
    finally:
        answers.set()
