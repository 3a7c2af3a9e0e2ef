"""The plan of a read ahead: used once, by the load of the same blocks, and revoked by a load that comes too early."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from kvclient import Paths
from kvclient.load.paths import Plan
from kvclient.load.read_ahead import ReadAhead

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


def planned() -> ReadAhead:
    ahead = ReadAhead(Paths(decode_node="d"))
    ahead.plan_begun()
    assert ahead.plan_ended(BLOCKS, PLAN)
    return ahead


def test_plan_ahead_is_used_once_by_the_same_blocks() -> None:
    ahead = planned()
    assert ahead.plan_for(BLOCKS.copy()) is PLAN
    assert ahead.plan_for(BLOCKS) is None, "a second load would count twice in the planner's queues"


@pytest.mark.parametrize("blocks", [BLOCKS[:-1], BLOCKS + 1, np.arange(0)])
def test_plan_ahead_of_other_blocks_is_not_used(blocks: np.ndarray[Any, Any]) -> None:
    assert planned().plan_for(blocks) is None


def test_load_before_the_plan_revokes_it() -> None:
    ahead, call = ReadAhead(Paths()), Call()
    ahead.plan_begun()
    assert not ahead.ended
    assert ahead.plan_for(BLOCKS) is None
    assert not ahead.plan_ended(BLOCKS, PLAN), "two hosts would read the same block"
    ahead.add_call(call)
    assert call.cancelled_calls == 1
    assert ahead.ended


@pytest.mark.parametrize("plan", [PLAN, None])
def test_end_before_the_plan_cancels_later_calls(plan: Plan | None) -> None:
    ahead, first, second = ReadAhead(Paths()), Call(), Call()
    ahead.add_call(first)
    ahead.plan_begun()
    ahead.end()
    ahead.end()
    assert not ahead.plan_ended(BLOCKS, plan)
    ahead.add_call(second)
    assert first.cancelled_calls
    assert second.cancelled_calls
    assert ahead.ended


def test_paths_of_read_ahead_are_those_given() -> None:
    assert ReadAhead(None).paths is None
    ahead = ReadAhead(Paths(decode_node="d", policy="split"))
    assert ahead.paths == Paths(decode_node="d", policy="split")
    assert ahead.paths is not None
    assert ahead.paths.ahead is ahead
