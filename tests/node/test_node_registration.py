"""A metadata server that refuses a publishing node's registration, or breaks its stream."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NoReturn, cast

import grpc
import pytest

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded, Conflict
from kvstore.core.types import BlockKey, VolumeId
from kvstore.node.publish.batch_stream import BATCHES_IN_FLIGHT
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.publish.publisher import RETRY_FIRST_S, IndexPublisher
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.rpc.errors import abort_arguments
from kvstore.tiers.contract import VolumeUsage
from support.wait import wait_until

PATIENCE_S = 20.0


class RefusingServer(metadata_pb2_grpc.MetadataServicer):
    """A metadata server that refuses the first registrations."""

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


def ignore(_connected: bool) -> None:
    pass


@contextmanager
def publishing(
    servicer: RefusingServer,
    counters: Counters,
    volumes: Sequence[VolumeId] = (),
    log: ReplicaChangeLog | None = None,
    on_connected: Callable[[bool], None] = ignore,
) -> Iterator[IndexPublisher]:
    """A node that publishes the changes of a log to a server."""
    server = grpc.server(ThreadPoolExecutor(8))
    metadata_pb2_grpc.add_MetadataServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    log = log or ReplicaChangeLog([], counters, MonotonicClock())
    dram = SimpleNamespace(volume_id="n/0", usage=lambda: VolumeUsage(0, 0, 0))
    publisher = IndexPublisher(
        f"127.0.0.1:{port}",
        common_pb2.NodeInfo(
            node_id="n",
            boot_id=secrets.token_bytes(16),
            volumes=[common_pb2.VolumeInfo(volume_id=volume) for volume in volumes],
        ),
        cast("PublishedBlocks", SimpleNamespace(memory_volume=dram, node_volumes=[], held_by=lambda _: [])),
        log,
        counters,
        tls=None,
        anti_entropy_interval_s=60.0,
        on_connected=on_connected,
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop(PATIENCE_S)
        server.stop(None).wait()


def test_registration_refused_is_retried_as_the_same_boot(caplog: pytest.LogCaptureFixture) -> None:
    servicer, counters = RefusingServer(3), Counters()
    with caplog.at_level(logging.WARNING, "kvstore.node.publish.publisher"), publishing(servicer, counters) as publisher:
        assert publisher.wait_registered(PATIENCE_S)
    assert len(servicer.boots) == 1
    assert counters.get("registrations_refused_total") == 3
    refusals = [record.getMessage() for record in caplog.records if "registration refused" in record.getMessage()]
    assert len(refusals) == 1
    assert "another living node has this id" in refusals[0]


class RestartedServer(RefusingServer):
    """A metadata server that no longer knows the node after its first heartbeat, and refuses it from then on."""

    def __init__(self) -> None:
        super().__init__(0)

    def RegisterNode(  # noqa: N802
        self, request: metadata_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.RegisterNodeResponse:
        response = super().RegisterNode(request, context)
        response.heartbeat_interval_ms = 20
        return response

    def Heartbeat(  # noqa: N802
        self,
        request: metadata_pb2.HeartbeatRequest,
        context: grpc.ServicerContext,
    ) -> metadata_pb2.HeartbeatResponse:
        self.left = 1 << 30
        return metadata_pb2.HeartbeatResponse(register_again=True)


class CountingServer(RestartedServer):
    """A metadata server that keeps the numbers of heartbeats and knows the node."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def Heartbeat(  # noqa: N802
        self,
        request: metadata_pb2.HeartbeatRequest,
        context: grpc.ServicerContext,
    ) -> metadata_pb2.HeartbeatResponse:
        self.numbers.append(request.sequence)
        return metadata_pb2.HeartbeatResponse()


def test_heartbeats_are_numbered_without_quotas() -> None:
    servicer = CountingServer()
    with publishing(servicer, Counters()):
        wait_until(lambda: len(servicer.numbers) >= 3)
    assert servicer.numbers == list(range(1, len(servicer.numbers) + 1))


