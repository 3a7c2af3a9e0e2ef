"""Two servers change the index in Valkey at the same time, or something else damages it: no other record is lost."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.checksum import key_range
from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey, BootId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import ReplicaRun, VolumeEpoch
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import Answer, Command, Lane, ValkeyClient
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.feed import FRESH_S, StreamPosition
from kvstore.index.valkey.index import A, ValkeyIndex
from kvstore.index.valkey.keys import STREAMS, TAGS, record_name
from kvstore.index.valkey.records import listed_names, read_names_command, records_of
from kvstore.metadata.events.shared_feed import encode_events
from kvstore.rpc.codec import keys_from_packed
from kvstore.testing.index.small_records_suite import CHAIN, NAMESPACE
from support.wait import wait_until

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")


class InterruptedIndex(ValkeyIndex):
    """An index in which something happens right before records are read, or before each attempt to change them."""

    before_reading: Callable[[], None] | None = None
    before_changes: Callable[[], None] | None = None
    after_changes: Callable[[], None] | None = None

    def _interrupt(self) -> None:
        work, self.before_reading = self.before_reading, None
        if work is not None:
            work()

    def _change(self, commands: Sequence[Command], run: Callable[[Sequence[Command], Lane], Sequence[A]]) -> Sequence[A]:
        if self.before_changes is not None:
            self.before_changes()
        replies = super()._change(commands, run)
        work, self.after_changes = self.after_changes, None
        if work is not None:
            work()
        return replies

    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        self._interrupt()
        return super().records_in_ranges(first, count)

    def _run(self, commands: Sequence[Command], lane: Lane = Lane.READS, at_once: int = 2_048) -> list[Reply]:
        self._interrupt()
        return super()._run(commands, lane, at_once)

    def _run_without_lost(self, commands: Sequence[Command], lane: Lane = Lane.READS) -> list[Answer]:
        self._interrupt()
        return super()._run_without_lost(commands, lane)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[ValkeyAddress]:
    with ValkeyServers(tmp_path / "valkey", shards=1) as cluster:
        yield ValkeyAddress(cluster.seeds)


@pytest.fixture
def index(address: ValkeyAddress) -> Iterator[InterruptedIndex]:
    index = InterruptedIndex.open(address, lookup_budget_s=5.0)
    yield index
    index.close()


@pytest.fixture
def other(address: ValkeyAddress, index: InterruptedIndex) -> Iterator[ValkeyIndex]:
    """The same index, in another server."""
    del index  # opened first
    other = ValkeyIndex.open(address, lookup_budget_s=5.0)
    yield other
    other.close()


def opened(index: ValkeyIndex, volume: str) -> VolumeEpoch:
    return index.open_volume_epoch(VolumeId(volume), NodeId("n"), Tier.DRAM, BootId(b"b" * 16))


def published_by(other: ValkeyIndex, into: list[VolumeEpoch]) -> Callable[[], None]:
    """Open a volume epoch at the other server, and publish the chain there."""

    def work() -> None:
        into.append(opened(other, "other"))
        other.publish(into[0], [CHAIN.run(0, 100)], [])

    return work


def runs(index: ValkeyIndex, volume_epochs: set[VolumeEpoch]) -> set[ReplicaRun]:
    return set(index.lookup(NAMESPACE, CHAIN.packed, volume_epochs).runs)


def test_publish_keeps_replicas_of_a_new_volume_epoch(index: InterruptedIndex, other: ValkeyIndex) -> None:
    mine, theirs = opened(index, "mine"), list[VolumeEpoch]()
    index.before_reading = published_by(other, theirs)
    index.publish(mine, [CHAIN.run(0, 100)], [])
    assert runs(index, {mine, *theirs}) == {ReplicaRun(0, 100, mine), ReplicaRun(0, 100, theirs[0])}


def test_publish_that_loses_many_races_wins_in_the_end(index: InterruptedIndex, other: ValkeyIndex) -> None:
    mine, theirs = opened(index, "mine"), list[VolumeEpoch]()

    def interrupt() -> None:
        if len(theirs) < 12:
            theirs.append(opened(other, f"other-{len(theirs)}"))
            other.publish(theirs[-1], [CHAIN.run(0, 100)], [])

    index.before_changes = interrupt
    index.publish(mine, [CHAIN.run(0, 100)], [])
    assert runs(index, {mine, *theirs}) == {ReplicaRun(0, 100, epoch) for epoch in (mine, *theirs)}


def test_publish_that_loses_all_races_lets_nodes_compare(
    index: InterruptedIndex, other: ValkeyIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.index.valkey.index.MAX_RACES", 3)
    mine, theirs = opened(index, "mine"), opened(other, "other")
    stored, ranges = CHAIN.run(0, 2), {key_range(key) for key in CHAIN.keys[:2]}
    turns = itertools.cycle([([stored], []), ([], stored.keys)])
    index.before_changes = lambda: other.publish(theirs, *next(turns))
    index.publish(mine, [stored], [])
    index.before_changes = None
    assert runs(index, {mine}) == set()
    wait_until(lambda: [check.ranges for check in index.range_checks()] == [ranges], "nodes are asked to compare the ranges")


def test_sweep_keeps_replicas_of_a_new_volume_epoch(index: InterruptedIndex, other: ValkeyIndex) -> None:
    mine, theirs = opened(index, "mine"), list[VolumeEpoch]()
    index.publish(mine, [CHAIN.run(0, 100)], [])
    index.close_volume_epoch(mine)
    index.before_reading = published_by(other, theirs)
    while not index.sweep(1_000):
        pass
    assert runs(index, {mine, *theirs}) == {ReplicaRun(0, 100, theirs[0])}


def test_sweep_end_that_runs_twice_counts_once(index: ValkeyIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is sent again, as after a lost answer."""
    run_until = ValkeyClient.run_until

    async def run_twice(
        self: ValkeyClient, commands: Sequence[Command], deadline_s: float, lane: Lane = Lane.WRITES
    ) -> list[Reply]:
        await run_until(self, commands, deadline_s, lane)
        return await run_until(self, commands, deadline_s, lane)

    while not index.sweep(1_000):
        pass
    index.close_volume_epoch(opened(index, "mine"))
    monkeypatch.setattr(ValkeyClient, "run_until", run_twice)
    assert not index.sweep(1 << 20), "records may have been written behind this sweep"
    assert index.sweep(1 << 20)


