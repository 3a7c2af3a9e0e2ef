"""Planner and queues against a model that knows which part owes each block."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, NotFound, Unavailable
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.dualpath.contract import MAX_RELAYS, LoadPlan, NodeState, PlanPart, PlanRequest, ReadSide, Share
from kvstore.dualpath.planner import (
    DEADLINE_GRACE_S,
    DECISION_PARTS_KEPT,
    MAX_PLAN_LIFE_S,
    PATIENCE_S,
    PLAN_LIFE_S,
    Planner,
    missing_spans,
    parts_of,
)
from kvstore.dualpath.policies import POLICIES, Oracle, PrefillOnly, ShorterQueue, policy_named
from kvstore.dualpath.queues import QUEUE_S, ReadQueues
from kvstore.dualpath.split import Split

NODES = ("a", "b", "c", "d", "e")
BLOCK_TOKENS = 16
LIFE = 10.0


def spans_of(flags: list[bool], start: int) -> list[tuple[int, int]]:
    """Return (first block, count) of each run of true flags; ``start`` is the block of the first flag."""
    runs = [(flag, sum(1 for _ in run)) for flag, run in groupby(flags)]
    ends = list(accumulate(count for _, count in runs))
    return [(start + end - count, count) for (flag, count), end in zip(runs, ends, strict=True) if flag]


@dataclass
class PlanModel:
    request: PlanRequest
    deadline: float
    last: float
    attempt: int = 0
    parts: dict[int, PlanPart] = field(default_factory=dict)
    owed: dict[int, list[int]] = field(default_factory=dict)
    """Part -> its blocks that have not been reported arrived, in order; failed parts are absent."""
    arrived: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    into_known: set[int] = field(default_factory=set)
    """Parts that are forwarded to a prefill node that was known when they were planned."""

    def hear(self, now: float) -> None:
        """Progress moves the deadline, not beyond the end of the plan's life."""
        self.deadline = max(self.deadline, min(now + LIFE, self.last))


