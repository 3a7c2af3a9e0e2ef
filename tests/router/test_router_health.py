"""Health of engines as a pure state machine, against a model; and the rules of ejection one by one."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.router.engines import EngineConfig, HealthLimits, Role
from kvstore.router.health.engine_health import TRANSITIONS, Ejection, EngineHealthTable, HealthEvent, HealthState

PLAIN = ("e0", "e1", "e2", "e3")
LIMITS = HealthLimits(failed_checks=2, gateway_failures=3, server_errors=5, ejection_time_s=1.0, max_ejection_time_s=8.0)


def table(*names: str, role: Role = Role.PLAIN, limits: HealthLimits = LIMITS) -> EngineHealthTable:
    """A table of engines that are healthy since time 0."""
    made = EngineHealthTable([EngineConfig(name, f"http://{name}:1", role) for name in names], limits)
    for name in names:
        made.check_succeeded(name, 0.0, ["m"])
    return made


class HealthMachine(RuleBasedStateMachine):
    """Events in any order. The model is written from the README: plain counters, without the table's code."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.table = EngineHealthTable([EngineConfig(name, f"http://{name}:1") for name in PLAIN], LIMITS)
        self.healthy = dict.fromkeys(PLAIN, False)
        self.until_s = dict.fromkeys(PLAIN, -math.inf)
        self.since_s = dict.fromkeys(PLAIN, 0.0)
        self.checks = dict.fromkeys(PLAIN, 0)
        self.gateway = dict.fromkeys(PLAIN, 0)
        self.errors = dict.fromkeys(PLAIN, 0)
        self.times = dict.fromkeys(PLAIN, 0)

    def _ejected(self, name: str) -> float:
        self.times[name] += 1
        seconds = min(1.0 * self.times[name], 8.0)
        self.healthy[name], self.until_s[name] = False, self.now_s + seconds
        return seconds

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=st.sampled_from(PLAIN))
    def check_succeeds(self, name: str) -> None:
        restored = self.table.check_succeeded(name, self.now_s, ["m"])
        self.checks[name] = 0
        if self.healthy[name]:
            assert not restored
            if self.now_s - self.since_s[name] >= 8.0:
                self.times[name] = 0
            return
        assert restored == (self.now_s >= self.until_s[name])
        if restored:
            self.healthy[name], self.since_s[name] = True, self.now_s
            self.gateway[name] = self.errors[name] = 0

    @rule(name=st.sampled_from(PLAIN))
    def check_fails(self, name: str) -> None:
        ejection = self.table.check_failed(name, self.now_s, "reason")
        self.checks[name] += 1
        if self.healthy[name] and self.checks[name] >= 2:
            assert ejection == Ejection(HealthEvent.FAILED_CHECKS, self._ejected(name))
        else:
            assert ejection is None

    @rule(name=st.sampled_from(PLAIN))
    def request_succeeds(self, name: str) -> None:
        self.table.request_succeeded(name)
        self.gateway[name] = self.errors[name] = 0

    @rule(name=st.sampled_from(PLAIN), gateway=st.booleans())
    def request_fails(self, name: str, gateway: bool) -> None:
        ejection = self.table.request_failed(name, self.now_s, "reason", gateway=gateway)
        if not self.healthy[name]:
            assert ejection is None
            return
        self.gateway[name] = self.gateway[name] + 1 if gateway else 0
        self.errors[name] += 1
        limit_reached = self.gateway[name] >= 3 or self.errors[name] >= 5
        assert (ejection is not None) == limit_reached
        if ejection is not None:
            others_down = sum(not self.healthy[other] for other in PLAIN if other != name)
            assert (ejection.seconds > 0) == (others_down + 1 <= len(PLAIN) // 2)
            if ejection.seconds:
                assert ejection.seconds == self._ejected(name)

    @invariant()
    def states_match_the_model(self) -> None:
        for name, engine in self.table.engines.items():
            assert engine.healthy == self.healthy[name]
            assert engine.ejections == self.times[name]
            assert bool(engine.reason) != engine.healthy

    @invariant()
    def requests_always_have_candidates(self) -> None:
        healthy = [name for name in PLAIN if self.healthy[name]]
        assert self.table.healthy(Role.PLAIN) == healthy
        assert self.table.candidates(Role.PLAIN) == (healthy or list(PLAIN))
        assert self.table.in_panic(Role.PLAIN) == (not healthy)


TestHealthMachine = HealthMachine.TestCase


def test_transitions_form_one_cycle() -> None:
    for (state, _), after in TRANSITIONS.items():
        expected = {
            HealthState.HEALTHY: HealthState.EJECTED,
            HealthState.EJECTED: HealthState.PROBING,
            HealthState.PROBING: HealthState.HEALTHY,
        }
        assert after is expected[state]
    assert {event for _, event in TRANSITIONS} == set(HealthEvent)


def test_ejection_time_grows_and_is_forgiven() -> None:
    health = table("e0", "e1")
    now_s, seconds = 0.0, []
    for _ in range(10):
        ejection = [health.check_failed("e0", now_s, "reason") for _ in range(2)][-1]
        assert ejection is not None
        seconds.append(ejection.seconds)
        now_s = health.engines["e0"].ejected_until_s
        assert not health.check_succeeded("e0", now_s - 0.01)
        assert health.check_succeeded("e0", now_s)
    assert seconds == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 8.0]
    assert not health.check_succeeded("e0", now_s + 8.0)  # it stays healthy
    assert health.engines["e0"].ejections == 0


