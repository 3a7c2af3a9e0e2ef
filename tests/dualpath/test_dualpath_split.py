"""Policies: the choice of each, and water-filling against exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.contract import NodeState, PlanRequest, ReadSide, Share, finish_seconds
from kvstore.dualpath.policies import POLICIES, Oracle, PrefillOnly, RoundRobin, ShorterQueue, policy_named
from kvstore.dualpath.split import Split

P, D, R = ReadSide.PREFILL, ReadSide.DECODE, ReadSide.RELAY
BLOCK = 1_000
Nodes = list[tuple[NodeState, ReadSide]]


def node(name: str, queue: int = 0, snic: float = 1e6, cnic: float = 8e6, sending: int = 0, receiving: int = 0) -> NodeState:
    return NodeState(name, True, queue, queue // 10, snic, cnic, sending, receiving)


def ask(blocks: int, block_bytes: int = BLOCK) -> PlanRequest:
    return PlanRequest("r", blocks, block_bytes, 64, "p", "d")


def predicted(shares: Sequence[Share], nodes: Nodes, prefill: NodeState | None, block_bytes: int = BLOCK) -> float:
    states = {state.node: state for state, _ in nodes}
    return finish_seconds(((states[name], side, blocks * block_bytes) for name, side, blocks in shares), prefill)


def of(shares: Sequence[Share]) -> dict[str, int]:
    return {share.node: share.blocks for share in shares}


@st.composite
def candidates(draw: st.DrawFn, most_relays: int = 3) -> tuple[Nodes, NodeState]:
    rates = st.floats(1e4, 1e8)
    amounts = st.integers(0, 10_000_000)

    def state(name: str) -> NodeState:
        queue = draw(amounts)
        return NodeState(name, True, queue, draw(st.integers(0, 1_000)), draw(rates), draw(rates), draw(amounts), draw(amounts))

    prefill = state("p")
    nodes: Nodes = [(prefill, P)] if draw(st.integers(0, 9)) else []
    if draw(st.integers(0, 9)) or not nodes:
        nodes.append((state("d"), D))
    nodes += [(state(f"r{number}"), R) for number in range(draw(st.integers(0, most_relays)))]
    return nodes, prefill


# ---- the simple ones ----


def test_whole_request_policies_choose_their_side() -> None:
    nodes: Nodes = [(node("p", 500), P), (node("d", 400), D), (node("r"), R)]
    assert of(PrefillOnly().choose(ask(9), nodes, None)) == {"p": 9}
    assert of(ShorterQueue().choose(ask(9), nodes, None)) == {"d": 9}
    assert Oracle().choose(ask(9), nodes, None) == ()
    turns = RoundRobin()
    assert [turns.choose(ask(9), nodes, None)[0].node for _ in range(4)] == ["p", "d", "p", "d"]


def test_shorter_queue_prefers_prefill_side_at_a_tie() -> None:
    tied: Nodes = [(node("p")._replace(pending_tokens=7), P), (node("d", 10**6)._replace(pending_tokens=7), D)]
    assert of(ShorterQueue().choose(ask(1), tied, None)) == {"p": 1}


@pytest.mark.parametrize("policy", [PrefillOnly(), ShorterQueue(), RoundRobin(), Split()])
def test_relays_serve_if_the_pair_cannot(policy: PrefillOnly | ShorterQueue | RoundRobin | Split) -> None:
    assert of(policy.choose(ask(9), [(node("r"), R)], None)) == {"r": 9}


def test_policies_are_found_by_name() -> None:
    assert {name: policy_named(name).name for name in POLICIES} == {name: name for name in POLICIES}
    with pytest.raises(InvalidArgument):
        policy_named("fastest")


# ---- split ----


def test_split_equal_idle_links_halves_a_request() -> None:
    nodes: Nodes = [(node("p"), P), (node("d"), D)]
    assert of(Split(least_bytes=0).choose(ask(100), nodes, nodes[0][0])) == {"p": 50, "d": 50}


def test_split_longer_queue_gets_fewer_and_later_blocks() -> None:
    nodes: Nodes = [(node("p", 40 * BLOCK), P), (node("d"), D)]
    shares = Split(least_bytes=0).choose(ask(100), nodes, nodes[0][0])
    assert [tuple(share) for share in shares] == [("d", D, 70), ("p", P, 30)]


def test_split_faster_link_gets_more() -> None:
    nodes: Nodes = [(node("p", snic=3e6), P), (node("d"), D)]
    assert of(Split(least_bytes=0).choose(ask(100), nodes, nodes[0][0])) == {"p": 75, "d": 25}


def test_split_forwarding_is_limited_by_slowest_cnic() -> None:
    prefill = node("p", cnic=5e5)
    nodes: Nodes = [(prefill, P), (node("d"), D), (node("r"), R)]
    shares = of(Split(least_bytes=0).choose(ask(90), nodes, prefill))
    assert shares["p"] == 60
    slow_sender: Nodes = [(node("p"), P), (node("d", cnic=2e5), D)]
    assert of(Split(least_bytes=0).choose(ask(120), slow_sender, node("p"))) == {"p": 100, "d": 20}


def test_split_small_requests_are_not_divided() -> None:
    nodes: Nodes = [(node("p"), P), (node("d"), D)]
    policy = Split(least_blocks=8, least_bytes=0)
    assert of(policy.choose(ask(15), nodes, None)) == {"p": 15}
    assert of(policy.choose(ask(16), nodes, None)) == {"p": 8, "d": 8}
    busy: Nodes = [(node("p"), P), (node("d", 95 * BLOCK), D)]
    assert of(policy.choose(ask(100), busy, None)) == {"p": 100}
    by_bytes = Split(least_blocks=1, least_bytes=10 * BLOCK)
    assert of(by_bytes.choose(ask(19), nodes, None)) == {"p": 19}


def test_split_uses_relays_only_for_a_gain() -> None:
    pair: Nodes = [(node("p"), P), (node("d"), D)]
    idle: Nodes = [*pair, (node("r"), R)]
    assert of(Split(least_bytes=0).choose(ask(99), idle, None)) == {"p": 33, "d": 33, "r": 33}
    # with 47,000 bytes queued it could read two of a hundred blocks
    busy: Nodes = [*pair, (node("r", 47 * BLOCK), R)]
    assert of(Split(least_bytes=0, least_blocks=1).choose(ask(100), busy, None)) == {"p": 50, "d": 50}
    assert len(Split(least_bytes=0, least_blocks=1, relay_gain=0.0).choose(ask(100), busy, None)) == 3


def test_split_number_of_parts_is_bounded() -> None:
    nodes: Nodes = [(node("p"), P), (node("d"), D), *((node(f"r{number}"), R) for number in range(20))]
    assert len(Split(least_bytes=0, most_parts=5).choose(ask(1_000), nodes, None)) == 5


@settings(max_examples=300, deadline=None)
@given(candidates(), st.integers(1, 3_000), st.integers(1, 9), st.integers(0, 20_000), st.sampled_from([0.0, 0.05]))
def test_split_is_never_worse_than_the_paper(
    drawn: tuple[Nodes, NodeState], blocks: int, least_blocks: int, least_bytes: int, gain: float
) -> None:
    nodes, prefill = drawn
    policy = Split(least_blocks=least_blocks, least_bytes=least_bytes, relay_gain=gain)
    shares = policy.choose(ask(blocks), nodes, prefill)
    assert sum(share.blocks for share in shares) == blocks
    assert len({share.node for share in shares}) == len(shares) <= policy.most_parts
    sides = {state.node: side for state, side in nodes}
    assert all(sides[share.node] is share.side for share in shares)
    if len(shares) > 1:
        assert min(share.blocks for share in shares) >= max(least_blocks, -(-least_bytes // BLOCK))
    ours = predicted(shares, nodes, prefill)
    for other in (ShorterQueue(), PrefillOnly(), RoundRobin()):
        assert ours <= predicted(other.choose(ask(blocks), nodes, prefill), nodes, prefill) * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(candidates(most_relays=1), st.integers(1, 14))
def test_split_matches_exhaustive_search(drawn: tuple[Nodes, NodeState], blocks: int) -> None:
    nodes, prefill = drawn
    policy = Split(least_blocks=1, least_bytes=0, relay_gain=0.0)
    block_bytes = 100_000
    shares = policy.choose(ask(blocks, block_bytes), nodes, prefill)
    best = min(
        predicted(
            [Share(state.node, side, count) for (state, side), count in zip(nodes, cut, strict=True) if count],
            nodes,
            prefill,
            block_bytes,
        )
        for cut in itertools.product(range(blocks + 1), repeat=len(nodes))
        if sum(cut) == blocks
    )
    assert predicted(shares, nodes, prefill, block_bytes) <= best * (1 + 1e-6)


@pytest.mark.parametrize("wrong", [{"least_blocks": 0}, {"least_bytes": -1}, {"most_parts": 0}, {"relay_gain": 1.0}])
def test_split_invalid_bounds_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        Split(**wrong)  # type: ignore[arg-type]
