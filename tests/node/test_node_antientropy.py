"""Anti-entropy: a difference counts as drift only if the range did not change before the server compared it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.checksum import key_range
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import DeadlineExceeded, Unavailable
from kvstore.core.types import BlockKey, BootId, VolumeId
from kvstore.node.publish.anti_entropy import AntiEntropy, Repairs
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.rpc.codec import run_from_proto
from kvstore.rpc.failover.attempts import unavailable
from support.chains import key_of

VOLUME = VolumeId("n/dram")
KEY = BlockKey(b"k" * 16)


class Server:
    """A server that reports the range of one key as different. During the comparison, the block may leave and return."""

    def __init__(self, log: ReplicaChangeLog, block: Block, *, meanwhile: bool) -> None:
        self.log, self.block, self.meanwhile = log, block, meanwhile
        self.repaired: list[int] = []

    def CompareDigests(  # noqa: N802
        self, request: metadata_pb2.CompareDigestsRequest, timeout: float
    ) -> metadata_pb2.CompareDigestsResponse:
        assert timeout > 0
        if self.meanwhile:
            self.log.removed(VOLUME, KEY)
            self.log.stored(VOLUME, self.block)
            for taken in self.log.take(10):
                self.log.acknowledge(VOLUME, taken.events)
        where = key_range(KEY)
        mine = request.first_range <= where < request.first_range + len(request.digests)
        return metadata_pb2.CompareDigestsResponse(differing_ranges=[where] if mine else [])

    def RepairRanges(  # noqa: N802
        self, request: metadata_pb2.RepairRangesRequest, timeout: float
    ) -> metadata_pb2.RepairRangesResponse:
        assert timeout > 0
        self.repaired += request.ranges
        return metadata_pb2.RepairRangesResponse()


@pytest.mark.parametrize("meanwhile", [False, True])
def test_block_removed_and_added_again_is_no_drift(meanwhile: bool) -> None:
    counters = Counters()
    log = ReplicaChangeLog([VOLUME], counters, ManualClock())
    block = cast("Block", SimpleNamespace(key=KEY, parent=None, depth=0, namespace_id=bytes(16), dram=object()))
    log.stored(VOLUME, block)
    for taken in log.take(10):
        log.acknowledge(VOLUME, taken.events)
    arena = SimpleNamespace(volume_id=VOLUME)
    table = cast("PublishedBlocks", SimpleNamespace(memory_volume=arena, node_volumes=[], held_by=lambda _: [block]))
    server = Server(log, block, meanwhile=meanwhile)
    found = AntiEntropy(cast("metadata_pb2_grpc.MetadataStub", server), "n", table, log, counters)
    assert found.compare(BootId(b"b" * 16)) == (0 if meanwhile else 1)
    assert server.repaired == ([] if meanwhile else [key_range(KEY)])
    assert counters.get("index_ranges_drifted_total") == (0 if meanwhile else 1)


def test_compare_ends_with_its_scope() -> None:
    """A caller that has given up holds no thread for the rest of the index."""
    node = BusyNode(range(0))
    with CancelScope() as scope:
        scope.cancel()
        with pytest.raises(DeadlineExceeded):
            node.anti_entropy.compare(BootId(b"b" * 16))


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy node always has a change that is not acknowledged."""
    monkeypatch.setattr("kvstore.node.publish.anti_entropy.SETTLE_S", 0.01)


