"""The blocks of an engine's cache: the published ones follow the engine's pool after any events, within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient import BlockKey, CacheSpec, KeyChain
from kvclient.engine_cache.cache_namespace import cache_keys, cache_spec
from kvclient.engine_cache.cache_table import CacheTable, CacheVolume
from kvclient.engine_cache.tracker import (
    LEAST_CHECKS,
    MOST_CHECKS,
    MOST_OFFERS,
    MOST_SCANNED,
    ROUND_S,
    CacheOffer,
    CacheSpace,
    CacheTracker,
    KnownBlock,
)
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.observe.counters import Counters

SPEC = CacheSpec(model="cache", block_tokens=4, layers=2, layer_block_bytes=64)
SPACE = CacheSpace(SPEC.namespace, cache_spec(SPEC).namespace)
VOLUME = VolumeId("engine/cache")
CHAINS = [KeyChain(SPEC).keys([chain + 1] * 4 * 40) for chain in range(3)]


def hash_of(key: BlockKey) -> bytes:
    return b"#" + key


class Bed:
    """A tracker, a table and a log, and the engine's pool: names of pages, two groups per block."""

    def __init__(self, most: int = 1_000) -> None:
        self.pool: set[bytes] = set()
        self.ignored = 0
        self.checked = 0
        self.tracker = CacheTracker(SPACE, most, lambda name: (name + b"0", name + b"1"), self._ignore)
        self.log = ReplicaChangeLog([VOLUME], Counters(), MonotonicClock())
        self.table = CacheTable(CacheVolume(VOLUME, 1 << 20, SPEC.block_bytes), self.log)
        self.index: dict[BlockKey, tuple[BlockKey | None, int]] = {}
        """Published keys, each with its parent and depth, as the log's reader sees them."""

    def _ignore(self, count: int) -> None:
        self.ignored += count

    def _missing(self, blocks: Sequence[KnownBlock]) -> Sequence[KnownBlock]:
        self.checked += len(blocks)
        return [block for block in blocks if not self.pool.issuperset(block[1:])]

    def compute(self, keys: Sequence[BlockKey], first: int, stop: int) -> None:
        names = [hash_of(key) for key in keys[first:stop]]
        self.pool.update(name + group for name in names for group in (b"0", b"1"))
        parent = keys[first - 1] if first else None
        self.tracker.offer(CacheOffer(first, parent, keys[first:stop], names))

    def step(self, elapsed_s: float = 0.01) -> None:
        self.tracker.step(self._missing, elapsed_s)

    def publish(self, most: int = 10_000) -> None:
        self.table.merge(self.tracker.take_changes())
        self.table.publish(most)
        for taken in self.log.take(100_000):
            for key in taken.removed:
                self.index.pop(key, None)
            for run in taken.stored:
                assert run.namespace == SPACE.namespace
                for at, key in enumerate(run.keys):
                    self.index[key] = (run.keys[at - 1] if at else run.parent, run.depth + at)

    def settle(self) -> None:
        """Take up all offers, then a full round."""
        for _ in range(3):
            self.step()
        for _ in range(len(self.tracker) // LEAST_CHECKS + 1):
            self.step()
        self.publish()

    def held(self) -> set[BlockKey]:
        keys = [key for chain in CHAINS for key in chain if {hash_of(key) + b"0", hash_of(key) + b"1"} <= self.pool]
        return set(published(keys))


def published(keys: Sequence[BlockKey]) -> list[BlockKey]:
    packed = cache_keys(SPEC, keys)[1]
    return [BlockKey(packed[at : at + 16]) for at in range(0, len(packed), 16)]


spans = st.tuples(st.integers(0, 2), st.integers(0, 39), st.integers(1, 40))
events = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), spans),
        st.tuples(st.just("evict"), st.lists(st.integers(0, 400), min_size=1, max_size=30)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("step"), st.floats(0, 3)),
        st.tuples(st.just("publish"), st.integers(1, 20)),
    ),
    max_size=40,
)


def run(bed: Bed, happened: list[tuple[str, Any]]) -> None:
    for kind, value in happened:
        if kind == "compute":
            chain, first, count = value
            bed.compute(CHAINS[chain], first, min(40, first + count))
        elif kind == "evict":
            pages = sorted(bed.pool)
            bed.pool -= {pages[at % len(pages)] for at in value} if pages else set()
        elif kind == "reset":
            bed.pool.clear()
            bed.tracker.clear()
        elif kind == "step":
            bed.step(value)
        else:
            bed.publish(value)


