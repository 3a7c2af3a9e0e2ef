"""Bounds: exact on the public traces, and equal to exhaustive search for small workloads."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.tiers.eviction.policy import POLICY_NAMES, make_policy
from kvstore.workload.bounds import ChainIds, best_hits, simulate, unbounded_hits
from kvstore.workload.chains import ChainTable
from kvstore.workload.traces import open_trace


def interned(requests: list[list[int]]) -> list[ChainIds]:
    table = ChainTable()
    return [table.intern("s", np.array(ids, dtype=np.int64)) for ids in requests]


def hits_of(chain: list[int], held: frozenset[int]) -> int:
    return next((position for position, block in enumerate(chain) if block not in held), len(chain))


def exhaustive(requests: list[list[int]], capacity: int) -> int:
    """Tries every choice of what to hold after each request."""
    states = {frozenset[int](): 0}
    for chain in requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            gained = hits + hits_of(chain, held)
            pool = held | set(chain)
            for size in range(min(capacity, len(pool)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(pool), size)):
                    following[kept] = max(following.get(kept, -1), gained)
        states = following
    return max(states.values())


small = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=150)
@given(small, st.integers(0, 4))
def test_best_is_what_exhaustive_search_finds(requests: list[list[int]], capacity: int) -> None:
    chains = interned(requests)
    assert best_hits(chains, capacity).hit_blocks == exhaustive([chain.tolist() for chain in chains], capacity)


workloads = st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=8), max_size=40)


@given(workloads, st.integers(0, 60))
def test_no_policy_beats_the_best_and_the_best_not_the_unbounded(requests: list[list[int]], capacity: int) -> None:
    chains = interned(requests)
    best, unbounded = best_hits(chains, capacity), unbounded_hits(chains)
    total = sum(map(len, requests))
    assert best.blocks == unbounded.blocks == total
    assert best.hit_blocks <= unbounded.hit_blocks
    for name in POLICY_NAMES:
        count = simulate(chains, make_policy(name), capacity)
        assert count.hits.hit_blocks <= best.hit_blocks
        if capacity >= total:
            assert count.hits == unbounded
            assert count.evicted_blocks == count.skipped_blocks == 0


@given(workloads)
def test_unbounded_is_the_prefix_rule(requests: list[list[int]]) -> None:
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for ids in requests:
        prefixes = [tuple(ids[: length + 1]) for length in range(len(ids))]
        hits += next((position for position, prefix in enumerate(prefixes) if prefix not in seen), len(ids))
        seen.update(prefixes)
    chains = interned(requests)
    assert unbounded_hits(chains).hit_blocks == hits
    assert best_hits(chains, sum(map(len, requests))).hit_blocks == hits


def test_empty_workloads_and_wrong_capacities() -> None:
    assert unbounded_hits([]).ratio == 0.0
    assert best_hits([], 5).blocks == 0
    with pytest.raises(InvalidArgument):
        best_hits([], -1)
    with pytest.raises(InvalidArgument):
        simulate([], make_policy("lru"), -1)


EXPECTED = {
    "mooncake_conversation.jsonl.zst": (12_031, 288_500, 105_710),
    "weka_smoke_20s.rle.jsonl.zst": (603, 430_731, 408_206),
    "weka_agentic_64k.rle.jsonl.zst": (6_582, 4_459_864, 4_276_178),
}


@pytest.mark.trace
@pytest.mark.parametrize("name", EXPECTED)
def test_public_traces_have_exactly_the_hits_known(traces: Path, name: str) -> None:
    table = ChainTable()
    chains = [table.intern(request.session, request.block_ids) for request in open_trace(traces / name)]
    count = unbounded_hits(chains)
    assert (len(chains), count.blocks, count.hit_blocks) == EXPECTED[name]
    assert count.blocks - len(table) == count.hit_blocks
    assert best_hits(chains, len(table)) == count


@pytest.mark.trace
def test_policies_on_a_public_trace_stay_below_the_best(traces: Path) -> None:
    table = ChainTable()
    chains = [
        table.intern(request.session, request.block_ids)
        for request in itertools.islice(open_trace(traces / "weka_smoke_20s.rle.jsonl.zst"), 200)
    ]
    capacity = len(table) // 4
    best = best_hits(chains, capacity).hit_blocks
    for name in POLICY_NAMES:
        assert 0 < simulate(chains, make_policy(name), capacity).hits.hit_blocks <= best
