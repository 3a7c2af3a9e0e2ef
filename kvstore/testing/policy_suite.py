"""Conformance suite of eviction policies, and a state machine that compares a policy with a plain model of the tree.

Subclass both and give them ``make_policy``::

    class TestMyPolicy(PolicySuite):
        def make_policy(self) -> EvictionPolicy:
            return MyPolicy()

    class MyMachine(PolicyMachine):
        make_policy = staticmethod(MyPolicy)

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.types import BlockKey
from kvstore.tiers.contract import EvictionPolicy


def policy_key(number: int) -> BlockKey:
    """Key of test block ``number``."""
    return BlockKey(number.to_bytes(16, "big"))


def _always(_key: BlockKey) -> bool:
    return True


def _chain(policy: EvictionPolicy, numbers: Iterable[int]) -> list[BlockKey]:
    keys = [policy_key(number) for number in numbers]
    for parent, key in zip([None, *keys], keys, strict=False):
        policy.insert(key, parent)
    return keys


class PolicySuite(ABC):
    """Behaviour that every policy must have."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new, empty policy."""

    def test_policy_empty_yields_nothing(self) -> None:
        policy = self.make_policy()
        assert list(policy.coldest(_always)) == []
        assert len(policy) == 0
        policy.touch([policy_key(1)])
        policy.remove(policy_key(1))
        assert len(policy) == 0

    def test_policy_chain_is_evicted_from_its_end(self) -> None:
        policy = self.make_policy()
        keys = _chain(policy, range(50))
        policy.touch(keys)
        policy.touch(keys[:10])
        assert list(policy.coldest(_always)) == keys[::-1]
        assert list(policy.coldest(_always)) == keys[::-1]  # iterating removes nothing
        assert len(policy) == 50

    def test_policy_pinned_block_keeps_its_ancestors(self) -> None:
        policy = self.make_policy()
        trunk = _chain(policy, range(10))
        policy.insert(policy_key(100), trunk[4])
        policy.insert(policy_key(101), policy_key(100))
        assert set(policy.coldest(lambda key: key != policy_key(100))) == {*trunk[5:], policy_key(101)}

    def test_policy_skipped_blocks_keep_their_ancestors(self) -> None:
        policy = self.make_policy()
        trunk = _chain(policy, range(10))
        twig = policy_key(100)
        policy.insert(twig, trunk[4])
        staying = {twig, trunk[9]}

        def leaves(key: BlockKey) -> bool | None:
            return None if key in staying else True

        for _ in range(3):
            assert list(policy.coldest(leaves)) == []
            policy.touch(trunk)
        policy.insert(policy_key(101), twig)  # a parent now, then a leaf again
        assert list(policy.coldest(leaves)) == [policy_key(101)]
        policy.remove(policy_key(101))
        assert list(policy.coldest(leaves)) == []
        policy.restore([policy_key(7), *trunk, twig])
        staying.clear()
        order = list(policy.coldest(leaves))
        assert set(order) == {*trunk, twig}
        assert [key for key in order if key in trunk] == trunk[::-1]
        assert order.index(twig) < order.index(trunk[4])
        assert len(policy) == 11

    def test_policy_parent_may_be_added_late_or_never(self) -> None:
        policy = self.make_policy()
        policy.insert(policy_key(2), policy_key(1))
        policy.insert(policy_key(3), policy_key(2))
        policy.insert(policy_key(9), policy_key(8))
        policy.insert(policy_key(1), None)
        order = list(policy.coldest(_always))
        assert set(order) == {policy_key(number) for number in (1, 2, 3, 9)}
        assert order.index(policy_key(3)) < order.index(policy_key(2)) < order.index(policy_key(1))

    def test_policy_parent_removed_first_is_no_obstacle(self) -> None:
        policy = self.make_policy()
        keys = _chain(policy, range(5))
        policy.remove(keys[2])
        assert set(policy.coldest(_always)) == {keys[0], keys[1], keys[3], keys[4]}
        policy.insert(keys[2], keys[1])
        assert list(policy.coldest(_always)) == keys[::-1]

    def test_policy_cyclic_parents_are_evicted(self) -> None:
        """Clients choose the keys: a block may name itself or its own descendant as parent."""
        for length in (1, 2, 5):
            policy = self.make_policy()
            ring = [policy_key(number) for number in range(length)]
            for key, parent in zip(ring, [ring[-1], *ring], strict=False):
                policy.insert(key, parent)
            twig = policy_key(99)
            policy.insert(twig, ring[0])
            for _ in range(2):
                order = list(policy.coldest(_always))
                assert sorted(order) == sorted([*ring, twig])
                assert order.index(twig) < order.index(ring[0])
            for key in order:
                policy.remove(key)
            assert not len(policy)

    def test_policy_reused_chains_are_evicted_last(self) -> None:
        """Of many chains, those that are used repeatedly are not evicted first."""
        policy = self.make_policy()
        chains = [_chain(policy, range(at * 100, at * 100 + 10)) for at in range(20)]
        warm = {key for chain in chains[::2] for key in chain}
        for _ in range(6):
            for chain in chains[::2]:
                policy.touch(chain)
        assert not warm & set(islice(policy.coldest(_always), 50))

    def test_policy_demoted_chain_leaves_first(self) -> None:
        policy = self.make_policy()
        chains = [_chain(policy, range(at * 100, at * 100 + 10)) for at in range(8)]
        for chain in [*chains, *chains, *chains[4:]]:
            policy.touch(chain)
        policy.demote([*chains[7], policy_key(9_999)])
        assert list(islice(policy.coldest(_always), 10)) == chains[7][::-1]
        child = policy_key(750)
        policy.insert(child, chains[7][-1])
        policy.demote([child])
        assert list(islice(policy.coldest(_always), 11)) == [child, *chains[7][::-1]]

    def test_policy_demoted_new_chain_leaves_first(self) -> None:
        """Its inner blocks were leaves when they came."""
        policy = self.make_policy()
        chains = [_chain(policy, range(at * 100, at * 100 + 10)) for at in range(8)]
        policy.demote(chains[7])
        assert list(islice(policy.coldest(_always), 10)) == chains[7][::-1]

    def test_policy_demoted_chain_used_again_is_not_first(self) -> None:
        policy = self.make_policy()
        chains = [_chain(policy, range(at * 100, at * 100 + 10)) for at in range(8)]
        for chain in chains:
            policy.touch(chain)
        policy.demote(chains[7])
        policy.touch(chains[7])
        assert not set(chains[7]) & set(islice(policy.coldest(_always), 50))

    def test_coldest_blocks_used_meanwhile_continues(self) -> None:
        """Each block is yielded, also if blocks are used between two steps."""
        policy = self.make_policy()
        chains = [_chain(policy, range(at * 100, at * 100 + 10)) for at in range(20)]
        found = set()
        for number, key in enumerate(policy.coldest(_always)):
            found.add(key)
            if number < 200:
                policy.touch(chains[number % 20])
        assert found == {key for chain in chains for key in chain}

    def test_policy_steady_state_evicts_children_first(self) -> None:
        """A full volume under load: the count is right, and evictions yield existing blocks, children first."""
        policy = self.make_policy()
        draw = random.Random(3)  # noqa: S311
        children: dict[BlockKey, set[BlockKey]] = {}
        parents: dict[BlockKey, BlockKey | None] = {}
        for number in range(3000):
            parent = draw.choice(list(parents)) if parents and draw.random() < 0.7 else None
            key = policy_key(number)
            policy.insert(key, parent)
            parents[key] = parent
            children.setdefault(key, set())
            if parent is not None:
                children[parent].add(key)
            policy.touch([draw.choice(list(parents))])
            if len(parents) > 200:
                for victim in list(islice(policy.coldest(lambda candidate, newest=key: candidate != newest), 3)):  # type: ignore[misc]
                    assert not children.pop(victim)
                    above = parents.pop(victim)
                    if above is not None and above in children:
                        children[above].discard(victim)
                    policy.remove(victim)
            assert len(policy) == len(parents)


