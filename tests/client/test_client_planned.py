"""Planned loads with parts that do not end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, found, plan_of

from kvclient import CacheSpec, KVClient, Paths
from kvclient.load import planned
from kvclient.load.sink import BlockSink, LoadRequest, Positions
from kvclient.load.sources.storage_path import RemotePath
from kvproto.v1 import metadata_pb2
from kvstore.core.errors import Unavailable
from support.wait import wait_until


def test_load_waits_for_cancelled_part_and_says_so(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    make_node: Callable[..., FakeNode],
    make_client: Callable[..., KVClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The part may still write to the buffer, so the call must not return. A counter and a log line say so."""
    client, far, blocked = make_client(near), make_node("far"), threading.Event()
    metadata.plan_script = lambda request: plan_of(far, request.blocks)
    monkeypatch.setattr(planned, "_END_S", 0.05)
    monkeypatch.setattr(RemotePath, "_fetch", lambda *_: blocked.wait(30))
    data, lookup = np.zeros((4, spec.block_bytes), np.uint8), found(spec, 4, (0, 4, far))
    hits: list[int] = []

    def load() -> None:
        hits.append(client.load(lookup, data, deadline_s=0.2, paths=Paths(decode_node="far")).hit_blocks)

    caller = threading.Thread(target=load)
    caller.start()
    try:
        wait_until(lambda: client.stats().get("client_parts_late_total") == 1)
        assert caller.is_alive()
    finally:
        blocked.set()
        caller.join(10)
    assert hits == [0]


def test_plan_forgotten_is_described_three_times_at_most(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    make_node: Callable[..., FakeNode],
    make_client: Callable[..., KVClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, far = make_client(near), make_node("far")
    metadata.plan_script = lambda request: plan_of(far, request.blocks)
    metadata.forgotten = [1]  # also after a description, as if that had been lost

    def done() -> int:
        return max([part.blocks_done for report in metadata.reports for part in report.parts], default=0)

    def described() -> list[metadata_pb2.LoadReport]:
        return [report for report in metadata.reports if report.HasField("restored_plan")]

    def bring_three(_: RemotePath, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        for number, position in enumerate(missing[:3]):
            sink.layers_arrived(np.array([position]), 0, request.context.shape.layers)
            wait_until(lambda number=number: done() > number)
            wait_until(lambda: len(described()) >= 3)

    monkeypatch.setattr(RemotePath, "_fetch", bring_three)
    data, lookup = np.zeros((8, spec.block_bytes), np.uint8), found(spec, 8, (0, 8, far))
    client.load(lookup, data, paths=Paths(decode_node="far", stall_s=60.0), deadline_s=60.0)
    assert len(described()) == 3
    for report in described():
        [part] = report.restored_plan.parts
        assert (part.index, part.start, part.count, part.node_id) == (0, 0, 8, "far")
        assert (report.restored_plan.load.prefill_node, report.restored_plan.load.blocks) == ("near", 8)
        assert 0 < report.restored_plan.load.budget_ms <= 60_000
        assert [(one.index, one.blocks_done) for one in report.parts] == [(0, 1)]


@pytest.mark.parametrize("described", [True, False])
def test_part_of_forgotten_plan_fails_is_planned_as_new_load(
    described: bool,
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    make_node: Callable[..., FakeNode],
    make_client: Callable[..., KVClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client learns that the planner has forgotten the plan from a progress report, or when it asks for a new path."""
    client, far, asked = make_client(near), make_node("far"), list[int]()

    def plan(request: metadata_pb2.PlanLoadRequest) -> metadata_pb2.LoadPlan:
        asked.append(request.blocks)
        answer = plan_of(far, request.blocks)
        answer.plan_id = len(asked)
        return answer

    metadata.plan_script, metadata.forgotten = plan, [1] if described else []
    fetched: list[list[int]] = []

    def bring(_: RemotePath, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        fetched.append(missing.tolist())
        first = len(asked) == 1
        sink.layers_arrived(missing[:3] if first else missing, 0, request.context.shape.layers)
        if first:
            wait_until(lambda: not described or any(report.HasField("restored_plan") for report in metadata.reports))
            raise Unavailable("the node was killed")

    monkeypatch.setattr(RemotePath, "_fetch", bring)
    data, lookup = np.zeros((8, spec.block_bytes), np.uint8), found(spec, 8, (0, 8, far))
    client.load(lookup, data, paths=Paths(decode_node="far", stall_s=60.0), deadline_s=60.0)
    assert asked == [8, 5]
    assert fetched == [list(range(8)), list(range(3, 8))]
    assert ("ReplanLoad" in metadata.calls) is not described