def test_inventory_has_replicas_of_a_new_volume_epoch(index: InterruptedIndex, other: ValkeyIndex) -> None:
    theirs = list[VolumeEpoch]()
    index.before_reading = published_by(other, theirs)
    blocks, _ = index.blocks_from(None, 1_000)
    assert {block.key for block in blocks} == set(CHAIN.keys)


async def mirrored(index: ValkeyIndex) -> set[bytes]:
    """The keys that a reader of all events holds."""
    held: set[bytes] = set()
    for read in await index.feed.read(tuple(StreamPosition() for _ in STREAMS), most=100):
        for entry in read.entries:
            for event in pb.BlockEvents.FromString(entry.encoded).events:
                held -= set(keys_from_packed(event.removed.keys))
                held |= {key for run in event.stored.runs for key in keys_from_packed(run.keys)}
    return held


async def test_events_of_a_server_that_was_stopped_are_still_true(address: ValkeyAddress) -> None:
    """A server is stopped between a change and its events, while the node publishes at another server."""
    index = await InterruptedIndex.start(address, lookup_budget_s=5.0)
    other = await ValkeyIndex.start(address, lookup_budget_s=5.0)
    for one in (index, other):
        one.feed.start_recording(encode_events, 1 << 20)
    await index.feed.join()
    await index.feed.settle()
    mine, keys = await asyncio.to_thread(opened, index, "mine"), CHAIN.keys

    def meanwhile() -> None:
        other.publish(mine, [CHAIN.run(40, 60)], keys[80:])
        time.sleep(2 * FRESH_S)

    try:
        await asyncio.to_thread(index.publish, mine, [CHAIN.run(0, 80)], [])
        index.after_changes = meanwhile
        await asyncio.to_thread(index.publish, mine, [CHAIN.run(80, 100)], keys[40:60])
        held = {bytes(key) for key, _ in await asyncio.to_thread(index.records_in_ranges, 0, len(TAGS))}
        assert held == set(keys[:80])
        assert await mirrored(index) == held
    finally:
        await index.close_async()
        await other.close_async()


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 8, b"x" * 17])
def test_record_damaged_is_unknown_and_harms_no_other(index: InterruptedIndex, address: ValkeyAddress, damage: bytes) -> None:
    mine = opened(index, "mine")
    index.publish(mine, [CHAIN.run(0, 100)], [])
    host, _, port = address.seeds[0].rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(pack("SET", record_name(CHAIN.keys[99]), damage))
        assert connection.recv(16) == b"+OK\r\n"
    hit = index.lookup(NAMESPACE, CHAIN.packed, {mine})
    assert (hit.blocks, bool(hit.unknown)) == (99, True)
    index.publish(mine, [CHAIN.run(0, 100)], [])
    assert index.describe(CHAIN.keys[98:])[1] is None
    assert index.holders(NAMESPACE, CHAIN.keys[98:]) == [(mine,), ()]
    assert len(index.blocks_from(None, 1_000)[0]) == 99
    while not index.sweep(1_000):
        pass
    assert index.lookup(NAMESPACE, CHAIN.packed, {mine}).blocks == 99


def test_records_of_range_damaged_and_absent_are_left_out() -> None:
    keys, record = [bytes([number]) * 16 for number in range(4)], bytes(16)
    names = [record_name(BlockKey(key)) for key in keys]
    found = records_of(names, [[record, None], [b"damaged", bytes(24)]])
    assert found.pairs() == [(keys[0], record), (keys[3], bytes(24))]
    assert records_of(names, [[record] * 3 + [bytes(17)]]).pairs() == [(key, record) for key in keys[:3]]
    assert records_of(names[::-1], [[record] * 4]).pairs() == [(key, record) for key in keys]
    assert records_of([], []).pairs() == []
    for damaged in ([RuntimeError("ERR")], [[record] * 3]):
        with pytest.raises(Unavailable):
            records_of(names, damaged)


@given(
    st.lists(st.binary(max_size=22) | st.builds(bytes.__add__, st.sampled_from(TAGS[:2]), st.binary(max_size=18)), unique=True)
)
def test_names_of_other_keys_are_left_out(listing: list[bytes]) -> None:
    names = [*listing, TAGS[1], TAGS[1] + b"k" * 16]
    expected = {name for name in names if len(name) == 21 and name.startswith(TAGS[1])}
    found = listed_names(1, list(names), None)
    assert found is not None
    assert (set(found), len(found)) == (expected, len(expected))


def test_names_of_range_without_others_are_listed() -> None:
    names = [record_name(BlockKey(b"\0\x10" + bytes([number]) * 14)) for number in range(50)]
    assert listed_names(1, [TAGS[1], *names], None) == names
    assert listed_names(1, [], None) == []
    assert listed_names(1, RuntimeError("MOVED"), None) is None
    assert listed_names(1, names, b"a key of another server") is None


@given(st.lists(st.binary(min_size=21, max_size=21), min_size=1))
def test_read_names_command_is_mget(names: list[bytes]) -> None:
    assert read_names_command(5, names) == (5, pack("MGET", *names))
