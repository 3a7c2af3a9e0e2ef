"""The plan of a read ahead: used once, by the load of the same blocks, and revoked by a load that comes too early."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import Paths
from kvclient.load.paths import Plan, PlannedPart
from kvclient.load.read_ahead import ReadAhead
from kvclient.results import NodeRef
from kvstore.core.types import NodeId

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
    ahead.add_call(call, planned=True)
    ahead.end_plan(BLOCKS, Plan(7, 0, parts, "split", ""))
    ahead.end_plan(BLOCKS, None)
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
    ahead.add_call(near, planned=False)
    assert ahead.plan_for(depths) is None
    assert call.cancelled_calls == 1, "two hosts would read the same block"
    assert not near.cancelled_calls
    assert not ahead.plan_is_wanted


def test_plan_ahead_whose_calls_have_ended_is_not_used() -> None:
    ahead, call = planned(part(0, 0, 6))
    call.cancel()
    assert ahead.plan_for(10 + BLOCKS) is None


def test_load_before_the_plan_revokes_it() -> None:
    ahead, call = ReadAhead(Paths()), Call()
    ahead.begin_plan()
    assert not ahead.ended
    assert ahead.plan_for(BLOCKS) is None
    assert not ahead.plan_is_wanted
    ahead.add_call(call, planned=True)
    ahead.end_plan(BLOCKS, PLAN)
    assert call.cancelled_calls == 1
    assert ahead.plan_for(BLOCKS) is None
    assert ahead.ended


def test_end_before_the_plan_cancels_later_calls() -> None:
    ahead, first, second = ReadAhead(Paths()), Call(), Call()
    ahead.add_call(first, planned=False)
    ahead.begin_plan()
    ahead.end()
    ahead.end()
    ahead.add_call(second, planned=True)
    ahead.end_plan(BLOCKS, PLAN)
    assert first.cancelled_calls
    assert second.cancelled_calls
    assert ahead.ended
    assert ahead.plan_for(BLOCKS) is None


def test_paths_of_read_ahead_are_those_given() -> None:
    assert ReadAhead(None).paths is None
    ahead = ReadAhead(Paths(decode_node="d", policy="split"))
    assert ahead.paths == Paths(decode_node="d", policy="split")
    assert ahead.paths is not None
    assert ahead.paths.ahead is ahead
