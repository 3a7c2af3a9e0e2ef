"""The ledger of hints against a plain model: limits, shared blocks, displacement and times to live."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.errors import CapacityExceeded
from kvstore.core.limits import MAX_HINTED_SESSIONS_OF_TENANT
from kvstore.core.types import BlockKey
from kvstore.node.hints.ledger import ChainEnd, HintedNamespace, HintLedger, Limits, SessionHint

SIZE = 10
PLENTY = Limits(1 << 40, 1 << 40)
MOST_KEYS, DISPLACED = 12, 2
"""Limits of the ledger in the test of random hints."""


class Namespace:
    """A namespace as the ledger needs it."""

    def __init__(self) -> None:
        self.hinted: dict[BlockKey, int] = {}


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in numbers]


def test_hint_beyond_limit_protects_a_prefix() -> None:
    ledger, namespace = HintLedger(), Namespace()
    kept = ledger.keep("a", namespace, SessionHint("s", keys(*range(9)), 60.0), SIZE, Limits(45, 1000), 0.0)
    assert kept == (4, {}, False)
    assert list(namespace.hinted) == keys(*range(4))


def test_fork_is_protected_until_both_sessions_end() -> None:
    ledger, namespace = HintLedger(), Namespace()
    ledger.keep("a", namespace, SessionHint("trunk", keys(1, 2, 3), 60.0), SIZE, PLENTY, 0.0)
    ledger.keep("a", namespace, SessionHint("fork", keys(1, 2, 9), 60.0), SIZE, PLENTY, 0.0)
    assert ledger.bytes_by_tenant == {"a": 4 * SIZE}, "shared blocks count once"
    assert ledger.end(namespace, "trunk")[1] == {namespace: keys(3)}
    assert ledger.end(namespace, "fork")[1] == {namespace: keys(1, 2, 9)}
    assert ledger.end(namespace, "fork") == ((), {}), "again"
    assert not namespace.hinted
    assert not ledger.bytes_by_tenant


def test_hint_displaces_later_turns_of_its_tenant_only() -> None:
    ledger, mine, other = HintLedger(), Namespace(), Namespace()
    limits = Limits(4 * SIZE, 8 * SIZE)
    ledger.keep("b", other, SessionHint("late", keys(50, 51), 600.0, 500.0), SIZE, limits, 0.0)
    ledger.keep("a", mine, SessionHint("late", keys(1, 2), 600.0, 100.0), SIZE, limits, 0.0)
    ledger.keep("a", mine, SessionHint("soon", keys(3, 4), 600.0, 10.0), SIZE, limits, 0.0)
    kept = ledger.keep("a", mine, SessionHint("next", keys(5, 6), 600.0, 50.0), SIZE, limits, 0.0)
    assert kept == (2, {mine: keys(1, 2)}, False)
    assert ledger.keep("a", mine, SessionHint("later", keys(7), 600.0, 90.0), SIZE, limits, 0.0).blocks == 0
    assert ledger.keep("a", mine, SessionHint("vip", keys(8), 600.0, 90.0, 1), SIZE, limits, 0.0)[:2] == (1, {mine: keys(5, 6)})
    assert list(other.hinted) == keys(50, 51)


def test_tenant_marking_everything_stays_in_its_limit() -> None:
    ledger, mine, other = HintLedger(), Namespace(), Namespace()
    limits = Limits(5 * SIZE, 9 * SIZE)
    for number in range(100):
        ledger.keep("greedy", mine, SessionHint(f"s{number}", keys(number), 3600.0, None, 9), SIZE, limits, 0.0)
    assert ledger.bytes_by_tenant == {"greedy": 5 * SIZE}
    assert ledger.keep("modest", other, SessionHint("s", keys(200, 201, 202), 60.0), SIZE, limits, 0.0)[0] == 3


def test_too_many_sessions_are_rejected_unchanged() -> None:
    ledger, namespace = HintLedger(), Namespace()
    for number in range(MAX_HINTED_SESSIONS_OF_TENANT):
        ledger.keep("a", namespace, SessionHint(f"s{number}", keys(number), 60.0), SIZE, PLENTY, 0.0)
    with pytest.raises(CapacityExceeded):
        ledger.keep("a", namespace, SessionHint("more", keys(9_999), 60.0), SIZE, PLENTY, 0.0)
    assert len(ledger) == MAX_HINTED_SESSIONS_OF_TENANT
    ledger.keep("a", namespace, SessionHint("s0", keys(9_999), 60.0), SIZE, PLENTY, 0.0)  # a known one may change
    ledger.keep("b", Namespace(), SessionHint("s", keys(1), 60.0), SIZE, PLENTY, 0.0)


def test_smaller_limits_take_from_each_tenant_its_excess() -> None:
    ledger = HintLedger()
    for tenant, sessions in (("a", 9), ("b", 9), ("c", 2)):
        namespace = Namespace()
        for number in range(sessions):
            ledger.keep(tenant, namespace, SessionHint(f"s{number}", keys(number), 60.0), SIZE, PLENTY, 0.0)
    while ledger.trim_one({"a": 5 * SIZE, "b": 7 * SIZE, "c": 7 * SIZE}, 11 * SIZE) is not None:
        pass
    held = ledger.bytes_by_tenant
    assert sum(held.values()) == 11 * SIZE
    assert sorted(held.values()) == [2 * SIZE, 4 * SIZE, 5 * SIZE]


def test_later_part_needs_the_part_before() -> None:
    ledger, namespace = HintLedger(), Namespace()
    for part, own in enumerate((keys(1, 2), keys(3, 4), keys(5, 6))):
        assert ledger.keep("a", namespace, SessionHint("s", own, 60.0), SIZE, PLENTY, 0.0, part).blocks == 2
    ledger.end(namespace, "s")
    assert len(ledger) == 0
    assert ledger, "later parts are left"
    kept = ledger.keep("a", namespace, SessionHint("s", keys(3, 4), 60.0), SIZE, PLENTY, 0.0, 1)
    assert kept == (0, {namespace: keys(3, 4)}, False)
    assert [session.part for session in ledger.over(60.0)] == [2]
    assert [ledger.release(session) for session in ledger.over(60.0)] == [{namespace: keys(5, 6)}]
    assert not ledger


def test_keys_of_a_tenant_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that share their blocks cost no bytes, but memory for their keys."""
    monkeypatch.setattr("kvstore.node.hints.ledger.MAX_HINTED_KEYS_OF_TENANT", 10)
    ledger, namespace, other = HintLedger(), Namespace(), Namespace()
    shared = keys(1, 2, 3, 4)
    kept = [ledger.keep("a", namespace, SessionHint(f"s{at}", shared, 60.0), SIZE, PLENTY, 0.0).blocks for at in range(4)]
    assert kept == [4, 4, 2, 0]
    assert ledger.keep("a", namespace, SessionHint("s1", shared, 60.0), SIZE, PLENTY, 0.0).blocks == 4, "instead of its own"
    assert ledger.keep("b", other, SessionHint("s", shared, 60.0), SIZE, PLENTY, 0.0).blocks == 4
    ledger.end(namespace, "s0")
    assert ledger.keep("a", namespace, SessionHint("s3", shared, 60.0), SIZE, PLENTY, 0.0).blocks == 4