def test_registration_refused_later_is_not_connected(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    seen: list[bool] = []
    with publishing(RestartedServer(), counters, on_connected=seen.append) as publisher:
        assert publisher.wait_registered(PATIENCE_S)
        wait_until(lambda: counters.get("registrations_refused_total") > 0)
        assert not publisher.connected
        assert seen == [True, False]
    assert "(reason=the server does not know this boot); registering again" in caplog.text


class BreakingServer(RefusingServer):
    """A metadata server that breaks the first stream after some messages without acknowledging any."""

    def __init__(self, first_messages: int) -> None:
        super().__init__(0)
        self.first_messages: int | None = first_messages
        self.shown: set[str] = set()

    def RegisterNode(  # noqa: N802
        self, request: metadata_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.RegisterNodeResponse:
        response = super().RegisterNode(request, context)
        response.ClearField("index_epoch")  # not new to the node, which sends no inventories: they would hide a loss
        return response

    def Heartbeat(  # noqa: N802
        self, request: metadata_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.HeartbeatResponse:
        return metadata_pb2.HeartbeatResponse()

    def Publish(  # noqa: N802
        self, requests: Iterator[metadata_pb2.PublishRequest], context: grpc.ServicerContext
    ) -> Iterator[metadata_pb2.PublishResponse]:
        if self.first_messages is not None:
            for _ in range(self.first_messages):
                next(requests)
            self.first_messages = None
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        for request in requests:
            self.shown.add(request.volume_id)
            yield metadata_pb2.PublishResponse(sequence=request.sequence)


class SilentServer(BreakingServer):
    """A metadata server that does not acknowledge messages of the first stream."""

    def Publish(  # noqa: N802
        self, requests: Iterator[metadata_pb2.PublishRequest], context: grpc.ServicerContext
    ) -> Iterator[metadata_pb2.PublishResponse]:
        if self.first_messages is not None:
            self.first_messages = None
            for _ in requests:
                pass
            return
        yield from super().Publish(requests, context)


@pytest.mark.parametrize("servicer", [BreakingServer(3), SilentServer(0)], ids=["broken", "never acknowledged"])
def test_publish_broken_stream_repeats_unsent_batches(servicer: BreakingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more batches than may be in flight. The next stream sends those that the first did not."""
    monkeypatch.setattr("kvstore.node.publish.batch_stream.ACK_TIMEOUT_S", 0.5)
    counters = Counters()
    volumes = [VolumeId(f"n/{number}") for number in range(3 * BATCHES_IN_FLIGHT)]
    log = ReplicaChangeLog(volumes, counters, MonotonicClock())
    held = [
        SimpleNamespace(key=BlockKey(bytes([at]) * 16), parent=None, depth=0, namespace_id=bytes(16))
        for at in range(len(volumes))
    ]
    for volume, block in zip(volumes, held, strict=True):
        log.stored(volume, cast("Block", block))
    with publishing(servicer, counters, volumes, log):
        assert log.wait_published(volumes, MonotonicClock().now_s() + PATIENCE_S)
        assert servicer.shown == set(volumes)
        assert counters.get("publish_interrupted_total") == 1


class FullServer(BreakingServer):
    """A metadata server whose index rejects all changes. It keeps the times of registrations."""

    def __init__(self) -> None:
        super().__init__(0)
        self.registered_s: list[float] = []

    def RegisterNode(  # noqa: N802
        self, request: metadata_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.RegisterNodeResponse:
        self.registered_s.append(time.monotonic())
        return super().RegisterNode(request, context)

    def Publish(  # noqa: N802
        self, requests: Iterator[metadata_pb2.PublishRequest], context: grpc.ServicerContext
    ) -> NoReturn:
        next(requests)
        code, message, metadata = abort_arguments(CapacityExceeded("no space on disk for the index"))
        context.set_trailing_metadata(metadata)
        context.abort(code, message)


def test_publish_rejected_batches_are_retried_ever_later() -> None:
    servicer, volume = FullServer(), VolumeId("n/0")
    log = ReplicaChangeLog([volume], Counters(), MonotonicClock())
    block = SimpleNamespace(key=BlockKey(bytes(16)), parent=None, depth=0, namespace_id=bytes(16))
    log.stored(volume, cast("Block", block))
    with publishing(servicer, Counters(), [volume], log):
        wait_until(lambda: len(servicer.registered_s) >= 6)
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(servicer.registered_s)]
    assert pauses_s[4] >= 16 * RETRY_FIRST_S
