"""Tests of unique node ids."""

from __future__ import annotations

import grpc.aio
import pytest
from metadata_harness import Peer, Running

from kvproto.v1.common_pb2 import NodeInfo, Tier
from kvstore.core.errors import Conflict
from kvstore.metadata.service import MISSED_BEATS

BEAT_S = 0.02
"""Heartbeat interval of the fixture's server."""


class Addressed(Peer):
    """A node with a distinct control address."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, address: str, volume: str) -> None:
        super().__init__(channel, node_id, {volume: Tier.TIER_NVME})
        self.address = address

    def info(self) -> NodeInfo:
        info = super().info()
        info.control_address = self.address
        return info


async def test_register_id_of_live_node_is_refused(running: Running) -> None:
    first = Addressed(running.channel, "n", "10.0.0.1:7411", "n/a")
    second = Addressed(running.channel, "n", "10.0.0.2:7411", "n/b")
    await first.register()
    for _ in range(5):
        with pytest.raises(Conflict, match="another live node has this id"):
            await second.register()
        running.clock.advance(BEAT_S)
        assert not (await first.beat()).register_again, "the first node is not troubled"
    assert (await first.counters())["metadata_node_ids_refused_total"] == 5
    running.clock.advance(MISSED_BEATS * BEAT_S + 0.001)
    await second.register()
    with pytest.raises(Conflict):
        await first.register()


async def test_register_restarted_node_keeps_its_id(running: Running) -> None:
    node = Addressed(running.channel, "n", "10.0.0.1:7411", "n/a")
    await node.register()
    await node.beat()
    node.reboot()
    await node.register()
    node.address = "10.0.0.1:9999"  # the same boot may move
    await node.register()