class PolicyMachine(RuleBasedStateMachine):
    """Random inserts, touches, removals and partial evictions, compared with a dict of parents."""

    make_policy: ClassVar[Callable[[], EvictionPolicy]]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make_policy()
        self.parents: dict[int, int | None] = {}

    @rule(number=st.integers(0, 40), parent=st.none() | st.integers(0, 40))
    def insert(self, number: int, parent: int | None) -> None:
        if number in self.parents or parent == number or self._is_ancestor(number, parent):
            return
        self.policy.insert(policy_key(number), None if parent is None else policy_key(parent))
        self.parents[number] = parent

    def _is_ancestor(self, number: int, below: int | None) -> bool:
        while below is not None:
            if below == number:
                return True
            below = self.parents.get(below)
        return False

    @rule(numbers=st.lists(st.integers(0, 45), max_size=10))
    def touch(self, numbers: list[int]) -> None:
        self.policy.touch([policy_key(number) for number in numbers])

    @rule(numbers=st.lists(st.integers(0, 45), max_size=10))
    def demote(self, numbers: list[int]) -> None:
        self.policy.demote([policy_key(number) for number in numbers])

    @rule(number=st.integers(0, 45))
    def remove(self, number: int) -> None:
        self.policy.remove(policy_key(number))
        self.parents.pop(number, None)

    @precondition(lambda self: self.parents)
    @rule(count=st.integers(1, 6), pinned=st.sets(st.integers(0, 40), max_size=4))
    def evict(self, count: int, pinned: set[int]) -> None:
        keys = {policy_key(number): number for number in self.parents}
        for key in list(islice(self.policy.coldest(lambda key: keys[key] not in pinned), count)):
            number = keys[key]
            assert number not in pinned
            assert number not in self.parents.values(), "a parent left before its child"
            self.policy.remove(key)
            del self.parents[number]

    @precondition(lambda self: self.parents)
    @rule(staying=st.sets(st.integers(0, 40), max_size=4), count=st.integers(0, 50))
    def lets_some_stay_for_long(self, staying: set[int], count: int) -> None:
        """Skip blocks of an eviction; the policy may omit them until all are restored."""
        keys = {policy_key(number): number for number in self.parents}
        found = list(islice(self.policy.coldest(lambda key: None if keys[key] in staying else True), count))
        assert not {keys[key] for key in found} & staying
        self.policy.restore([policy_key(number) for number in range(46)])

    @invariant()
    def counts(self) -> None:
        assert len(self.policy) == len(self.parents)

    @invariant()
    def counts_children(self) -> None:
        counts = Counter({number: self.policy.children(policy_key(number)) for number in range(46)})
        assert +counts == Counter(parent for parent in self.parents.values() if parent is not None)

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), pinned=st.sets(st.integers(0, 40), max_size=2))
    def knows_descendants(self, data: st.DataObject, pinned: set[int]) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.parents)), unique=True, max_size=6))
        expected = set(chosen)
        while below := {child for child, parent in self.parents.items() if parent in expected} - expected:
            expected |= below
        asked: list[BlockKey] = []

        def evictable(key: BlockKey) -> bool:
            asked.append(key)
            return int.from_bytes(key, "big") not in pinned

        found = self.policy.with_descendants([policy_key(number) for number in chosen], evictable)
        assert len(set(asked)) == len(asked)
        if expected & pinned:
            assert found is None
            return
        assert found is not None
        order = [int.from_bytes(key, "big") for key in found]
        assert sorted(order) == sorted(expected)
        for number in order:
            parent = self.parents[number]
            assert parent not in expected or order.index(number) < order.index(parent), "a parent before its child"

    @precondition(lambda self: self.parents)
    @rule(pinned=st.sets(st.integers(0, 40), max_size=4))
    def yields_all_that_may_leave(self, pinned: set[int]) -> None:
        keys = {policy_key(number): number for number in self.parents}
        order = [keys[key] for key in self.policy.coldest(lambda key: keys[key] not in pinned)]
        assert len(set(order)) == len(order)
        gone: set[int] = set()
        for number in order:
            assert all(child in gone for child, parent in self.parents.items() if parent == number)
            gone.add(number)
        kept = set(pinned) & set(self.parents)
        while True:  # ancestors of pinned blocks must stay; all others must have been yielded
            above = {parent for number in kept if (parent := self.parents[number]) is not None and parent in self.parents} - kept
            if not above:
                break
            kept |= above
        assert gone == set(self.parents) - kept
