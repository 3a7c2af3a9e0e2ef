"""Chains: equal prefixes of ids have equal chain ids and equal keys, and nothing else has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.workload.chains import BlockKeys, ChainTable

SPEC = CacheSpec("m", block_tokens=4, layers=1, layer_block_bytes=16)
requests = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 4), max_size=6)), max_size=25)


def ids(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


@given(requests)
def test_chain_ids_are_shared_by_equal_prefixes_only(workload: list[tuple[str, list[int]]]) -> None:
    table, keys = ChainTable(), BlockKeys(SPEC)
    numbers: dict[tuple[int, ...], int] = {}
    named: dict[tuple[int, ...], bytes] = {}
    for session, values in workload:
        chain = table.intern(session, ids(values))
        made = keys.keys(session, ids(values))
        for length in range(1, len(values) + 1):
            prefix = tuple(values[:length])
            assert numbers.setdefault(prefix, int(chain[length - 1])) == chain[length - 1]
            assert named.setdefault(prefix, made[length - 1]) == made[length - 1]
    assert sorted(numbers.values()) == list(range(len(table)))  # dense
    assert len(set(named.values())) == len(named) == len(keys)


@given(requests)
def test_new_chain_ids_are_the_highest_and_stand_at_the_end(workload: list[tuple[str, list[int]]]) -> None:
    table = ChainTable()
    for session, values in workload:
        known = len(table)
        chain = table.intern(session, ids(values)).tolist()
        new = list(itertools.dropwhile(known.__gt__, chain))
        assert new == list(range(known, len(table)))


def test_keys_are_those_of_the_stores_own_hash_chain() -> None:
    values = [3, 1 << 40, 7]
    tokens = [number for value in values for number in (value & 0xFFFF_FFFF, value >> 32, 0, 0)]
    assert BlockKeys(SPEC).keys("s", ids(values)) == KeyChain(SPEC).keys(tokens)
    later = BlockKeys(SPEC)
    later.keys("s", ids(values[:1]))  # the rest continues a chain that is known
    assert later.keys("t", ids(values)) == KeyChain(SPEC).keys(tokens)


def test_namespaces_have_different_keys() -> None:
    other = CacheSpec("m2", block_tokens=4, layers=1, layer_block_bytes=16)
    assert BlockKeys(SPEC).keys("s", ids([1])) != BlockKeys(other).keys("s", ids([1]))


def test_one_token_cannot_say_a_long_id() -> None:
    narrow = BlockKeys(CacheSpec("m", block_tokens=1, layers=1, layer_block_bytes=16))
    assert narrow.keys("s", ids([5]))
    with pytest.raises(InvalidArgument):
        narrow.keys("s", ids([1 << 32]))