def test_size_of_blocks_changes_with_the_last_tier() -> None:
    ledger, namespace = HintLedger(), Namespace()
    ledger.keep("a", namespace, SessionHint("one", keys(1, 2), 60.0), SIZE, PLENTY, 0.0)
    ledger.keep("a", namespace, SessionHint("two", keys(1, 2, 3), 60.0), 2 * SIZE, PLENTY, 0.0)
    assert ledger.bytes_by_tenant == {"a": 3 * 2 * SIZE}
    ledger.end(namespace, "one")
    ledger.end(namespace, "two")
    assert ledger.bytes_by_tenant == {}
    ledger.keep("a", namespace, SessionHint("one", keys(1), 60.0), SIZE, PLENTY, 0.0)
    assert ledger.bytes_by_tenant == {"a": SIZE}


def test_expected_turn_is_due_once() -> None:
    ledger, namespace = HintLedger(), Namespace()
    ledger.keep("a", namespace, SessionHint("s", keys(1), 60.0, 10.0), SIZE, PLENTY, 0.0)
    ledger.keep("a", namespace, SessionHint("unknown", keys(2), 60.0), SIZE, PLENTY, 0.0)
    ledger.keep("a", namespace, SessionHint("elsewhere", keys(3), 60.0, 9.0, read_ahead=False), SIZE, PLENTY, 0.0)
    assert ledger.due(7.0, 2.0) == []
    assert [session.name for session in ledger.due(8.0, 2.0)] == ["s"]
    assert ledger.due(9.0, 2.0) == []