@settings(max_examples=300)
@given(events)
def test_cache_published_set_equals_pool_after_a_round(happened: list[tuple[str, Any]]) -> None:
    bed = Bed()
    run(bed, happened)
    bed.settle()
    assert set(bed.index) == bed.held()
    assert {block.key for block in bed.table.held_by(VOLUME)} == bed.held()
    assert bed.table.memory_volume.usage().blocks == len(bed.index)
    for chain in CHAINS:
        keys = published(chain)
        for depth, key in enumerate(keys):
            if key in bed.index:
                assert bed.index[key] == (keys[depth - 1] if depth else None, depth)


@settings(max_examples=200)
@given(events, st.integers(1, 30))
def test_cache_bound_publishes_a_part_of_the_pool(happened: list[tuple[str, Any]], most: int) -> None:
    bed = Bed(most)
    run(bed, happened)
    bed.settle()
    assert len(bed.tracker) <= most
    assert set(bed.index) <= bed.held()


def test_cache_full_displaces_blocks_checked_next() -> None:
    bed = Bed(most=10)
    bed.compute(CHAINS[0], 0, 5)
    bed.step()
    bed.publish()
    bed.compute(CHAINS[1], 0, 8)
    bed.settle()
    assert set(bed.index) == {*published(CHAINS[0][3:5]), *published(CHAINS[1][:8])}
    assert bed.ignored == 3


def test_cache_prompt_over_bound_leaves_its_end() -> None:
    bed = Bed(most=10)
    bed.compute(CHAINS[0], 0, 40)
    bed.settle()
    assert set(bed.index) == set(published(CHAINS[0][30:]))
    assert bed.ignored == 30


def test_cache_known_blocks_do_not_delay_new_ones() -> None:
    """A step looks past known blocks, up to a bound."""
    bed, keys = Bed(most=100_000), KeyChain(SPEC).keys(range(4 * (MOST_SCANNED + 10)))
    bed.compute(keys, 0, len(keys) - 10)
    for _ in range(MOST_SCANNED // MOST_OFFERS):
        bed.step()
    assert len(bed.tracker) == MOST_SCANNED
    bed.compute(keys, 10, MOST_SCANNED + 5)
    bed.step()
    assert len(bed.tracker) == MOST_SCANNED + 5
    for _ in range(2):
        bed.compute(keys, 0, len(keys) - 5)
    bed.compute(keys, 0, len(keys))
    for _ in range(3):
        bed.step()
        assert len(bed.tracker) == MOST_SCANNED + 5, "a scan that is bounded has not come to the new blocks yet"
    bed.step()
    assert len(bed.tracker) == len(keys)


def test_cache_step_checks_and_offers_are_bounded() -> None:
    bed, keys = Bed(most=100_000), KeyChain(SPEC).keys(range(4 * 20_000))
    bed.compute(keys, 0, len(keys))
    bed.step(0.0)
    assert len(bed.tracker) == MOST_OFFERS
    while len(bed.tracker) < len(keys):
        bed.step(0.0)
    for elapsed_s, checks in ((0.0, LEAST_CHECKS), (ROUND_S / 40, 500), (60.0, MOST_CHECKS)):
        bed.checked = 0
        bed.step(elapsed_s)
        assert bed.checked == checks


def test_cache_block_held_briefly_is_not_published() -> None:
    bed = Bed()
    bed.compute(CHAINS[0], 0, 5)
    bed.step()
    bed.table.merge(bed.tracker.take_changes())
    bed.pool.clear()
    bed.settle()
    assert bed.index == {}
    assert bed.log.waiting() == 0


def test_cache_of_new_weights_is_another_namespace() -> None:
    bed = Bed()
    bed.compute(CHAINS[0], 0, 5)
    bed.step()
    bed.publish()
    new = replace(SPEC, weights_epoch="2")
    space = CacheSpace(new.namespace, cache_spec(new).namespace)
    bed.compute(CHAINS[1], 0, 5)
    bed.step()
    bed.tracker.clear(space)
    keys = KeyChain(new).keys([1] * 4 * 3)
    names = [hash_of(key) for key in keys]
    bed.pool = {name + group for name in names for group in (b"0", b"1")}
    bed.tracker.offer(CacheOffer(0, None, keys, names))
    bed.step()
    bed.table.merge(bed.tracker.take_changes())
    bed.table.publish(100)
    assert {block.namespace_id for block in bed.table.held_by(VOLUME)} == {space.namespace}
    assert b"".join(block.key for block in bed.table.held_by(VOLUME)) == cache_keys(new, keys)[1]
