"""Guesses of where chains end: learnt from publishes and lookups, bounded."""

from __future__ import annotations

from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.run_end_cache import MAX_ENDS, ChainEnds

NAMESPACE = NamespaceId(b"n" * 16)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def run(start: int, stop: int) -> BlockRun:
    return BlockRun(NAMESPACE, key(start - 1) if start else None, start, tuple(key(at) for at in range(start, stop)))


def test_a_chain_that_grows_by_publishing_is_followed() -> None:
    ends = ChainEnds()
    ends.published([run(0, 100)])
    ends.published([run(100, 120), run(120, 140)])
    assert ends.of(key(0)) == (100, 120, 140)


def test_a_run_whose_beginning_was_not_seen_is_left_alone() -> None:
    ends = ChainEnds()
    ends.published([run(100, 120)])
    assert ends.of(key(0)) == () == ends.of(key(100))


def test_a_lookup_replaces_what_it_could_see() -> None:
    ends = ChainEnds()
    ends.published([run(0, 100), run(100, 120), run(120, 140)])
    ends.found(key(0), 130, (90, 130))
    assert ends.of(key(0)) == (90, 140)


def test_what_is_remembered_is_bounded() -> None:
    ends = ChainEnds(max_chains=2)
    for start in range(0, 100, 10):
        ends.published([run(start, start + 10)])
    assert len(ends.of(key(0))) == MAX_ENDS
    for head in (1_000, 1_001):
        ends.found(key(head), 50, (7,))
    assert ends.of(key(0)) == ()
    assert ends.of(key(1_000)) == ends.of(key(1_001)) == (7,)
