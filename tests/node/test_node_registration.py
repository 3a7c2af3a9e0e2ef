"""A node whose id another one holds says so on its log, and comes in once that one is gone."""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict
from kvstore.node.publisher import Publisher
from kvstore.node.replicas import ReplicaLog
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.rpc.errors import abort_arguments

PATIENCE_S = 20.0


class Door(metadata_pb2_grpc.MetadataServicer):
    """Refuses the first boots that come, by name."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals
        self.boots: set[bytes] = set()

    def RegisterNode(  # noqa: N802
        self, request: metadata_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.RegisterNodeResponse:
        self.boots.add(request.node.boot_id)
        if self.left:
            self.left -= 1
            code, message, metadata = abort_arguments(Conflict("another living node has this id", node_id="n"))
            context.set_trailing_metadata(metadata)
            context.abort(code, message)
        return metadata_pb2.RegisterNodeResponse(index_epoch=b"e" * 16, heartbeat_interval_ms=60_000)


def test_a_refused_node_says_so_and_keeps_trying_as_the_same_boot(caplog: pytest.LogCaptureFixture) -> None:
    door, counters = Door(3), Counters()
    server = grpc.server(ThreadPoolExecutor(4))
    metadata_pb2_grpc.add_MetadataServicer_to_server(door, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    info = common_pb2.NodeInfo(node_id="n", boot_id=secrets.token_bytes(16))
    publisher = Publisher(
        f"127.0.0.1:{port}",
        info,
        cast("BlockTable", SimpleNamespace(dram=SimpleNamespace(volume_id="n/dram"), homes=[])),
        ReplicaLog([], counters, MonotonicClock()),
        counters,
        tls=None,
        anti_entropy_interval_s=60.0,
    )  # nothing is held, and what registers names no volumes: of the table only its names are read
    with caplog.at_level(logging.WARNING, "kvstore.node.publisher"):
        publisher.start()
        assert publisher.wait_registered(PATIENCE_S)
        publisher.stop(PATIENCE_S)
    server.stop(None).wait()
    assert len(door.boots) == 1
    assert counters.get("registrations_refused_total") == 3
    told = [record.getMessage() for record in caplog.records if "refuses this node" in record.getMessage()]
    assert len(told) == 1
    assert "another living node has this id" in told[0]