def test_end_of_chain_begins_behind_forks_and_protected() -> None:
    one, two, three, four = chain_keys = keys(1, 2, 3, 4)
    chain = {one: 1, two: 1, three: 1, four: 0}
    assert ChainEnd().take(chain_keys, chain, {}) == [four, three, two, one]
    assert ChainEnd().take(chain_keys, {**chain, two: 2}, {}) == [four, three]
    assert ChainEnd().take(chain_keys, chain, {one: 1}) == [four, three, two]
    assert ChainEnd().take(chain_keys, {**chain, four: 1}, {}) == [], "the session went on elsewhere"
    assert ChainEnd().take(chain_keys, {one: 1, two: 0}, {}) == [two, one], "its end is gone"


@given(
    children=st.dictionaries(st.integers(0, 9), st.integers(0, 2)), protected=st.sets(st.integers(0, 9)), cut=st.integers(0, 10)
)
def test_end_of_chain_is_the_same_in_parts(children: dict[int, int], protected: set[int], cut: int) -> None:
    chain = keys(*range(10))
    held = {chain[number]: count for number, count in children.items()}
    hinted = {chain[number]: 1 for number in protected}
    end = ChainEnd()
    assert end.take(chain[cut:], held, hinted) + end.take(chain[:cut], held, hinted) == ChainEnd().take(chain, held, hinted)


