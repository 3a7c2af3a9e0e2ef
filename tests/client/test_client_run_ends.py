"""Tests of the client's memory of run ends, and of the guesses that its lookups send."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from client_fakes import FakeMetadata, FakeNode, payloads
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, KVClient
from kvclient.nodes.lookup_memory import RunEndMemory
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_LOOKUP_ENDS
from kvstore.core.types import BlockKey, NamespaceId
from support.chains import token_chain

MakeClient = Callable[..., KVClient]

NAMESPACE = NamespaceId(b"n" * 16)


def chain(length: int, shared: int = 0, branch: int = 0) -> ChainSlice:
    """Make a chain; branches with ``shared`` common blocks at their beginning."""
    keys = [BlockKey(bytes(8) + at.to_bytes(8, "big")) for at in range(shared)]
    keys += [BlockKey(branch.to_bytes(8, "big") + at.to_bytes(8, "big")) for at in range(shared, length)]
    return ChainSlice(NAMESPACE, keys)


def test_run_ends_lookup_replaces_ends_within_the_request() -> None:
    memory = RunEndMemory()
    memory.record_lookup(chain(200), (90, 120, 200))
    assert memory.of(chain(300)) == [90, 120], "the end of a request is not the end of a replica"
    memory.record_lookup(chain(300), (120, 250))
    memory.record_lookup(chain(130), (100, 120))
    assert memory.of(chain(300)) == [100, 120, 250]
    assert memory.of(chain(110)) == [100]
    memory.record_lookup(chain(300), ())
    assert memory.of(chain(300)) == []


def test_run_ends_branches_of_one_prompt_are_kept_apart() -> None:
    memory = RunEndMemory()
    for branch in range(1, 40):
        memory.record_lookup(chain(300, 100, branch), (100, 150 + branch))
    for branch in range(1, 40):
        assert memory.of(chain(300, 100, branch)) == [100, 150 + branch]
    assert memory.of(chain(300, 100, 77)) == [100]
    assert memory.of(chain(300, 99, 77)) == []


def test_run_ends_stores_continue_a_chain() -> None:
    memory = RunEndMemory()
    whole = chain(700)
    memory.record_lookup(whole, (100,))
    memory.record_stored(whole.part(100, 120), 20)
    assert memory.of(whole) == [100, 120]
    memory.record_stored(whole.part(120, 127), 5)
    assert memory.of(whole) == [100, 125], "a store from the end of the last store moves that end"
    memory.record_stored(whole.part(125, 600), 475)
    assert memory.of(whole) == [100, 600]
    memory.record_stored(whole.part(650, 660), 10)
    memory.record_stored(whole.part(600, 650), 0)
    assert memory.of(whole) == [100, 600], "the beginning of the first is unknown, and the second stored nothing"
    memory.record_stored(whole, 50)
    assert memory.of(whole) == [50, 100, 600]


def test_run_ends_deepest_are_sent() -> None:
    memory = RunEndMemory()
    memory.record_lookup(chain(300), range(10, 290, 10))
    assert memory.of(chain(300)) == list(range(290 - 10 * MAX_LOOKUP_ENDS, 290, 10))


def test_run_ends_number_is_bounded() -> None:
    memory = RunEndMemory(max_ends=20, max_anchor_ends=4)
    for branch in range(1, 100):
        memory.record_lookup(chain(40, 0, branch), (3, 30))
    assert [len(memory.of(chain(40, 0, branch))) for branch in (89, 90, 99)] == [0, 2, 2]
    for branch in range(1, 100):
        memory.record_lookup(chain(40, 25, branch), (30,))
    assert [memory.of(chain(40, 25, branch)) for branch in (95, 96, 99)] == [[], [30], [30]]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 3), st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 45), max_size=4)
        ),
        max_size=40,
    )
)
def test_run_ends_any_calls_stay_within_bounds(calls: list[tuple[bool, int, int, int, list[int]]]) -> None:
    memory = RunEndMemory(max_ends=9, max_anchor_ends=3)
    for is_store, branch, start, size, ends in calls:
        whole = chain(45, 10, branch)
        part = whole.part(min(start, 44), min(start + size, 45)) if is_store else whole.part(0, size)
        if is_store:
            memory.record_stored(part, len(part))
        else:
            memory.record_lookup(part, ends)
            assert set(memory.of(part)) <= {end for end in ends if 0 < end < len(part)}
        known = {(branch if end > 10 else None, end) for branch in range(4) for end in memory.of(chain(45, 10, branch))}
        assert len(known) <= 9
        assert all(sum(_anchor_of(end) == anchor for _, end in known) <= 3 for anchor in (1, 2, 4))


def _anchor_of(end: int) -> int:
    return max(power for power in (1, 2, 4, 8, 16, 32) if power <= end)


def sent_ends(metadata: FakeMetadata) -> list[list[int]]:
    """Return the guesses of all lookups that arrived."""
    return [list(request.ends) for request in metadata.lookups]


def test_lookup_sends_the_ends_of_the_last_answer(
    spec: CacheSpec, make_client: MakeClient, metadata: FakeMetadata, near: FakeNode
) -> None:
    client = make_client()
    metadata.runs = [(0, 6, near), (0, 4, near)]
    for count in (20, 30, 5):
        assert client.lookup(token_chain(spec, count)).hit_blocks == min(count, 6)
    assert sent_ends(metadata) == [[], [4, 6], [4]]


def test_lookup_that_fails_leaves_the_ends(
    spec: CacheSpec, make_client: MakeClient, metadata: FakeMetadata, near: FakeNode
) -> None:
    client = make_client()
    metadata.runs = [(0, 6, near)]
    client.lookup(token_chain(spec, 20))
    metadata.fail = InvalidArgument("no")
    assert client.lookup(token_chain(spec, 20)).error is not None
    metadata.fail = None
    client.lookup(token_chain(spec, 20))
    assert sent_ends(metadata)[-1] == [6]


def test_lookup_sends_the_end_of_the_last_store(
    spec: CacheSpec, make_client: MakeClient, metadata: FakeMetadata, near: FakeNode
) -> None:
    client = make_client(near)
    keys = token_chain(spec, 20)
    assert client.store(keys[:7], payloads(keys[:7], spec.shape)).held_blocks == 7
    client.lookup(keys)
    with client.begin_store(keys[7:9], parent=keys[6], depth=7) as store:
        for layer in range(spec.layers):
            store.put_layer(layer, np.zeros((2, spec.layer_block_bytes), np.uint8))
        assert store.commit().held_blocks == 2
    client.lookup(keys)
    assert sent_ends(metadata) == [[7], [9]]


def test_lookup_sends_no_ends_of_single_heads(
    spec: CacheSpec, make_client: MakeClient, metadata: FakeMetadata, near: FakeNode
) -> None:
    client = make_client(near)
    keys = token_chain(spec, 20)
    assert client.store_heads(keys[:7], payloads(keys[:7], spec.shape)).held_blocks == 7
    client.lookup(keys)
    assert sent_ends(metadata) == [[]]
