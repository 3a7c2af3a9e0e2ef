"""The order in which blocks are checked and offered for a second copy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.copies import copy_queue
from kvstore.node.copies.copy_queue import MAX_TRIES, Candidate, CopyQueue, Partners, plan_offers

A, B = NodeId("a"), NodeId("b")
NAMESPACES = [NamespaceId(bytes([number]) * 16) for number in (1, 2)]


@dataclass(frozen=True)
class Held:
    key: BlockKey
    parent: BlockKey | None = None
    depth: int = 0
    nbytes: int = 100
    namespace_id: NamespaceId = NAMESPACES[0]


def block(number: int, depth: int = 0, namespace: int = 0, nbytes: int = 100) -> Held:
    parent = None if not depth else BlockKey(f"{number}/{depth - 1}".encode())
    return Held(BlockKey(f"{number}/{depth}".encode()), parent, depth, nbytes, NAMESPACES[namespace])


def candidate(number: int, tries: int = 0) -> Candidate[Held]:
    return Candidate(block(number), hot=True, since_s=0.0, tries=tries)


def numbers(taken: list[Candidate[Held]]) -> list[int]:
    return [int(one.block.key.partition(b"/")[0]) for one in taken]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60))
def test_queue_takes_due_blocks_in_their_order(steps: list[tuple[int, bool]]) -> None:
    queue: CopyQueue[Held] = CopyQueue()
    waiting: list[tuple[int, int]] = []
    for now_s, (number, (delay_s, takes)) in enumerate(enumerate(steps)):
        queue.add(candidate(number), now_s + delay_s)
        waiting.append((now_s + delay_s, number))
        if takes:
            due = sorted(one for one in waiting if one[0] <= now_s)[:3]
            assert numbers(queue.take(now_s, 3)) == [number for _, number in due]
            waiting = [one for one in waiting if one not in due]
        assert len(queue) == len(waiting)


def test_queue_due_blocks_come_before_a_pass() -> None:
    queue: CopyQueue[Held] = CopyQueue()
    queue.begin_pass([block(1), block(2)], [block(number) for number in (3, 4, 5)], 7.0)
    queue.add(candidate(6), 10.0)
    assert numbers(queue.take(0.0, 1)) == [1]
    assert numbers(queue.take(10.0, 4)) == [6]
    taken = queue.take(10.0, 2)
    assert [(one.hot, one.since_s) for one in taken] == [(True, 7.0), (False, 7.0)]
    assert numbers(taken) == [2, 5], "the youngest of the cold blocks first"
    assert queue.passing
    assert numbers(queue.take(10.0, 9)) == [4, 3]
    assert not queue.passing
    assert queue.take(10.0, 9) == []


@given(hot=st.integers(0, 9), cold=st.integers(0, 9), most=st.integers(1, 5), early=st.sets(st.integers(0, 17)))
def test_queue_put_off_blocks_come_last_in_their_order(hot: int, cold: int, most: int, early: set[int]) -> None:
    queue: CopyQueue[Held] = CopyQueue()
    order = [*range(hot), *reversed(range(hot, hot + cold))]
    queue.begin_pass([block(at) for at in range(hot)], [block(at) for at in range(hot, hot + cold)], 0.0, sifting=True)
    taken: list[Candidate[Held]] = []
    while queue.passing:
        found = queue.take(0.0, most)
        assert all(one.hot == (number < hot) for one, number in zip(found, numbers(found), strict=True))
        late = [one for one, number in zip(found, numbers(found), strict=True) if one.may_wait and number not in early]
        queue.put_off(late)
        taken += [one for one in found if one not in late]
        assert len(queue) == hot + cold - len(taken)
    assert numbers(taken) == [one for one in order if one in early] + [one for one in order if one not in early]


def test_queue_is_bounded_and_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "MAX_WAITING", 2)
    queue: CopyQueue[Held] = CopyQueue()
    for number in range(4):
        queue.add(candidate(number), 0.0)
    queue.add(candidate(9, tries=MAX_TRIES), 0.0)
    assert (len(queue), queue.left_out) == (2, 3)
    queue.begin_pass([], [], 0.0)
    assert queue.left_out == 0


def test_partners_refusing_one_rests_ever_longer() -> None:
    partners, now_s, rests = Partners(), 0.0, []
    for _ in range(8):
        partners.failed(A, now_s, hot=False)
        rests.append(partners.rest_end_s(A, hot=False) - now_s)
        assert partners.choose([A, B], now_s, hot=False) == B
        now_s = partners.rest_end_s(A, hot=False)
        assert partners.choose([A, B], now_s, hot=False) == A
    assert rests == [10, 20, 40, 80, 160, 300, 300, 300]
    partners.failed(A, now_s, hot=False)
    partners.failed(B, now_s, hot=False)
    assert partners.choose([A, B], now_s, hot=False) is None
    assert partners.choose([A, B], now_s, hot=True) == A, "it refuses only blocks that were not used lately"
    partners.succeeded(A, hot=False)
    assert partners.choose([A, B], now_s, hot=False) == A


_chosen = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(0, 3), st.integers(0, 5), st.integers(0, 1), st.booleans()), max_size=40
)


@given(chosen=_chosen, window_bytes=st.integers(1, 1_000), window_blocks=st.integers(1, 6))
def test_plan_offers_has_each_block_once_in_windows(
    chosen: list[tuple[NodeId, int, int, int, bool]], window_bytes: int, window_blocks: int
) -> None:
    wanted = {}
    for node_id, number, depth, namespace, hot in chosen:
        one = Candidate(block(number + 10 * namespace, depth, namespace), hot, 0.0)
        wanted.setdefault(one.block.key, (node_id, one))
    offers = plan_offers(wanted.values(), window_bytes, window_blocks)
    found = {}
    for offer in offers:
        assert 0 < len(offer.candidates) <= window_blocks
        assert offer.nbytes <= window_bytes or len(offer.candidates) == 1
        assert len({one.block.namespace_id for one in offer.candidates}) == 1
        for one in offer.candidates:
            assert one.block.parent not in {other.block.key for other in offer.candidates} or one.block.parent in found
            assert one.block.key not in found
            found[one.block.key] = (offer.node_id, one)
            assert one.hot == offer.hot
    assert found == wanted