class LedgerMachine(RuleBasedStateMachine):
    """Random hints of two tenants, compared with a count over all sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HintLedger()
        self.namespaces = [Namespace(), Namespace()]
        self.now_s = 0.0
        self.limits = Limits(6 * SIZE, 9 * SIZE)
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr("kvstore.node.hints.ledger.MAX_HINTED_KEYS_OF_TENANT", MOST_KEYS)
        self.patched.setattr("kvstore.node.hints.ledger.DISPLACED_AT_ONCE", DISPLACED)

    def teardown(self) -> None:
        self.patched.undo()

    def parts(self) -> set[tuple[HintedNamespace, str, int]]:
        return {(session.namespace, session.name, session.part) for session in self.ledger.over(math.inf)}

    def protect(self, tenant: int, hint: SessionHint, part: int = 0) -> int:
        """Keep a part until it grows no more. Each call displaces only a few parts of other sessions."""
        namespace = self.namespaces[tenant]
        while True:
            before = self.parts()
            kept = self.ledger.keep(str(tenant), namespace, hint, SIZE, self.limits, self.now_s, part)
            displaced = before - self.parts() - {(namespace, hint.name, part)}
            assert len(displaced) <= DISPLACED
            self.take(kept.released)  # type: ignore[arg-type]
            if not kept.may_grow:
                return kept.blocks
            assert len(displaced) == DISPLACED, "it ends"

    def take(self, released: dict[object, list[BlockKey]]) -> None:
        """Released keys are protected no longer, and each is named once."""
        for namespace, free in released.items():
            assert isinstance(namespace, Namespace)
            assert len(set(free)) == len(free)
            assert not set(free) & namespace.hinted.keys()

    @rule(
        tenant=st.integers(0, 1), name=st.integers(0, 5), chain=st.integers(0, 3), length=st.integers(1, 8),
        keep_s=st.integers(0, 20), turn_s=st.none() | st.integers(1, 30), priority=st.integers(0, 2),
    )  # fmt: skip
    def keep(self, tenant: int, name: int, chain: int, length: int, keep_s: int, turn_s: int | None, priority: int) -> None:
        wanted = keys(*range(100 * chain, 100 * chain + length))
        hint = SessionHint(str(name), wanted, keep_s, turn_s, priority)
        others = dict(self.namespaces[1 - tenant].hinted)
        kept = self.protect(tenant, hint)
        assert self.namespaces[1 - tenant].hinted == others, "another tenant's blocks"
        assert all(key in self.namespaces[tenant].hinted for key in wanted[:kept])

    @rule(
        tenant=st.integers(0, 1), name=st.integers(0, 5), chain=st.integers(0, 3), length=st.integers(0, 8),
        turn_s=st.none() | st.integers(1, 30), priority=st.integers(0, 2),
    )  # fmt: skip
    def keep_in_parts(self, tenant: int, name: int, chain: int, length: int, turn_s: int | None, priority: int) -> None:
        namespace, wanted = self.namespaces[tenant], keys(*range(100 * chain, 100 * chain + length))
        total = part = 0
        for part in range(max(1, length // 3 + 1)):
            own = wanted[3 * part : 3 * part + 3]
            hint = SessionHint(str(name), own, 10.0, turn_s, priority)
            kept = self.protect(tenant, hint, part)
            total += kept
            if kept < len(own):
                break
        self.end_parts(tenant, name, part + 1)
        assert self.ledger.keys_of(namespace, str(name)) == wanted[:total], "a prefix, and none of the chain before"

    def end_parts(self, tenant: int, name: int, part: int) -> None:
        namespace = self.namespaces[tenant]
        while True:
            protected, released = self.ledger.end(namespace, str(name), part)
            self.take(released)  # type: ignore[arg-type]
            if not protected:
                return
            part += 1

    @rule(tenant=st.integers(0, 1), name=st.integers(0, 5))
    def end_in_parts(self, tenant: int, name: int) -> None:
        self.end_parts(tenant, name, 0)
        assert not self.ledger.keys_of(self.namespaces[tenant], str(name))

    @rule(tenant=st.integers(0, 1), name=st.integers(0, 5))
    def end(self, tenant: int, name: int) -> None:
        protected, released = self.ledger.end(self.namespaces[tenant], str(name))
        self.take(released)  # type: ignore[arg-type]
        assert set(released.get(self.namespaces[tenant], ())) <= set(protected)

    def expire(self, now_s: float) -> None:
        for session in self.ledger.over(now_s):
            self.take(self.ledger.release(session))  # type: ignore[arg-type]

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.expire(self.now_s)

    @rule(tenant=st.integers(0, 1), blocks=st.integers(0, 6), all_blocks=st.integers(0, 9))
    def trim(self, tenant: int, blocks: int, all_blocks: int) -> None:
        while (released := self.ledger.trim_one({str(tenant): blocks * SIZE}, all_blocks * SIZE)) is not None:
            self.take(released)  # type: ignore[arg-type]
        assert self.ledger.bytes_by_tenant.get(str(tenant), 0) <= blocks * SIZE
        assert sum(self.ledger.bytes_by_tenant.values()) <= all_blocks * SIZE

    @rule()
    def end_all(self) -> None:
        self.expire(self.now_s + 100)
        assert not any(namespace.hinted for namespace in self.namespaces)
        assert not len(self.ledger)
        assert not self.ledger.sessions_by_tenant

    @invariant()
    def limits_hold(self) -> None:
        sizes = Counter({str(at): len(one.hinted) * SIZE for at, one in enumerate(self.namespaces)})
        assert +sizes == Counter(self.ledger.bytes_by_tenant)
        assert all(size <= self.limits.of_tenant for size in sizes.values())
        assert sizes.total() <= self.limits.of_all
        assert all(sum(one.hinted.values()) <= MOST_KEYS for one in self.namespaces)
        assert bool(self.ledger) == bool(self.parts()) == any(one.hinted for one in self.namespaces)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
