"""Bounds of the planner against a confined tenant: its parts, the life of its plans, and its reads in a queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded
from kvstore.dualpath.contract import PlanRequest
from kvstore.dualpath.planner import DEADLINE_GRACE_S, MAX_PLAN_LIFE_S, PLAN_LIFE_S, Planner
from kvstore.dualpath.policies import PrefillOnly
from kvstore.dualpath.queues import QUEUE_S, Charge, ReadQueues

RATE = 1_000.0


def planner() -> Planner:
    made = Planner(PrefillOnly())
    made.add_node("p", RATE, 8 * RATE)
    return made


def request(blocks: int = 1) -> PlanRequest:
    return PlanRequest("r", blocks, 100, 16, "p")


def test_tenant_gets_a_quarter_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PARTS_UNDER_WAY", 40)
    made = planner()
    plans = [made.plan(request(), 0.0, tenant="a").plan_id for _ in range(5)]  # each counts as itself and one part
    with pytest.raises(CapacityExceeded, match="of this tenant"):
        made.plan(request(), 0.0, tenant="a")
    with pytest.raises(CapacityExceeded, match="of this tenant"):
        made.fail(plans[0], 0, [], 0.0)
    for other in ("b", None):
        made.plan(request(), 0.0, tenant=other)
    assert made.finish(plans[0], 0.0)
    made.plan(request(), 0.0, tenant="a")
    made.expire(PLAN_LIFE_S + 1)
    assert len(made) == 0
    made.plan(request(), 0.0, tenant="a")


@pytest.mark.parametrize("life_s", [0.0, 100 * MAX_PLAN_LIFE_S])
def test_plan_progress_does_not_extend_life_for_ever(life_s: float) -> None:
    made = planner()
    plan_id = made.plan(request(10_000), 0.0, life_s).plan_id
    done, now = 0, 0.0
    while now < MAX_PLAN_LIFE_S:
        assert made.progress(plan_id, 0, done := done + 1, now)
        assert made.expire(now) == []
        now += PLAN_LIFE_S / 2
    assert made.expire(MAX_PLAN_LIFE_S + DEADLINE_GRACE_S) == [plan_id]


changes = st.lists(
    st.tuples(
        st.sampled_from(["charge", "credit", "stall", "continue"]),
        st.sampled_from(["a", "b", None]),
        st.integers(1, 40),
        st.sampled_from([1, 7, 300, 50_000]),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(changes)
def test_queue_counts_a_tenant_like_one_plan(steps: list[tuple[str, str | None, int, int]]) -> None:
    queues, charges = ReadQueues(), list[tuple[str | None, Charge]]()
    queues.join("p", RATE, RATE)
    for kind, tenant, number, block_bytes in steps:
        if kind == "charge":
            charges.append((tenant, queues.charge("p", None, number, block_bytes, 16, 0.0, tenant=tenant)))
        elif charges and kind == "credit":
            queues.credit(charges[number % len(charges)][1], number, 0.0, moved=False)
        elif charges:
            queues.mark_stalled(charges[number % len(charges)][1], 0.0, stalled=kind == "stall")
        queued = [(of, one.reads.queued * one.reads.block_bytes) for of, one in charges]
        assert min([nbytes for _, nbytes in queued], default=0) >= 0
        for tenant in ("a", "b"):
            assert sum(nbytes for of, nbytes in queued if of == tenant) <= max(RATE * QUEUE_S, 50_000)
        state = queues.state("p", 0.0)
        assert state is not None
        assert state.pending_bytes == sum(nbytes for _, nbytes in queued)
    for _, charge in charges:
        queues.credit(charge, charge.blocks, 0.0, moved=False)
    state = queues.state("p", 0.0)
    assert state is not None
    assert state.pending_bytes == 0
