"""Slices of chains: checked once, and cut without losing their position."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.chain import ChainSlice
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_DEPTH, MAX_KEYS_PER_CALL
from kvstore.core.types import BlockKey, NamespaceId

NAMESPACE = NamespaceId(b"n" * 16)
PARENT = BlockKey(b"p" * 16)


def some_keys(count: int) -> list[BlockKey]:
    return [BlockKey(index.to_bytes(16, "big")) for index in range(count)]


@given(count=st.integers(0, 20), depth=st.integers(0, 5), data=st.data())
def test_part_keeps_position(count: int, depth: int, data: st.DataObject) -> None:
    keys = some_keys(count)
    chain = ChainSlice(NAMESPACE, keys, PARENT if depth else None, depth)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = chain.part(start, stop)
    assert part == ChainSlice(NAMESPACE, keys[start:stop], keys[start - 1] if start else chain.parent, depth + start)
    assert len(part) == stop - start
    assert part.packed == b"".join(part.keys)
    for index in range(len(part)):
        assert part.key(index) == keys[start + index]
        assert part.parent_of(index) == chain.parent_of(start + index)
        assert part.depth_of(index) == chain.depth_of(start + index) == depth + start + index
    assert part.parent_of(len(part)) == chain.parent_of(stop)


@given(count=st.integers(1, 20), data=st.data())
def test_part_of_heads_has_heads(count: int, data: st.DataObject) -> None:
    keys = some_keys(count)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = ChainSlice(NAMESPACE, keys, heads=True).part(start, stop)
    assert part == ChainSlice(NAMESPACE, keys[start:stop], heads=True)
    assert {(part.parent_of(index), part.depth_of(index)) for index in range(len(part))} <= {(None, 0)}
    with pytest.raises(InvalidArgument):
        ChainSlice(NAMESPACE, keys, PARENT, 1, heads=True)


@given(count=st.integers(0, 20))
def test_packed_keys_make_the_same_slice(count: int) -> None:
    keys = some_keys(count)
    packed, separate = ChainSlice(NAMESPACE, b"".join(keys)), ChainSlice(NAMESPACE, keys)
    assert packed == separate
    assert list(packed.keys) == list(separate.keys)
    assert hash(packed) == hash(separate)


@pytest.mark.parametrize(
    "keys",
    ["a" * 16, None, 5, bytearray(16), memoryview(b"a" * 16), b"a" * 17, [b"a" * 15], [bytearray(16)], ["a" * 16], [None]],
    ids=range(10),
)
def test_malformed_keys_are_rejected(keys: Any) -> None:
    with pytest.raises(InvalidArgument):
        ChainSlice(NAMESPACE, keys)


def test_too_many_keys_are_rejected() -> None:
    ChainSlice(NAMESPACE, bytes(16 * MAX_KEYS_PER_CALL))
    with pytest.raises(InvalidArgument, match="split"):
        ChainSlice(NAMESPACE, bytes(16 * (MAX_KEYS_PER_CALL + 1)))


@pytest.mark.parametrize(
    ("parent", "depth"),
    [(None, 1), (PARENT, 0), (PARENT, -1), (PARENT, MAX_DEPTH + 1), (b"short", 1), ("p" * 16, 1), (PARENT, True), (PARENT, 1.0)],
    ids=repr,
)
def test_impossible_position_is_rejected(parent: Any, depth: Any) -> None:
    with pytest.raises(InvalidArgument):
        ChainSlice(NAMESPACE, some_keys(1), parent, depth)


def test_slice_is_immutable() -> None:
    with pytest.raises(AttributeError):
        ChainSlice(NAMESPACE, some_keys(1)).depth = 3  # type: ignore[misc]


def test_slice_keeps_its_keys_if_the_list_changes() -> None:
    keys = some_keys(4)
    chain, before = ChainSlice(NAMESPACE, keys), list(keys)
    keys[1] = PARENT
    del keys[2:]
    assert len(chain) == 4
    assert [chain.key(index) for index in range(4)] == before
    assert chain.packed == b"".join(before)