class BusyNode:
    """A node that stores another block at each call to the server, and an index that lacks some of its blocks.

    Args:
        missing: numbers of blocks that the index has lost, though it acknowledged them.
    """

    def __init__(self, missing: range) -> None:
        self.counters = Counters()
        self.log = ReplicaChangeLog([VOLUME], self.counters, MonotonicClock())
        self.blocks: dict[BlockKey, Block] = {}
        self.index: set[BlockKey] = set()
        self.hot: list[int] = []
        """Ranges in which the node stores."""
        for number in range(400):
            self.store(number)
        self.publish()
        self.index -= {key_of(number) for number in missing}
        self.scans = 0
        """Passes over the table."""
        table = SimpleNamespace(held_by=self.held_by)
        stub = cast("metadata_pb2_grpc.MetadataStub", self)
        self.anti_entropy = AntiEntropy(stub, "n", cast("PublishedBlocks", table), self.log, self.counters)

    def held_by(self, _volume: VolumeId) -> list[Block]:
        self.scans += 1
        return list(self.blocks.values())

    def store(self, number: int) -> None:
        key = key_of(number)
        self.blocks[key] = cast("Block", SimpleNamespace(key=key, parent=None, depth=0, namespace_id=bytes(16), dram=object()))
        self.log.stored(VOLUME, self.blocks[key])

    def publish(self) -> None:
        """Publish all blocks that were stored."""
        for taken in self.log.take(1_000):
            self.index |= {key for run in taken.stored for key in run.keys}
            self.log.acknowledge(VOLUME, taken.events)

    def _go_on(self) -> None:
        self.publish()
        number = len(self.blocks)
        while self.hot and key_range(key_of(number)) not in self.hot:
            number += 1_000_003
        self.store(number)

    def CompareDigests(  # noqa: N802
        self, request: metadata_pb2.CompareDigestsRequest, timeout: float
    ) -> metadata_pb2.CompareDigestsResponse:
        assert timeout > 0
        self._go_on()
        last = request.first_range + len(request.digests)
        counts = Counter(map(key_range, self.index))
        differing = [at for at in range(request.first_range, last) if counts[at] != request.counts[at - request.first_range]]
        return metadata_pb2.CompareDigestsResponse(differing_ranges=differing)

    def RepairRanges(  # noqa: N802
        self, request: metadata_pb2.RepairRangesRequest, timeout: float
    ) -> metadata_pb2.RepairRangesResponse:
        assert timeout > 0
        wanted = {key for run in request.blocks for key in run_from_proto(run).keys}
        self.index = {key for key in self.index if key_range(key) not in request.ranges} | wanted
        self._go_on()
        return metadata_pb2.RepairRangesResponse()

    def lacks(self) -> set[BlockKey]:
        """Published blocks that the index lacks."""
        self.publish()
        return self.blocks.keys() - self.index


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("suspects", [False, True])
def test_busy_node_repairs_what_it_does_not_change(suspects: bool) -> None:
    node = BusyNode(range(100, 300))
    boot = BootId(b"b" * 16)
    ranges = {key_range(key_of(number)) for number in range(100, 300)}
    compare = node.anti_entropy.compare
    repaired = node.anti_entropy.compare_suspects(boot, ranges).repaired if suspects else compare(boot)
    assert repaired >= len(ranges) - 3
    assert len(node.lacks()) <= 3


@pytest.mark.usefixtures("short_waits")
def test_suspect_range_that_changes_at_first_is_compared_later() -> None:
    node = BusyNode(range(100, 101))
    (where,) = node.hot = [key_range(key_of(100))]
    boot, compare = BootId(b"b" * 16), node.CompareDigests
    calls: list[int] = []

    def count(request: metadata_pb2.CompareDigestsRequest, timeout: float) -> metadata_pb2.CompareDigestsResponse:
        calls.append(request.first_range)
        if len(calls) == 3:
            node.hot.clear()
        return compare(request, timeout)

    node.CompareDigests = count  # type: ignore[method-assign]
    assert node.anti_entropy.compare_suspects(boot, {where}) == Repairs(repaired=1)
    assert node.scans == 1
    assert not node.lacks()
    assert node.counters.get("anti_entropy_ranges_busy_total") == 0


@pytest.mark.usefixtures("short_waits")
def test_suspect_range_that_always_changes_is_left() -> None:
    node = BusyNode(range(100, 101))
    (where,) = node.hot = [key_range(key_of(100))]
    assert node.anti_entropy.compare_suspects(BootId(b"b" * 16), {where, 7}) == Repairs(left={where})
    assert node.counters.get("anti_entropy_ranges_busy_total") == 1
    assert node.lacks() == {key_of(100)}


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("suspects", [False, True])
def test_repair_that_fails_ends_no_other_repair(monkeypatch: pytest.MonkeyPatch, suspects: bool) -> None:
    """The shard of some ranges is away."""
    monkeypatch.setattr("kvstore.node.publish.anti_entropy.REPAIRS_PER_CALL", 4)
    node, boot = BusyNode(range(100, 300)), BootId(b"b" * 16)
    ranges = sorted({key_range(key_of(number)) for number in range(100, 300)})
    away, repair = set(ranges[::9]), node.RepairRanges

    def reject(request: metadata_pb2.RepairRangesRequest, timeout: float) -> metadata_pb2.RepairRangesResponse:
        if away.intersection(request.ranges):
            raise unavailable("a shard is away")
        return repair(request, timeout)

    node.RepairRanges = reject  # type: ignore[method-assign]
    if suspects:
        assert away <= node.anti_entropy.compare_suspects(boot, ranges).left
    else:
        with pytest.raises(Unavailable, match="a shard is away"):
            node.anti_entropy.compare(boot)
    lacking = {key_range(key) for key in node.lacks()}
    assert away <= lacking
    assert len(lacking) <= 4 * len(away) + 3, "only ranges of the same calls are left out"
    node.RepairRanges = repair  # type: ignore[method-assign]
    node.anti_entropy.compare(boot)
    assert len(node.lacks()) <= 3
