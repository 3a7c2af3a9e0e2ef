"""Eviction policies: the conformance suite, the tree model, and hit ratios on a synthetic agentic workload."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.testing.policy_suite import PolicyMachine, PolicySuite, policy_key
from kvstore.tiers.contract import EvictionPolicy
from kvstore.tiers.eviction.policy import POLICY_NAMES, LruPolicy, ReuseDistancePolicy, S3FifoPolicy, make_policy
from kvstore.tiers.eviction.policy_memory import EvictionQueue


class TestLru(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()


class TestS3Fifo(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return S3FifoPolicy()


class TestGap(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return ReuseDistancePolicy()


class LruMachine(PolicyMachine):
    make_policy = LruPolicy


class S3FifoMachine(PolicyMachine):
    make_policy = S3FifoPolicy


class GapMachine(PolicyMachine):
    make_policy = ReuseDistancePolicy


TestGapMachine = GapMachine.TestCase
TestLruMachine = LruMachine.TestCase
TestS3FifoMachine = S3FifoMachine.TestCase


def test_lru_is_lru_among_leaves() -> None:
    policy = LruPolicy()
    for number in range(10):
        policy.insert(policy_key(number), None)
    policy.touch([policy_key(3)])
    policy.touch([policy_key(0)])
    order = list(policy.coldest(lambda _key: True))
    assert order == [policy_key(number) for number in (1, 2, 4, 5, 6, 7, 8, 9, 3, 0)]


def test_s3fifo_resists_a_scan() -> None:
    """Blocks used twice survive a flood of one-hit wonders ten times the volume; under LRU they do not."""

    def survivors(policy: EvictionPolicy) -> int:
        held: set[BlockKey] = set()
        for number in range(100):
            policy.insert(policy_key(number), None)
            held.add(policy_key(number))
        for _ in range(3):
            policy.touch([policy_key(number) for number in range(50)])
        for number in range(1000, 2000):
            victim = next(iter(policy.coldest(lambda _key: True)))
            policy.remove(victim)
            held.discard(victim)
            policy.insert(policy_key(number), None)
            held.add(policy_key(number))
        return sum(policy_key(number) in held for number in range(50))

    assert survivors(LruPolicy()) == 0
    assert survivors(S3FifoPolicy()) == 50


def agentic_hit_ratio(policy: EvictionPolicy, capacity: int, *, sessions: int = 24, turns: int = 600, seed: int = 5) -> float:
    """Hit ratio of ``capacity`` blocks under sessions that share a system prompt and grow turn by turn, in random order."""
    draw = random.Random(seed)
    chains = [list(range(20)) for _ in range(sessions)]
    fresh = 1000
    held: set[int] = set()
    hits = total = 0
    for _ in range(turns):
        chain = chains[draw.randrange(sessions)]
        added = draw.randint(2, 8)
        chain += range(fresh, fresh + added)
        fresh += added
        hit = 0
        while hit < len(chain) and chain[hit] in held:
            hit += 1
        hits += hit
        total += len(chain)
        policy.touch([policy_key(number) for number in chain[:hit]])
        mine = {policy_key(number) for number in chain}
        missing = [number for number in chain[hit:] if number not in held]
        for key in list(
            islice(policy.coldest(lambda key, mine=mine: key not in mine), max(0, len(held) + len(missing) - capacity))
        ):
            policy.remove(key)
            held.discard(int.from_bytes(key, "big"))
        for number in missing:
            if len(held) < capacity:
                place = chain.index(number)
                policy.insert(policy_key(number), policy_key(chain[place - 1]) if place else None)
                held.add(number)
        assert len(policy) == len(held) <= capacity
    return hits / total


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_hit_ratio_on_an_agentic_workload(name: str) -> None:
    """More space never costs much, and enough space reaches what is possible. Random choice would stay near the shared prompt."""
    small, middle, large = (agentic_hit_ratio(make_policy(name), capacity) for capacity in (600, 1800, 4000))
    unbounded = agentic_hit_ratio(make_policy(name), 1 << 30)
    assert unbounded > 0.9
    assert large == unbounded
    assert 0.15 < small < middle < large


def test_unknown_policy_name_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="lru"):
        make_policy("clock")


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policy_insert_twice_is_rejected(name: str) -> None:
    policy = make_policy(name)
    policy.insert(policy_key(1), None)
    with pytest.raises(Internal):
        policy.insert(policy_key(1), None)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policy_queues_drop_removed_blocks(name: str) -> None:
    """Blocks removed without eviction do not accumulate queue entries."""
    policy = make_policy(name)
    for number in range(20_000):
        policy.insert(policy_key(number), None)
        policy.remove(policy_key(number))
    queues = [value for value in vars(policy).values() if isinstance(value, EvictionQueue | list)]
    assert 0 < sum(map(len, queues)) < 5000
