"""Tests of the cache of run ends."""

from __future__ import annotations

from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.run_end_cache import MAX_ENDS, RunEndCache

NAMESPACE = NamespaceId(b"n" * 16)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def run(start: int, stop: int) -> BlockRun:
    return BlockRun(NAMESPACE, key(start - 1) if start else None, start, tuple(key(at) for at in range(start, stop)))


def test_run_ends_growing_chain_is_followed() -> None:
    ends = RunEndCache()
    ends.record_stored([run(0, 100)])
    ends.record_stored([run(100, 120), run(120, 140)])
    assert ends.of(key(0)) == (100, 120, 140)


def test_run_ends_run_of_unknown_head_is_ignored() -> None:
    ends = RunEndCache()
    ends.record_stored([run(100, 120)])
    assert ends.of(key(0)) == () == ends.of(key(100))


def test_run_ends_lookup_replaces_visible_ends() -> None:
    ends = RunEndCache()
    ends.record_stored([run(0, 100), run(100, 120), run(120, 140)])
    ends.record_lookup(key(0), 130, (90, 130))
    assert ends.of(key(0)) == (90, 140)


def test_run_ends_number_is_bounded() -> None:
    ends = RunEndCache(max_chains=2)
    for start in range(0, 100, 10):
        ends.record_stored([run(start, start + 10)])
    assert len(ends.of(key(0))) == MAX_ENDS
    for head in (1_000, 1_001):
        ends.record_lookup(key(head), 50, (7,))
    assert ends.of(key(0)) == ()
    assert ends.of(key(1_000)) == ends.of(key(1_001)) == (7,)