def test_engine_restarted_after_long_outage_returns_at_once() -> None:
    health = table("e0", "e1")
    for second in range(600):
        health.check_failed("e0", float(second), "reason")
    assert health.engines["e0"].state is HealthState.PROBING
    assert health.check_succeeded("e0", 600.0)


def test_mixed_failures_reach_server_error_limit() -> None:
    health = table("e0", "e1")
    events = [health.request_failed("e0", 1.0, "reason", gateway=gateway) for gateway in (True, True, False, True, True)]
    assert events == [None, None, None, None, Ejection(HealthEvent.SERVER_ERRORS, 1.0)]


def test_success_between_failures_prevents_ejection() -> None:
    health = table("e0", "e1")
    for _ in range(50):
        for gateway in (True, True, False, False):
            assert health.request_failed("e0", 1.0, "reason", gateway=gateway) is None
        health.request_succeeded("e0")


@pytest.mark.parametrize(("count", "ejected"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (10, 5)])
def test_outlier_detection_ejects_at_most_half(count: int, ejected: int) -> None:
    names = [f"e{number}" for number in range(count)]
    health = table(*names)
    for _ in range(10):
        for name in names:
            health.request_failed(name, 1.0, "reason", gateway=True)
    assert count - len(health.healthy(Role.PLAIN)) == ejected


def test_outlier_detection_counts_failed_checks_too() -> None:
    """The last healthy engine is kept, also if failed checks ejected the others."""
    health = table("e0", "e1", limits=HealthLimits(max_ejected_share=1.0))
    for _ in range(2):
        health.check_failed("e0", 1.0, "reason")
    for _ in range(10):
        ejection = health.request_failed("e1", 1.0, "reason", gateway=True)
    assert ejection == Ejection(HealthEvent.GATEWAY_FAILURES, 0.0)
    assert health.healthy(Role.PLAIN) == ["e1"]


def test_prefill_engines_may_all_be_ejected() -> None:
    health = table("p0", "p1", role=Role.PREFILL)
    for name in ("p0", "p1"):
        for _ in range(3):
            health.request_failed(name, 1.0, "reason", gateway=True)
    assert health.candidates(Role.PREFILL) == []
    assert not health.in_panic(Role.PREFILL)


def test_candidates_prefer_engines_that_list_the_model() -> None:
    health = table("e0", "e1", "e2")
    health.check_succeeded("e0", 1.0, [])
    health.check_succeeded("e1", 1.0, ["m", "n"])
    assert health.candidates(Role.PLAIN, "m") == ["e1", "e2"]
    assert health.candidates(Role.PLAIN, "n") == ["e1"]
    assert health.candidates(Role.PLAIN, "other") == ["e0"]
    assert health.candidates(Role.PLAIN) == ["e0", "e1", "e2"]
    assert health.models() == ["m", "n"]


async def test_changed_wakes_on_state_change() -> None:
    health = table("e0", "e1")
    waiting = asyncio.create_task(health.changed())
    await asyncio.sleep(0)
    health.request_failed("e0", 1.0, "reason", gateway=True)
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(2):
        health.request_failed("e0", 1.0, "reason", gateway=True)
    await asyncio.wait_for(waiting, 10)
