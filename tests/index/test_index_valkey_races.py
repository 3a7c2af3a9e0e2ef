"""Two servers change the index in Valkey at the same time, or something else damages it: no other record is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey, BootId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import ReplicaRun, VolumeEpoch
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import Answer, Command, Lane
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import record_name
from kvstore.index.valkey.records import records_of
from kvstore.testing.index.small_records_suite import CHAIN, NAMESPACE

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")


class InterruptedIndex(ValkeyIndex):
    """An index in which something happens right before records are read."""

    before_reading: Callable[[], None] | None = None

    def _interrupt(self) -> None:
        work, self.before_reading = self.before_reading, None
        if work is not None:
            work()

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


def test_sweep_keeps_replicas_of_a_new_volume_epoch(index: InterruptedIndex, other: ValkeyIndex) -> None:
    mine, theirs = opened(index, "mine"), list[VolumeEpoch]()
    index.publish(mine, [CHAIN.run(0, 100)], [])
    index.close_volume_epoch(mine)
    index.before_reading = published_by(other, theirs)
    while not index.sweep(1_000):
        pass
    assert runs(index, {mine, *theirs}) == {ReplicaRun(0, 100, theirs[0])}


def test_inventory_has_replicas_of_a_new_volume_epoch(index: InterruptedIndex, other: ValkeyIndex) -> None:
    theirs = list[VolumeEpoch]()
    index.before_reading = published_by(other, theirs)
    blocks, _ = index.blocks_from(None, 1_000)
    assert {block.key for block in blocks} == set(CHAIN.keys)


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
    assert records_of(names, [record, None, b"damaged", bytes(24)]) == [(keys[0], record), (keys[3], bytes(24))]
    assert records_of(names, [record] * 3 + [bytes(17)]) == [(key, record) for key in keys[:3]]
    assert records_of(names, [record] * 4) == [(key, record) for key in keys]
    with pytest.raises(Unavailable):
        records_of(names, RuntimeError("ERR"))
