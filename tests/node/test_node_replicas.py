"""The log between table and publisher: order, batches, bound, digests."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.core.checksum import key_range
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.types import BlockKey, NamespaceId, VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog, runs_of
from kvstore.observe.counters import Counters
from support.chains import key_of

VOLUME = VolumeId("n/dram")
SPACE = NamespaceId(bytes(16))


@dataclass
class Stored:
    key: BlockKey
    parent: BlockKey | None
    depth: int
    namespace_id: NamespaceId = SPACE


def block_of(number: int) -> Stored:
    return Stored(key_of(number), key_of(number - 1) if number % 10 else None, number % 10)


def make_log(bound: int = 1000) -> ReplicaChangeLog:
    return ReplicaChangeLog([VOLUME], Counters(), ManualClock(), bound=bound)


def test_consecutive_blocks_join_to_one_run() -> None:
    runs = runs_of([block_of(number) for number in (10, 11, 12, 20, 21, 31)])
    assert [(run.depth, len(run.keys)) for run in runs] == [(0, 3), (0, 2), (1, 1)]
    assert runs[2].parent == key_of(30)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=60), st.integers(1, 7))
def test_batches_with_removals_first_give_the_state_of_events(events: list[tuple[bool, int]], limit: int) -> None:
    log = make_log()
    truth: set[BlockKey] = set()
    for store, number in events:
        if store and key_of(number) not in truth:
            truth.add(key_of(number))
            log.stored(VOLUME, block_of(number))
        elif not store and key_of(number) in truth:
            truth.remove(key_of(number))
            log.removed(VOLUME, key_of(number))
    index: set[BlockKey] = set()
    total = 0
    for batch in iter(lambda: next(iter(log.take(limit)), None), None):
        assert batch.events <= limit
        index.difference_update(batch.removed)
        index.update(key for run in batch.stored for key in run.keys)
        log.acknowledge(VOLUME, batch.events)
        total += batch.events
    assert index == truth
    found = log.range_digests(VOLUME)
    assert all(found.settled)
    assert sum(found.counts) == len(truth)
    expected: Counter[int] = Counter()
    for key in truth:
        expected[key_range(key)] ^= xxhash.xxh3_64_intdigest(key)
    assert {where: digest for where, digest in enumerate(found.digests) if digest} == {k: v for k, v in expected.items() if v}


@given(
    st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 11)), max_size=60),
    st.lists(st.integers(0, 59), max_size=6),
    st.integers(1, 12) | st.just(1000),
)
@example([(1, 0), (1, 0), (1, 1), (1, 0), (1, 1), (0, 1)], [], 1000)
def test_block_that_moves_between_volumes_is_always_listed(moves: list[tuple[int, int]], rounds: list[int], limit: int) -> None:
    """Blocks begin in both volumes. One leaves a volume only while the other holds it, and returns at any time."""
    volumes = [VOLUME, VolumeId("n/nvme")]
    log = ReplicaChangeLog(volumes, Counters(), ManualClock())
    held = [{key_of(number) for number in range(12)} for _ in volumes]
    index = [set(of) for of in held]

    def publish() -> None:
        shown_before = set.union(*index)
        for batch in log.take(limit):
            shown = index[volumes.index(batch.volume)]
            shown.difference_update(batch.removed)
            shown.update(key for run in batch.stored for key in run.keys)
            log.acknowledge(batch.volume, batch.events)
            assert shown_before <= set.union(*index)

    for at, (volume, number) in enumerate(moves):
        key = key_of(number)
        if key not in held[volume]:
            held[volume].add(key)
            log.stored(volumes[volume], block_of(number))
        elif key in held[1 - volume]:
            held[volume].remove(key)
            log.removed(volumes[volume], key)
        if at in rounds:
            publish()
    while not all(all(log.range_digests(volume).settled) for volume in volumes):
        publish()
    assert index == held


@given(st.lists(st.sampled_from(["store", "take", "acknowledge"]), max_size=60), st.data())
def test_range_is_settled_once_the_index_has_its_changes(steps: list[str], data: st.DataObject) -> None:
    log = make_log()
    sent: list[tuple[int, list[int]]] = []
    unsettled: Counter[int] = Counter()
    for number, step in enumerate(steps):
        if step == "store":
            log.stored(VOLUME, block_of(number))
            unsettled[key_range(key_of(number))] += 1
        elif step == "take":
            batches = log.take(data.draw(st.integers(1, 5)))
            sent += ((batch.events, [key_range(key) for run in batch.stored for key in run.keys]) for batch in batches)
        elif sent:
            events, ranges = sent.pop(0)
            log.acknowledge(VOLUME, events)
            unsettled.subtract(ranges)
        settled = log.range_digests(VOLUME).settled
        assert {where for where, known in enumerate(settled) if not known} == {*(+unsettled)}


def test_range_is_not_settled_while_an_inventory_is_due() -> None:
    log = make_log(bound=1)
    for number in range(2):
        log.stored(VOLUME, block_of(number))
    assert not any(log.range_digests(VOLUME).settled)
    assert log.take_inventory_request(VOLUME)
    assert all(log.range_digests(VOLUME).settled)


def test_log_full_is_replaced_by_an_inventory() -> None:
    log = make_log(bound=5)
    for number in range(6):
        log.stored(VOLUME, block_of(number))
    assert log.take(100) == []
    assert log.take_inventory_request(VOLUME)
    assert not log.take_inventory_request(VOLUME)
    log.stored(VOLUME, block_of(7))
    assert [taken.events for taken in log.take(100)] == [1]


def test_wait_for_index_ends_at_acknowledgement_or_deadline() -> None:
    log = make_log()
    assert log.wait_published([VOLUME], 0.0)
    log.stored(VOLUME, block_of(1))
    assert not log.wait_published([VOLUME], 0.0)
    assert not all(log.range_digests(VOLUME).settled)
    log.take(10)
    log.acknowledge(VOLUME, 1)
    assert all(log.range_digests(VOLUME).settled)
    assert log.wait_published([VOLUME], 0.0)


def test_gathered_events_are_taken_before_the_next_wait() -> None:
    log = make_log()
    for number in range(3):
        log.stored(VOLUME, block_of(number))
    assert not log.behind(VOLUME), "nothing was gathered yet"
    log.wait(0.0)
    log.stored(VOLUME, block_of(3))
    assert [taken.events for taken in log.take(2)] == [2]
    assert log.behind(VOLUME)
    assert [taken.events for taken in log.take(2)] == [2]
    assert not log.behind(VOLUME)
    log.stored(VOLUME, block_of(4))
    assert not log.behind(VOLUME), "what came later waits for what comes with it"


def test_wait_for_publication_does_not_delay_the_batch() -> None:
    log = ReplicaChangeLog([VOLUME], Counters(), MonotonicClock())
    with ThreadPoolExecutor(1) as publisher:
        waited = publisher.submit(log.wait, 60.0)
        log.stored(VOLUME, block_of(0))
        assert not log.wait_published([VOLUME], time.monotonic() + 0.001), "nobody acknowledges"
        waited.result(30.0)
        assert [taken.events for taken in log.take(10)] == [1]
        waiting = publisher.submit(lambda: log.wait_published([VOLUME], time.monotonic() + 30))
        log.acknowledge(VOLUME, 1)
        assert waiting.result(30.0)
