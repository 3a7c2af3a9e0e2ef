"""The choice of the metadata server, as a pure state machine: breakers, failover, trials, return, probes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.rpc.failover.selection import (
    PROBE_FIRST_S,
    PROBE_MAX_S,
    SETTLE_S,
    STALLED_SETTLE_S,
    TIMEOUTS,
    CallPlacement,
    Condition,
    Failure,
    Reason,
    ServerSelection,
    ranked,
)

SERVERS = tuple(f"10.0.0.{number}:7400" for number in range(1, 5))
EARLIEST, LATEST = 0.75, 1.25
"""Bounds of the jitter."""


def selection(addresses: tuple[str, ...] = SERVERS, caller: str = "engine-0") -> ServerSelection:
    return ServerSelection(addresses, caller, uniform=lambda: 0.5)


def chosen(state: ServerSelection, now_s: float = 0.0, placement: CallPlacement = CallPlacement.SPREAD) -> str | None:
    return state.choose(placement, now_s)[0]


def test_choice_stays_with_the_preferred_server() -> None:
    state = selection()
    assert {chosen(state, float(now)) for now in range(10)} == {ranked(SERVERS, "engine-0")[0]}


def test_callers_spread_within_bounds() -> None:
    counted = Counter(chosen(selection(caller=f"engine-{number}")) for number in range(2_000))
    assert set(counted) == set(SERVERS)
    assert min(counted.values()) > 2_000 / 4 * 0.8
    assert max(counted.values()) < 2_000 / 4 * 1.2


@pytest.mark.parametrize("placement", [CallPlacement.SHARED, CallPlacement.PLANNER])
def test_calls_without_shared_state_go_to_one_server(placement: CallPlacement) -> None:
    assert len({chosen(selection(caller=f"n{number}"), 0.0, placement) for number in range(50)}) == 1
    shuffled = random.Random(3).sample(SERVERS, len(SERVERS))
    assert chosen(selection(tuple(shuffled)), 0.0, placement) == chosen(selection(), 0.0, placement)
    state = selection()
    before = chosen(state, 0.0, placement)
    assert not state.planned(SERVERS[1], "planner")  # each server plans for its own callers
    assert chosen(state, 0.0, placement) == before


def test_calls_with_shared_state_stay_with_server_of_caller() -> None:
    state = selection()
    own, common = ranked(SERVERS, "engine-0")[0], ranked(SERVERS, "")[0]
    assert own != common
    assert chosen(state, 0.0, CallPlacement.SHARED) == common
    state.share_state(True)
    address, change = state.choose(CallPlacement.SHARED, 0.0)
    assert address == own == chosen(state)
    assert change is not None
    assert change.reason is Reason.SHARED
    state.share_state(False)
    assert chosen(state, 0.0, CallPlacement.SHARED) == common


def plan_calls(state: ServerSelection, planner: str) -> list[str]:
    """Make plans until two in a row go to the same server. Returns the servers that were called."""
    called: list[str] = []
    while len(called) < 2 or called[-1] != called[-2]:
        address = chosen(state, 0.0, CallPlacement.PLANNER)
        assert address is not None
        state.planned(address, "" if address == planner else f"id of {planner}")
        called.append(address)
        assert len(called) <= len(SERVERS) + 2
    return called


@pytest.mark.parametrize("planner", SERVERS)
def test_planner_is_found_by_calls_that_are_not_forwarded(planner: str) -> None:
    state = selection()
    state.share_state(True)
    called = plan_calls(state, planner)
    assert called[-1] == planner
    assert len(set(called)) == len(called) - 1, "no server is asked in vain twice"
    other = next(address for address in SERVERS if address != planner)
    state.planned(planner, f"id of {other}")  # the role has moved
    assert plan_calls(state, other)[-1] == other
    state.failed(other, Failure.REFUSED)
    assert chosen(state, 0.0, CallPlacement.PLANNER) not in {other, None}


def test_planner_out_of_reach_is_called_through_another_server() -> None:
    state = selection()
    state.share_state(True)
    called = plan_calls(state, "10.0.0.99:7400")
    assert set(called) <= set(SERVERS)
    assert chosen(state, 0.0, CallPlacement.PLANNER) == called[-1]


def test_added_server_takes_callers_from_all_others() -> None:
    before = {f"e{number}": ranked(SERVERS[:3], f"e{number}")[0] for number in range(1_000)}
    after = {name: ranked(SERVERS, name)[0] for name in before}
    moved = {name for name in before if before[name] != after[name]}
    assert {after[name] for name in moved} == {SERVERS[3]}
    assert 150 < len(moved) < 350


@pytest.mark.parametrize("failure", [Failure.REFUSED, Failure.UNAVAILABLE, Failure.HUNG, Failure.STALLED])
def test_first_failure_opens_breaker_and_changes_server(failure: Failure) -> None:
    state = selection()
    first, second, *_ = ranked(SERVERS, "engine-0")
    assert chosen(state) == first
    assert state.failed(first, failure)
    address, change = state.choose(CallPlacement.SPREAD, 0.0)
    assert address == second
    assert change is not None
    assert (change.before, change.after, change.reason) == (first, second, Reason(failure.value))
    assert not state.failed(first, failure)


def test_timeouts_open_breaker_only_in_a_row() -> None:
    state = selection()
    first = chosen(state)
    assert first is not None
    for _ in range(3):
        assert not any(state.failed(first, Failure.TIMEOUT) for _ in range(TIMEOUTS - 1))
        state.answered(first)
    assert [state.failed(first, Failure.TIMEOUT) for _ in range(TIMEOUTS)] == [False] * (TIMEOUTS - 1) + [True]


@pytest.mark.parametrize(("failure", "settle_s"), [(Failure.REFUSED, SETTLE_S), (Failure.STALLED, STALLED_SETTLE_S)])
def test_server_that_answers_again_is_preferred_after_its_trial(failure: Failure, settle_s: float) -> None:
    state = selection()
    first, second, *_ = ranked(SERVERS, "engine-0")
    chosen(state)
    state.failed(first, failure)
    assert chosen(state) == second
    assert state.probe_ended(first, answered=True, now_s=10.0) is not None
    assert state.condition(first) is Condition.TRIAL
    assert chosen(state, 10.0 + settle_s - 0.1) == second
    address, change = state.choose(CallPlacement.SPREAD, 10.0 + settle_s)
    assert address == first
    assert change is not None
    assert change.reason is Reason.ANSWERS


def test_probe_without_answer_on_trial_opens_breaker_again() -> None:
    state = selection()
    first = chosen(state)
    assert first is not None
    state.failed(first, Failure.REFUSED)
    state.probe_ended(first, answered=True, now_s=1.0)
    assert state.probe_ended(first, answered=False, now_s=2.0) is not None
    assert state.condition(first) is Condition.AWAY


def test_all_away_chooses_none_until_a_probe_is_answered() -> None:
    state = selection()
    chosen(state)
    for address in SERVERS:
        state.failed(address, Failure.REFUSED)
    assert chosen(state) is None
    assert state.others(CallPlacement.SPREAD, ()) == ()
    last = ranked(SERVERS, "engine-0")[-1]
    state.probe_ended(last, answered=True, now_s=1.0)
    assert chosen(state, 1.0) == last


def test_probes_of_a_lost_server_pause_longer_up_to_the_bound() -> None:
    state = selection()
    first = chosen(state)
    assert first is not None
    state.failed(first, Failure.HUNG)
    pauses = [state.probe_ended(first, answered=False, now_s=float(now)) or 0.0 for now in range(10)]
    assert pauses[0] == PROBE_FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == PROBE_MAX_S


def test_replaced_servers_keep_state_and_removed_one_is_left() -> None:
    state = selection()
    first, second, *rest = ranked(SERVERS, "engine-0")
    chosen(state)
    state.failed(second, Failure.REFUSED)
    state.replace([second, *rest])
    address, change = state.choose(CallPlacement.SPREAD, 0.0)
    assert address == rest[0]
    assert change is not None
    assert change.reason is Reason.REMOVED
    assert state.condition(second) is Condition.AWAY
    assert state.probe_ended(first, answered=True, now_s=0.0) is None


class SelectionMachine(RuleBasedStateMachine):
    """Random failures, answers and probes; every server has at most one probe, as in ``MetadataServers``."""

    def __init__(self) -> None:
        super().__init__()
        uniform = random.Random(7)
        self.state = ServerSelection(SERVERS, "engine-0", uniform=uniform.random)
        self.now_s = 0.0
        self.open: set[str] = set()
        self.probe_due_s: dict[str, float] = {}
        self.probes: Counter[str] = Counter()
        self.lost_s: dict[str, float] = {}
        self.shared = False

    def _probe(self, address: str, *, answered: bool) -> None:
        self.probes[address] += 1
        pause_s = self.state.probe_ended(address, answered=answered, now_s=self.now_s)
        if answered:
            self.open.discard(address)
        else:
            self.open.add(address)
        if pause_s is None:
            del self.probe_due_s[address]
        else:
            assert 0 < pause_s <= PROBE_MAX_S * LATEST
            assert answered or pause_s >= PROBE_FIRST_S * EARLIEST
            self.probe_due_s[address] = self.now_s + pause_s

    @rule(address=strategies.sampled_from(SERVERS), failure=strategies.sampled_from(list(Failure)))
    def fail(self, address: str, failure: Failure) -> None:
        was_open = address in self.open
        opened = self.state.failed(address, failure)
        assert not (was_open and opened)
        assert failure is Failure.TIMEOUT or was_open or opened
        if opened:
            self.open.add(address)
            self.probe_due_s[address] = self.now_s

    @rule(address=strategies.sampled_from(SERVERS))
    def answer(self, address: str) -> None:
        self.state.answered(address)

    @rule(shared=strategies.booleans())
    def share_state(self, shared: bool) -> None:
        self.shared = shared
        self.state.share_state(shared)

    @rule(address=strategies.sampled_from(SERVERS), planner=strategies.sampled_from(["", "one", "two"]))
    def plan(self, address: str, planner: str) -> None:
        changed = self.state.planned(address, planner)
        assert self.shared or not changed

    @rule(seconds=strategies.floats(0.01, 4.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: any(due_s <= self.now_s for due_s in self.probe_due_s.values()))
    @rule(answered=strategies.booleans())
    def end_probe(self, answered: bool) -> None:
        address = min(self.probe_due_s, key=lambda one: self.probe_due_s[one])
        self._probe(address, answered=answered)

    @rule()
    def all_answer_and_callers_return(self) -> None:
        for _ in range(round(STALLED_SETTLE_S * LATEST) + 10):
            self.now_s += 1.0
            for address in [one for one, due_s in self.probe_due_s.items() if due_s <= self.now_s]:
                self._probe(address, answered=True)
        assert self.probe_due_s == {}
        assert self.state.settled() or self.state.choose(CallPlacement.SPREAD, self.now_s)
        for placement, key in ((CallPlacement.SPREAD, "engine-0"), (CallPlacement.SHARED, "engine-0" if self.shared else "")):
            assert self.state.choose(placement, self.now_s)[0] == ranked(SERVERS, key)[0]

    @rule()
    def nobody_answers_and_probes_are_bounded(self) -> None:
        self.probes.clear()
        started_s = self.now_s
        while self.now_s < started_s + 30.0 and self.probe_due_s:
            self.now_s = max(self.now_s, min(self.probe_due_s.values()))
            self._probe(min(self.probe_due_s, key=lambda one: self.probe_due_s[one]), answered=False)
        most = 30.0 / (PROBE_MAX_S * EARLIEST) + 7
        assert all(count <= most for count in self.probes.values())

    @invariant()
    def choice_is_never_open_while_another_is_closed(self) -> None:
        for placement in CallPlacement:
            address, change = self.state.choose(placement, self.now_s)
            if len(self.open) == len(SERVERS):
                assert address is None
            else:
                assert address is not None
                assert address not in self.open
            assert self.open.isdisjoint(self.state.others(placement, ()))
            assert change is None or change.before != change.after

    @invariant()
    def every_open_breaker_has_a_probe(self) -> None:
        assert self.open <= set(self.probe_due_s)


SelectionMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_selection_keeps_its_rules_in_any_order = SelectionMachine.TestCase