class PlannerMachine(RuleBasedStateMachine):
    """The queues must equal the model's charges after any sequence of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(ShorterQueue(), plan_life_s=LIFE, patience_s=math.inf, decisions_kept=5)
        self.now = 100.0
        self.alive: set[str] = set()
        self.known: set[str] = set()
        self.live: dict[int, PlanModel] = {}
        self.over: list[int] = []
        self.late = 0

    # ---- nodes ----

    @rule(node=st.sampled_from(NODES))
    def join(self, node: str) -> None:
        self.planner.add_node(node, 1e9, 4e9)
        self.alive.add(node)
        self.known.add(node)

    @rule(node=st.sampled_from(NODES))
    def gone(self, node: str) -> None:
        told = self.planner.remove_node(node)
        assert set(told) == {
            (plan_id, index)
            for plan_id, model in self.live.items()
            for index, owed in model.owed.items()
            if owed and model.parts[index].node == node
        }
        self.alive.discard(node)

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def other_policy(self, name: str) -> None:
        self.planner.policy = Split(least_blocks=1, least_bytes=0) if name == "split" else policy_named(name)

    @rule(seconds=st.sampled_from([0.1, 3.0, 6.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    # ---- plans ----

    @rule(
        blocks=st.integers(0, 12),
        block_bytes=st.integers(1, 1_000),
        pair=st.tuples(st.sampled_from(NODES), st.none() | st.sampled_from(NODES)),
        relays=st.lists(st.sampled_from(NODES), max_size=3),
        life=st.sampled_from([0.0, 0.05, 5.0, 25.0]),
    )
    def plan(self, blocks: int, block_bytes: int, pair: tuple[str, str | None], relays: list[str], life: float) -> None:
        request = PlanRequest("r", blocks, block_bytes, BLOCK_TOKENS, *pair, tuple(relays))
        usable = {name for name, _ in request.candidates()} & self.alive
        if blocks and not usable:
            with pytest.raises(Unavailable):
                self.planner.plan(request, self.now, life)
            return
        answer = self.planner.plan(request, self.now, life)
        assert answer.attempt == 0
        assert answer.plan_id not in self.live
        assert answer.plan_id not in self.over
        model = self.live[answer.plan_id] = PlanModel(
            request,
            self.now + (min(life, LIFE) if life else LIFE),
            self.now + (life or MAX_PLAN_LIFE_S) + DEADLINE_GRACE_S,
        )
        self.started(model, answer, set(range(blocks)))

    def started(self, model: PlanModel, answer: LoadPlan, missing: set[int]) -> None:
        """Parts of an answer are exactly the missing blocks, on nodes that may read them."""
        model.attempt = answer.attempt
        laid = [block for part in answer.parts for block in range(part.start, part.end)]
        if answer.reasons.policy == "oracle":
            assert laid == []
        else:
            assert sorted(laid) == sorted(missing)
        sides = dict(model.request.candidates())
        for part in answer.parts:
            assert part.index == len(model.parts)
            assert part.node in self.alive - model.failed
            assert part.side is sides[part.node]
            model.parts[part.index] = part
            model.owed[part.index] = list(range(part.start, part.end))
            if part.side is not ReadSide.PREFILL and model.request.prefill_node in self.known:
                model.into_known.add(part.index)
        assert {state.node for state in answer.reasons.nodes} == set(sides) & self.alive - model.failed
        assert set(answer.reasons.excluded) == set(sides) - (self.alive - model.failed)
        assert answer.reasons.predicted_seconds >= 0
        assert self.planner.decisions()[-1] is answer

    @precondition(lambda self: any(model.parts for model in self.live.values()))
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        plan_id, index = self.pick_part(data)
        model = self.live[plan_id]
        part = model.parts[index]
        done = data.draw(st.integers(0, part.count))
        going = self.planner.progress(plan_id, index, done, self.now)
        if index not in model.owed:
            assert not going
            self.late += 1
            return
        assert going
        before = part.count - len(model.owed[index])
        if done > before:
            model.hear(self.now)
        for _ in range(done - before):
            model.arrived.add(model.owed[index].pop(0))

    @precondition(lambda self: any(model.parts for model in self.live.values()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        plan_id, index = self.pick_part(data)
        model = self.live[plan_id]
        part = model.parts[index]
        flags = data.draw(st.lists(st.booleans(), min_size=part.count, max_size=part.count))
        spans = spans_of(flags, part.start)
        if index not in model.owed:
            with pytest.raises(InvalidArgument):
                self.planner.fail(plan_id, index, spans, self.now)
            return
        missing = {block for block, flag in zip(range(part.start, part.end), flags, strict=True) if not flag}
        model.failed.add(part.node)
        model.hear(self.now)
        del model.owed[index]
        usable = {name for name, _ in model.request.candidates()} & self.alive - model.failed
        if missing and not usable:
            with pytest.raises(Unavailable):
                self.planner.fail(plan_id, index, spans, self.now)
            del self.live[plan_id]
            self.over.append(plan_id)
            return
        answer = self.planner.fail(plan_id, index, spans, self.now)
        assert answer.plan_id == plan_id
        assert answer.attempt == model.attempt + 1
        self.started(model, answer, missing)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), aborts=st.booleans())
    def end(self, data: st.DataObject, aborts: bool) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.live)))
        assert (self.planner.abort if aborts else self.planner.finish)(plan_id, self.now)
        del self.live[plan_id]
        self.over.append(plan_id)

    @rule()
    def expire(self) -> None:
        dead = {plan_id for plan_id, model in self.live.items() if model.deadline <= self.now}
        assert set(self.planner.expire(self.now)) == dead
        for plan_id in dead:
            del self.live[plan_id]
        self.over += sorted(dead)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def late_report(self, data: st.DataObject) -> None:
        plan_id = data.draw(st.sampled_from(self.over))
        assert not self.planner.progress(plan_id, 0, 1, self.now)
        assert not self.planner.finish(plan_id, self.now)
        assert not self.planner.abort(plan_id, self.now)
        with pytest.raises(NotFound):
            self.planner.fail(plan_id, 0, (), self.now)
        self.late += 4

    def pick_part(self, data: st.DataObject) -> tuple[int, int]:
        return data.draw(
            st.sampled_from([(plan_id, index) for plan_id, model in sorted(self.live.items()) for index in model.parts])
        )

    # ---- invariants ----

    @invariant()
    def queues_hold_what_is_owed(self) -> None:
        for node in self.known:
            state = self.planner.queues.state(node, self.now)
            assert state is not None
            assert state.alive == (node in self.alive)
            blocks = nbytes = sending = receiving = 0
            for model in self.live.values():
                for index, owed in model.owed.items():
                    part, amount = model.parts[index], len(owed) * model.request.block_bytes
                    if part.node == node:
                        blocks, nbytes = blocks + len(owed), nbytes + amount
                        sending += amount if part.side is not ReadSide.PREFILL else 0
                    if index in model.into_known and model.request.prefill_node == node:
                        receiving += amount
            assert state.pending_tokens == blocks * BLOCK_TOKENS
            assert state.pending_bytes == nbytes
            assert state.sending_bytes == sending
            assert state.receiving_bytes == receiving
            assert state.snic > 0

    @invariant()
    def counters_add_up(self) -> None:
        counters = self.planner.counters
        assert len(self.planner) == len(self.live)
        assert counters.plans == counters.finished + counters.given_up + counters.expired + len(self.live)
        assert counters.late_reports == self.late
        assert len(self.planner.decisions()) <= 5


TestPlannerModel = PlannerMachine.TestCase
TestPlannerModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- single cases ----


def two_nodes(policy: PrefillOnly | Split | Oracle | None = None) -> Planner:
    planner = Planner(policy or Split(least_blocks=1, least_bytes=0))
    for node in ("p", "d"):
        planner.add_node(node, 1e9, 8e9)
    return planner


def test_plan_keeps_indexes_and_generations() -> None:
    planner = two_nodes()
    planner.plan(PlanRequest("first", 100, 10_000_000, 64, "p", "d"), 0.0)
    second = planner.plan(PlanRequest("second", 100, 10_000_000, 64, "p", "d"), 0.0)
    assert [(state.node, state.pending_bytes, state.pending_tokens) for state in second.reasons.nodes] == [
        ("p", 500_000_000, 3200),
        ("d", 500_000_000, 3200),
    ]
    assert second.reasons.predicted_seconds == pytest.approx(1.0)
    assert second.reasons.policy == "split"


def test_replan_reads_exactly_the_missing_blocks() -> None:
    planner = two_nodes()
    planner.add_node("r", 1e9, 8e9)
    first = planner.plan(PlanRequest("r", 100, 1_000_000, 64, "p", "d", ("r",)), 0.0)
    by_node = {part.node: part for part in first.parts}
    assert set(by_node) == {"p", "d", "r"}
    lost = by_node["d"]
    planner.remove_node("d")
    again = planner.fail(first.plan_id, lost.index, [(lost.start, 5), (lost.start + 9, 1)], 0.1)
    assert again.attempt == 1
    assert {part.node for part in again.parts} <= {"p", "r"}
    assert sorted(block for part in again.parts for block in range(part.start, part.end)) == [
        block for block in range(lost.start + 5, lost.end) if block != lost.start + 9
    ]
    assert min(part.index for part in again.parts) == len(first.parts)


def test_failed_prefill_node_leaves_reads_to_decode_node() -> None:
    planner = two_nodes()
    planner.remove_node("p")
    plan = planner.plan(PlanRequest("r", 10, 1_000_000, 64, "p", "d"), 0.0)
    assert {part.node for part in plan.parts} == {"d"}
    assert plan.reasons.excluded == ("p",)


def test_oracle_and_empty_request_read_nothing() -> None:
    assert two_nodes(Oracle()).plan(PlanRequest("r", 10, 1_000, 64, "p", "d"), 0.0).parts == ()
    assert two_nodes().plan(PlanRequest("r", 0, 1_000, 64, "p", "d"), 0.0).parts == ()
    assert Planner(Split()).plan(PlanRequest("r", 0, 1_000, 64, "p", "d"), 0.0).parts == ()


def test_planner_offers_idlest_nodes_as_relays() -> None:
    planner = Planner(Split(least_blocks=1, least_bytes=0), relays=2)
    for node in ("p", "d", "busy", "idle", "dead", "gone"):
        planner.add_node(node, 1e9, 8e9)
    planner.queues.charge("busy", None, 900, 1_000_000, 64, 0.0)
    planner.remove_node("dead")
    planner.queues.forget("gone")
    planner.queues.forget("never")
    plan = planner.plan(PlanRequest("r", 90, 1_000_000, 64, "p", "d"), 0.0)
    assert plan.request.relays == ("idle", "busy")
    assert {part.node for part in plan.parts} == {"p", "d", "idle"}
    named = planner.plan(PlanRequest("r", 90, 1_000_000, 64, "p", "d", ("busy",)), 0.0)
    assert named.request.relays == ("busy",)


def test_node_that_rejoins_starts_with_empty_queue() -> None:
    planner = two_nodes(PrefillOnly())
    old = planner.plan(PlanRequest("r", 10, 1_000, 64, "p", "d"), 0.0)
    planner.queues.forget("p")
    assert planner.queues.nodes() == ["d"]
    planner.add_node("p", 1e9, 8e9)
    new = planner.plan(PlanRequest("r", 4, 1_000, 64, "p", "d"), 0.0)
    assert planner.finish(old.plan_id, 1.0)
    state = planner.queues.state("p", 1.0)
    assert state is not None
    assert state.pending_bytes == 4_000
    assert planner.finish(new.plan_id, 1.0)
    assert len(planner.queues) == 2


def test_slower_link_gets_fewer_blocks() -> None:
    planner = two_nodes()
    now = 0.0
    for _ in range(10):
        plan = planner.plan(PlanRequest("r", 100, 1_000_000, 64, "p", "d"), now)
        slowest = 0.0
        for part in plan.parts:
            took = part.count * 1e6 / (1e9 if part.node == "p" else 2e8)
            for tenth in range(1, 11):
                planner.progress(plan.plan_id, part.index, part.count * tenth // 10, now + took * tenth / 10)
            slowest = max(slowest, took)
        now += slowest
        planner.finish(plan.plan_id, now)
    shares = {part.node: part.count for part in plan.parts}
    assert 80 <= shares["p"] <= 87  # 5 : 1 is 83


def test_plan_lives_while_progress_is_reported() -> None:
    planner = Planner(Split(least_blocks=1, least_bytes=0), plan_life_s=LIFE)
    for node in ("p", "d", "r"):
        planner.add_node(node, 1e9, 8e9)
    silent, heard, replanned = (
        planner.plan(PlanRequest(name, 10, 1_000, 64, "p", "d", ("r",)), 0.0).plan_id for name in ("silent", "heard", "replanned")
    )
    assert planner.expire(LIFE - 0.1) == []
    assert planner.progress(heard, 0, 1, LIFE / 2)
    planner.fail(replanned, 0, [], LIFE / 2)
    assert planner.expire(LIFE) == [silent]
    assert not planner.progress(silent, 0, 1, LIFE)
    assert planner.expire(LIFE * 1.5 - 0.1) == []
    assert sorted(planner.expire(LIFE * 1.5)) == [heard, replanned]
    for node in ("p", "d", "r"):
        state = planner.queues.state(node, LIFE)
        assert state is not None
        assert state.pending_bytes == 0


def test_plan_with_deadline_ends_despite_reports() -> None:
    planner = two_nodes()
    silent, heard = (planner.plan(PlanRequest(name, 10, 1_000, 64, "p", "d"), 0.0, 3.0).plan_id for name in ("silent", "heard"))
    forgotten = planner.plan(PlanRequest("forgotten", 10, 1_000, 64, "p", "d"), 0.0, 1e9).plan_id
    assert planner.progress(heard, 0, 1, 2.9)
    assert planner.expire(2.9) == []
    assert planner.expire(3.0) == [silent]
    assert planner.progress(heard, 0, 2, 3.9)
    assert planner.expire(3.0 + DEADLINE_GRACE_S) == [heard]
    assert planner.expire(PLAN_LIFE_S) == [forgotten]
    for node in ("p", "d"):
        state = planner.queues.state(node, PLAN_LIFE_S)
        assert state is not None
        assert state.pending_bytes == 0
    for wrong in (-1.0, math.nan):
        with pytest.raises(InvalidArgument):
            planner.plan(PlanRequest("r", 10, 1_000, 64, "p", "d"), 0.0, wrong)


def pending(planner: Planner, node: str, now: float = 0.0) -> tuple[int, int, int]:
    state = planner.queues.state(node, now)
    assert state is not None
    return state.pending_bytes, state.sending_bytes, state.receiving_bytes


def test_reports_without_progress_do_not_extend_a_plan() -> None:
    planner = two_nodes(PrefillOnly())
    idle, moving = (planner.plan(PlanRequest(name, 100, 1_000, 64, "p", "d"), 0.0, 600.0).plan_id for name in ("idle", "moving"))
    for second in range(1, 60):
        assert planner.progress(idle, 0, 0, float(second))
        assert planner.progress(moving, 0, second, float(second))
        assert planner.expire(float(second)) == []
    assert planner.expire(PLAN_LIFE_S) == [idle]
    assert planner.expire(59.0 + PLAN_LIFE_S) == [moving]


def test_one_plan_has_a_bounded_charge() -> None:
    """Of a plan for hours of reading, only the next seconds count, for any division into parts."""
    planner = two_nodes(PrefillOnly())
    planner.add_node("x", 1e9, 8e9)
    large = planner.plan(PlanRequest("large", 60_000, 100_000_000, 64, "x", "d"), 0.0)
    most = int(QUEUE_S * 1e9)
    assert pending(planner, "x") == (most, 0, 0)
    planner.policy = ShorterQueue()
    for number in range(3):
        small = planner.plan(PlanRequest(f"small{number}", 10, 1_000_000, 64, "x", "d"), 0.0)
        assert {part.node for part in small.parts} == {"d"}
    assert planner.progress(large.plan_id, 0, 59_000, 1.0)
    assert pending(planner, "x")[0] == most, "the next ones are just as near"
    assert planner.progress(large.plan_id, 0, 59_950, 2.0)
    assert pending(planner, "x")[0] == 50 * 100_000_000
    assert planner.finish(large.plan_id, 3.0)
    assert pending(planner, "x") == (0, 0, 30_000_000)
    parts = planner.plan(PlanRequest("parts", 60_000, 100_000_000, 64, "x", "d"), 4.0)
    (part,) = parts.parts
    assert part.node == "x"
    again = planner.fail(parts.plan_id, 0, [(at, 1) for at in range(1, 2_000, 2)], 5.0)
    assert len(again.parts) == 1_001
    assert {one.node for one in again.parts} == {"d"}
    assert pending(planner, "d", 5.0)[0] <= 30_000_000 + QUEUE_S * 1e9, "all its parts there count as one"
    assert pending(planner, "x", 5.0)[2] == pending(planner, "d", 5.0)[1]
    for one in again.parts:
        assert planner.progress(parts.plan_id, one.index, one.count, 6.0)
    assert pending(planner, "x", 6.0) == (0, 0, 30_000_000)
    assert pending(planner, "d", 6.0) == (30_000_000, 30_000_000, 0)


def test_stalled_plan_does_not_count_until_progress() -> None:
    planner = two_nodes(PrefillOnly())
    before = planner.plan(PlanRequest("before", 20, 100_000_000, 64, "p", "d"), 0.0)
    dead = planner.plan(PlanRequest("dead", 20, 100_000_000, 64, "p", "d"), 0.0)  # 2 s after the other
    assert planner.progress(before.plan_id, 0, 10, PATIENCE_S - 0.1)
    assert planner.expire(PATIENCE_S + 3.9) == []
    assert pending(planner, "p")[0] == 3_000_000_000
    assert planner.expire(PATIENCE_S + 4.0) == []
    assert pending(planner, "p")[0] == 1_000_000_000, "nobody reads it"
    assert planner.counters.stalled == 1
    assert planner.progress(before.plan_id, 0, 20, 10.0)
    assert planner.progress(dead.plan_id, 0, 0, 10.0)
    assert pending(planner, "p")[0] == 0
    assert planner.progress(dead.plan_id, 0, 5, 11.0)
    assert pending(planner, "p")[0] == 1_500_000_000, "somebody does, late"
    assert planner.expire(30.0) == []
    assert pending(planner, "p")[0] == 0
    (again,) = planner.fail(dead.plan_id, 0, [(0, 5)], 31.0).parts
    assert (again.node, pending(planner, "d")[0]) == ("d", 1_500_000_000)
    assert planner.finish(dead.plan_id, 32.0)
    assert [pending(planner, node) for node in ("p", "d")] == [(0, 0, 0)] * 2
    assert planner.counters.stalled == 2


def test_kept_decisions_are_bounded_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = two_nodes(PrefillOnly())
    gaps = [(at, 1) for at in range(0, 2_000, 2)]
    for _ in range(40):
        plan = planner.plan(PlanRequest("r", 2_000, 1_000, 64, "p", "d"), 0.0)
        assert len(planner.fail(plan.plan_id, 0, gaps, 0.0).parts) == 1_000
        assert planner.finish(plan.plan_id, 0.0)
        assert sum(len(decision.parts) for decision in planner.decisions()) <= DECISION_PARTS_KEPT
    assert len(planner.decisions()) > 10
    for name in ("MAX_PLAN_PARTS", "MAX_PARTS_UNDER_WAY"):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, 500)
            plan = planner.plan(PlanRequest("r", 2_000, 1_000, 64, "p", "d"), 0.0)
            with pytest.raises(CapacityExceeded):
                planner.fail(plan.plan_id, 0, gaps, 0.0)
            assert planner.fail(plan.plan_id, 0, gaps[:200], 0.0).attempt == 1, "it goes on as it was"
            assert planner.finish(plan.plan_id, 0.0)
    monkeypatch.setattr(limits, "MAX_PARTS_UNDER_WAY", 10)
    under_way = [planner.plan(PlanRequest("r", 1, 1_000, 64, "p"), 0.0).plan_id for _ in range(5)]
    with pytest.raises(CapacityExceeded):
        planner.plan(PlanRequest("r", 1, 1_000, 64, "p"), 0.0)
    assert planner.abort(under_way[0], 0.0)
    assert planner.plan(PlanRequest("r", 1, 1_000, 64, "p"), 0.0).plan_id not in under_way


def test_live_plans_are_paged_by_id() -> None:
    drawn = iter([7, 3, 5, 9])
    planner = Planner(PrefillOnly(), draw=lambda: next(drawn))
    planner.add_node("p", 1e9, 8e9)
    for _ in range(4):
        planner.plan(PlanRequest("r", 1, 1, 1, "p"), 0.0)
    assert [plan.plan_id for plan in planner.live(2)] == [3, 5]
    assert [plan.plan_id for plan in planner.live(9, after=5)] == [7, 9]
    assert planner.live(0) == []


def test_plan_ids_are_drawn_and_unique() -> None:
    drawn = iter([7, 3, 7, 3, 5])
    planner = Planner(PrefillOnly(), draw=lambda: next(drawn))
    planner.add_node("p", 1e9, 8e9)
    assert [planner.plan(PlanRequest("r", 1, 1, 1, "p"), 0.0).plan_id for _ in range(3)] == [7, 3, 5]


def test_planner_bad_reports_are_rejected() -> None:
    planner = two_nodes()
    plan = planner.plan(PlanRequest("r", 10, 1_000, 64, "p", "d"), 0.0)
    first = plan.parts[0]
    with pytest.raises(InvalidArgument):
        planner.progress(plan.plan_id, 7, 1, 0.0)
    with pytest.raises(InvalidArgument):
        planner.progress(plan.plan_id, -1, 1, 0.0)
    with pytest.raises(InvalidArgument):
        planner.progress(plan.plan_id, 0, first.count + 1, 0.0)
    for span in [(first.start, first.count + 1), (first.start - 1, 1), (first.start, 0), (first.end, 1)]:
        with pytest.raises(InvalidArgument):
            planner.fail(plan.plan_id, 0, [span], 0.0)
    assert planner.progress(plan.plan_id, 0, first.count, 0.0)
    with pytest.raises(InvalidArgument):
        planner.add_node("x", 1e9, 0.0)
    with pytest.raises(NotFound):
        planner.queues.charge("nobody", None, 1, 1, 1, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": -1},
        {"blocks": MAX_KEYS_PER_CALL + 1},
        {"block_bytes": 0},
        {"block_tokens": 0},
        {"relays": ("r",) * (MAX_RELAYS + 1)},
        {"prefill_node": "n" * 5_000},
    ],
)
def test_planner_requests_out_of_range_are_rejected(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {"request_id": "r", "blocks": 1, "block_bytes": 1, "block_tokens": 1, "prefill_node": "p"}
    with pytest.raises(InvalidArgument):
        PlanRequest(**(good | wrong))  # type: ignore[arg-type]


class Wrong:
    """A policy that forgets a block."""

    name = "wrong"

    def choose(self, request: PlanRequest, nodes: list[tuple[NodeState, ReadSide]], prefill: NodeState | None) -> list[Share]:
        return [Share("p", ReadSide.PREFILL, request.blocks - 1)]


def test_policy_with_wrong_sum_is_a_bug() -> None:
    with pytest.raises(Internal):
        parts_of(Wrong().choose(PlanRequest("r", 3, 1, 1, "p"), [], None), [(0, 3)], 0)


def test_restored_plans_give_the_queues_of_the_old_planner() -> None:
    draw, now = random.Random(5), 0.0
    old, new = Planner(policy_named("split")), Planner(policy_named("split"))
    for planner in (old, new):
        for node in NODES:
            planner.add_node(node, 1e9, 1e9)
    plans: dict[int, LoadPlan] = {}
    done: dict[tuple[int, int], int] = {}
    for _ in range(200):
        prefill, decode = draw.sample(NODES, 2)
        relays = tuple(draw.sample(NODES, 2))
        plan = old.plan(PlanRequest("r", draw.randint(1, 60), 1 << 20, BLOCK_TOKENS, prefill, decode, relays), now, 30.0)
        plans[plan.plan_id] = plan
        for part in plan.parts:
            done[plan.plan_id, part.index] = draw.randint(0, part.count)
            old.progress(plan.plan_id, part.index, done[plan.plan_id, part.index], now)
    for number, plan in plans.items():
        running = [part for part in plan.parts if done[number, part.index] < part.count]
        for _ in range(2):  # a repeated description changes nothing
            new.restore(number, plan.request, running, now, 30.0)
        for part in running:
            assert new.progress(number, part.index, done[number, part.index], now)
    for node in NODES:
        one, other = old.queues.state(node, now), new.queues.state(node, now)
        assert one is not None and other is not None  # noqa: PT018
        assert one.pending_bytes > 0
        assert (other.pending_bytes, other.sending_bytes, other.receiving_bytes) == (
            one.pending_bytes, one.sending_bytes, one.receiving_bytes,
        )  # fmt: skip
    some = next(number for number, plan in plans.items() if new.live(1, number - 1)[0].plan_id == number and plan.parts)
    with pytest.raises(NotFound, match="another planner"):
        new.fail(some, new.live(1, some - 1)[0].parts[-1][0].index, (), now)
    for number in plans:
        assert new.finish(number, now)
    assert all(state is not None and not state.pending_bytes for node in NODES if (state := new.queues.state(node, now)))


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([(0, 0, 11)], id="beyond the request"),
        pytest.param([(0, 0, 6), (1, 5, 2)], id="overlap"),
        pytest.param([(0, 3, 0)], id="empty"),
        pytest.param([(0, -1, 2)], id="below the request"),
        pytest.param([(4, 0, 2), (4, 2, 2)], id="same index"),
    ],
)
def test_restored_plan_with_bad_parts_charges_nothing(spans: list[tuple[int, int, int]]) -> None:
    planner = Planner(policy_named("split"))
    planner.add_node("a", 1e9, 1e9)
    parts = [PlanPart(index, "a", ReadSide.PREFILL, start, count) for index, start, count in spans]
    with pytest.raises(InvalidArgument):
        planner.restore(7, PlanRequest("r", 10, 1 << 20, BLOCK_TOKENS, "a"), parts, 0.0)
    state = planner.queues.state("a", 0.0)
    assert state is not None
    assert (len(planner), state.pending_bytes) == (0, 0)


def test_restored_parts_count_as_parts_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PARTS_UNDER_WAY", 5)
    planner = Planner(policy_named("split"))
    planner.add_node("a", 1e9, 1e9)
    request = PlanRequest("r", 10, 1 << 20, BLOCK_TOKENS, "a")
    parts = [PlanPart(index, "a", ReadSide.PREFILL, start, 5) for index, start in ((2**32 - 1, 0), (7, 5))]
    planner.restore(1, request, parts, 0.0)
    with pytest.raises(CapacityExceeded):
        planner.restore(2, request, parts, 0.0)
    planner.restore(3, request, parts[1:], 0.0)
    assert planner.finish(1, 0.0)
    planner.restore(2, request, parts, 0.0)
    assert len(planner) == 2


def test_restored_plan_unknown_parts_count_as_ended() -> None:
    planner = Planner(policy_named("split"))
    planner.add_node("a", 1e9, 1e9)
    parts = [PlanPart(4, "a", ReadSide.PREFILL, 0, 5), PlanPart(9, "gone", ReadSide.DECODE, 5, 5)]
    planner.restore(1, PlanRequest("r", 10, 1 << 20, BLOCK_TOKENS, "a"), parts, 0.0)
    assert [planner.progress(1, index, 2, 0.0) for index in (0, 4, 9, 4_000)] == [False, True, False, False]
    state = planner.queues.state("a", 0.0)
    assert state is not None
    assert state.pending_bytes == 3 << 20


def test_restored_plan_earlier_progress_is_not_measured() -> None:
    planner = Planner(policy_named("split"))
    planner.add_node("a", 3e9, 1e9)
    part = PlanPart(0, "a", ReadSide.PREFILL, 0, 10_000)
    planner.restore(1, PlanRequest("r", 10_000, 1 << 20, BLOCK_TOKENS, "a"), [part], 5.0)
    planner.progress(1, 0, 9_000, 5.0, measured=False)
    state = planner.queues.state("a", 5.0)
    assert state is not None
    assert (state.snic, state.pending_bytes) == (3e9, 1_000 << 20)


def test_missing_spans_complement_arrived_spans() -> None:
    part = PlanPart(0, "n", ReadSide.PREFILL, 10, 4)
    assert missing_spans(part, [(12, 2), (10, 1), (10, 1)]) == [(11, 1)]
    assert missing_spans(part, []) == [(10, 4)]


def test_queues_never_become_negative() -> None:
    queues = ReadQueues()
    queues.join("n", 1e9, 1e9)
    charge = queues.charge("n", "n", 3, 100, 10, 0.0)
    assert [queues.credit(charge, 2, 1.0, moved=True) for _ in range(3)] == [2, 1, 0]
    state = queues.state("n", 2.0)
    assert state is not None
    assert (state.pending_bytes, state.pending_tokens, state.sending_bytes, state.receiving_bytes) == (0, 0, 0, 0)
    assert queues.state("m", 0.0) is None


def test_abandoned_loads_do_not_change_the_estimate() -> None:
    """A client that cancels its loads after a moment would make a link look as fast as it asks."""
    planner = Planner(policy_named("split"))
    for node in ("p", "d"):
        planner.add_node(node, 12e6, 100e6)
    now = 0.0
    for number in range(20):
        plan = planner.plan(PlanRequest(f"r{number}", 240, 131_072, 16, "p", "d"), now)
        now += 0.1
        assert planner.finish(plan.plan_id, now)
    for node in ("p", "d"):
        state = planner.queues.state(node, now)
        assert state is not None
        assert state.pending_bytes == 0
        assert state.snic <= 12e6
