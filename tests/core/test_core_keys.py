"""Block keys: two chains share exactly the keys of their common prefix, however they are computed."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import KeyChain, Tokens, encode_extra
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import BlockKey

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "keys.json").read_text())["vectors"]
CHAINS = [KeyChain(CacheSpec("m", 4, 1, 8, hash_algorithm=algorithm)) for algorithm in HashAlgorithm]

chains = st.sampled_from(CHAINS)
tokens_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=40)
parts_lists = st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.binary(max_size=6)), max_size=3)
extras_maps = st.dictionaries(st.integers(0, 9), parts_lists.map(encode_extra), max_size=4)


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_golden_keys(vector: dict[str, Any]) -> None:
    spec = CacheSpec(**{**vector["spec"], "salt": bytes.fromhex(vector["spec"]["salt"])})
    extras = {
        int(block): encode_extra([(kind, bytes.fromhex(value)) for kind, value in parts])
        for block, parts in vector["extras"].items()
    }
    keys = KeyChain(spec).keys(vector["tokens"], extras=extras)
    assert [key.hex() for key in keys] == vector["keys"]


TAILS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "tails.json").read_text())["vectors"]


@pytest.mark.parametrize("vector", TAILS, ids=range(len(TAILS)))
def test_golden_tails(vector: dict[str, Any]) -> None:
    spec = CacheSpec(**{**vector["spec"], "salt": bytes.fromhex(vector["spec"]["salt"])})
    parent = None if vector["parent"] is None else BlockKey(bytes.fromhex(vector["parent"]))
    assert KeyChain(spec).tail(vector["tokens"], parent).hex() == vector["key"]


@given(chains, st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_tails_differ_by_tokens_and_from_full_blocks(chain: KeyChain, one: list[int], other: list[int]) -> None:
    key = chain.tail(one)
    if len(other) < 4:
        assert (chain.tail(other) == key) == (one == other)
    else:
        assert chain.keys(other)[0] != key
    assert chain.tail(one, BlockKey(b"p" * 16)) != key
    extras = encode_extra([("salt", b"a")]), encode_extra([("salt", b"b")])
    assert len({chain.tail(one, None, extra) for extra in (b"", *extras)}) == 3


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4], [1, 2, 3, 4, 5], [-1]])
def test_tail_of_invalid_tokens_is_rejected(tokens: list[int]) -> None:
    for chain in CHAINS:
        with pytest.raises(InvalidArgument):
            chain.tail(tokens)


@given(chains, tokens_lists, tokens_lists, extras_maps, extras_maps)
def test_keys_equal_if_and_only_if_prefixes_are_equal(
    chain: KeyChain, one: list[int], other: list[int], one_extras: dict[int, bytes], other_extras: dict[int, bytes]
) -> None:
    one_keys, other_keys = chain.keys(one, extras=one_extras), chain.keys(other, extras=other_extras)
    for block, (one_key, other_key) in enumerate(zip(one_keys, other_keys, strict=False)):
        end = (block + 1) * 4
        same_extras = all(one_extras.get(at, b"") == other_extras.get(at, b"") for at in range(block + 1))
        assert (one_key == other_key) == (one[:end] == other[:end] and same_extras)


@given(chains, tokens_lists, extras_maps, st.integers(0, 10))
def test_continuation_is_the_whole(chain: KeyChain, tokens: list[int], extras: dict[int, bytes], cut: int) -> None:
    whole = chain.keys(tokens, extras=extras)
    cut = min(cut, len(whole))
    head = chain.keys(tokens[: cut * 4], extras=extras)
    tail = chain.keys(tokens[cut * 4 :], extras=extras, parent=head[-1] if head else None, first_block=cut)
    assert head + tail == whole


@given(chains, tokens_lists)
def test_every_form_of_tokens_gives_the_same_keys(chain: KeyChain, tokens: list[int]) -> None:
    ids = np.array(tokens, np.uint32)
    packed = ids.astype("<u4").tobytes()
    doubled = np.repeat(ids, 2)
    forms: list[Tokens] = [
        ids,
        ids.astype(np.int64),
        ids.astype(">u4"),
        doubled[::2],
        array("I", tokens),
        array("q", tokens),
        packed,
        bytearray(packed),
        memoryview(packed),
        tuple(tokens),
        iter(tokens),
    ]
    if tokens:
        forms.append(memoryview(ids))  # an empty array may have any format
    expected = chain.keys(tokens)
    assert len(expected) == len(tokens) // 4
    for form in forms:
        assert chain.keys(form) == expected


@given(parts_lists, parts_lists)
def test_extras_are_unambiguous(one: list[tuple[str, bytes]], other: list[tuple[str, bytes]]) -> None:
    assert (encode_extra(one) == encode_extra(other)) == (one == other)


@given(chains, st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), parts_lists)
def test_tokens_cannot_pose_as_extras(chain: KeyChain, tokens: list[int], parts: list[tuple[str, bytes]]) -> None:
    extra = encode_extra(parts)
    packed = np.array(tokens, "<u4").tobytes() + extra
    longer = packed[: len(packed) // 16 * 16]
    keys = chain.keys(tokens, extras={0: extra})
    assert (keys == chain.keys(longer)) == (not parts)


def test_no_extra_adds_nothing() -> None:
    assert encode_extra([]) == b""
    for chain in CHAINS:
        assert chain.keys(range(16), extras={1: b""}) == chain.keys(range(16))


def test_an_extra_reaches_all_later_blocks_and_no_earlier_one() -> None:
    for chain in CHAINS:
        plain, changed = chain.keys(range(16)), chain.keys(range(16), extras={2: encode_extra([("lora", b"1")])})
        assert [one == other for one, other in zip(plain, changed, strict=True)] == [True, True, False, False]


def test_namespaces_and_hashes_do_not_share_keys() -> None:
    specs = [CacheSpec("m", 4, 1, 8), CacheSpec("n", 4, 1, 8), CacheSpec("m", 4, 1, 8, hash_algorithm=HashAlgorithm.SHA256_128)]
    keys = [KeyChain(spec).keys(range(40)) for spec in specs]
    assert len({key for chain in keys for key in chain}) == 30


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, -1, 4],
        [1, 2, 2**32, 4],
        [1.0, 2.0, 3.0, 4.0],
        ["a"],
        "text",
        7,
        None,
        b"12345",
        np.array([1, -2, 3, 4]),
        np.array([1, 2**32, 3, 4]),
        np.array([1.0, 2.0]),
        np.array([[1, 2], [3, 4]], np.uint32),
        np.array([True, False]),
        array("i", [1, -2, 3, 4]),
        array("d", [1.0]),
    ],
    ids=repr,
)
def test_bad_tokens_are_refused(tokens: Any) -> None:
    for chain in CHAINS:
        with pytest.raises(InvalidArgument):
            chain.keys(tokens)


@pytest.mark.parametrize(("parent", "first_block"), [(None, 1), (b"x" * 16, 0), (b"x" * 15, 1), (b"x" * 16, -1)])
def test_contradicting_continuations_are_refused(parent: BlockKey | None, first_block: int) -> None:
    with pytest.raises(InvalidArgument):
        CHAINS[0].keys([1, 2, 3, 4], parent=parent, first_block=first_block)


def test_bad_extras_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        encode_extra([("", b"x")])
    with pytest.raises(InvalidArgument):
        encode_extra([("k" * 65536, b"x")])
