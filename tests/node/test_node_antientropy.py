"""Anti-entropy: a difference counts as drift only if the range did not change before the server compared it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.checksum import key_range
from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BootId, VolumeId
from kvstore.node.publish.anti_entropy import AntiEntropy
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters

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

    def RepairRange(  # noqa: N802
        self, request: metadata_pb2.RepairRangeRequest, timeout: float
    ) -> metadata_pb2.RepairRangeResponse:
        assert timeout > 0
        self.repaired.append(request.range)
        return metadata_pb2.RepairRangeResponse()


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
