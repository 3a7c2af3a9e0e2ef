"""Checks of key ranges that a metadata server asks a node for: when they count as made, and which blocks the node sends."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.checksum import key_range
from kvstore.core.clock import MonotonicClock
from kvstore.core.limits import DIGEST_RANGES, MAX_RANGE_CHECKS
from kvstore.core.types import BlockKey, VolumeId
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.publish.range_checks import RequestedChecks
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.codec import ranges_from_bitmap, ranges_to_bitmap
from kvstore.tiers.contract import VolumeUsage
from support.chains import chain
from support.wait import wait_until

PATIENCE_S = 20.0


def asking(*checks: tuple[int, set[int], bool]) -> metadata_pb2.HeartbeatResponse:
    """A response that asks for checks."""
    response = metadata_pb2.HeartbeatResponse()
    for token, ranges, lost in checks:
        response.checks.add(token=token, ranges=ranges_to_bitmap(ranges), lost=lost)
    return response


def reported(checks: RequestedChecks) -> list[int]:
    heartbeat = metadata_pb2.HeartbeatRequest()
    checks.report(heartbeat)
    return list(heartbeat.checked)


def test_bitmap_keeps_the_ranges() -> None:
    for ranges in (set[int](), {0}, {DIGEST_RANGES - 1}, {7, 8, 4_000}, set(range(DIGEST_RANGES))):
        assert ranges_from_bitmap(ranges_to_bitmap(ranges)) == ranges
    assert ranges_from_bitmap(b"") == set()
    assert ranges_from_bitmap(b"\xff" * 10_000) == set(range(DIGEST_RANGES))


def test_lost_ranges_are_reported_after_the_acknowledgement() -> None:
    checks = RequestedChecks()
    checks.on_heartbeat(asking((1, {5}, True)))
    (check,) = checks.lost()
    assert check.ranges == {5}
    checks.sent(1, 7)
    checks.acknowledged(6)
    assert reported(checks) == []
    checks.on_heartbeat(asking((1, {5}, True)))
    assert checks.lost() == [], "it is on its way"
    checks.acknowledged(7)
    assert reported(checks) == [1]
    checks.on_heartbeat(asking((1, {5}, True)))
    assert checks.lost() == [], "it is made"


def test_numbering_begins_again_checks_are_asked_for_again() -> None:
    checks = RequestedChecks()
    checks.on_heartbeat(asking((1, {5}, True)))
    checks.sent(1, 7)
    checks.restarted()
    checks.acknowledged(9)
    assert reported(checks) == []
    checks.on_heartbeat(asking((1, {5}, True)))
    assert [check.token for check in checks.lost()] == [1]


def test_suspects_wake_the_comparison() -> None:
    checks = RequestedChecks()
    assert checks.wait_for_suspects(0.0) is None
    checks.on_heartbeat(asking((1, {5}, True), (2, {6}, False)))
    found = checks.wait_for_suspects(PATIENCE_S)
    assert found is not None
    assert (found.token, found.ranges) == (2, {6})
    checks.compared(2, [])
    assert reported(checks) == [2]
    checks.on_heartbeat(asking())
    assert checks.wait_for_suspects(0.0) is None
    assert checks.lost() == [], "the server no longer asks"
    for token in range(10, 10 + 2 * MAX_RANGE_CHECKS):
        checks.on_heartbeat(asking((token, {6}, False)))
        checks.compared(token, [])
    assert len(reported(checks)) == MAX_RANGE_CHECKS
    waiting = threading.Thread(target=checks.wait_for_suspects, args=(60.0,))
    waiting.start()
    checks.wake()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_suspects_not_compared_yet_stay_after_the_request() -> None:
    """A routine round may take longer than the server asks."""
    checks = RequestedChecks()
    checks.on_heartbeat(asking((1, {5}, False)))
    checks.on_heartbeat(asking())
    found = checks.wait_for_suspects(0.0)
    assert found is not None
    assert found.ranges == {5}
    for token in range(10, 10 + 2 * MAX_RANGE_CHECKS):
        checks.on_heartbeat(asking((token, {6}, False)))
    checks.on_heartbeat(asking())
    waiting = []
    while (found := checks.wait_for_suspects(0.0)) is not None:
        waiting.append(found.token)
        checks.compared(found.token, [])
    assert waiting == list(range(10 + MAX_RANGE_CHECKS, 10 + 2 * MAX_RANGE_CHECKS)), "the last ones, and no more"


def test_suspects_left_are_compared_again_after_the_others() -> None:
    checks = RequestedChecks()
    both = asking((1, {5, 6}, False), (2, {7}, False))
    checks.on_heartbeat(both)
    checks.compared(1, [6])
    checks.on_heartbeat(both)
    assert reported(checks) == []
    for token, ranges in ((2, {7}), (1, {6})):
        found = checks.wait_for_suspects(0.0)
        assert found is not None
        assert (found.token, found.ranges) == (token, ranges)
        checks.compared(token, [])
    assert reported(checks) == [2, 1]
    checks.on_heartbeat(asking((3, {8}, False)))
    checks.compared(3, [8])
    checks.on_heartbeat(asking())
    assert checks.wait_for_suspects(0.0) is None, "it was tried, and the server no longer asks"


class AskingServer(metadata_pb2_grpc.MetadataServicer):
    """A metadata server that asks for a check of ranges in each answer to a heartbeat, and remembers which are reported.

    Args:
        check: its number, its ranges, and whether they are lost.
    """

    def __init__(self, *check: tuple[int, set[int], bool]) -> None:
        self.check = check
        self.checked: set[int] = set()

    def RegisterNode(  # noqa: N802
        self, request: metadata_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.RegisterNodeResponse:
        return metadata_pb2.RegisterNodeResponse(heartbeat_interval_ms=20)

    def Heartbeat(  # noqa: N802
        self, request: metadata_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.HeartbeatResponse:
        self.checked.update(request.checked)
        return asking(*self.check)


class LosingServer(AskingServer):
    """A metadata server that lost some ranges, and breaks the first stream in which it receives blocks of them."""

    def __init__(self, ranges: set[int]) -> None:
        super().__init__((77, ranges, True))
        self.breaks = True
        self.again: set[bytes] = set()

    def Publish(  # noqa: N802
        self, requests: Iterator[metadata_pb2.PublishRequest], context: grpc.ServicerContext
    ) -> Iterator[metadata_pb2.PublishResponse]:
        for request in requests:
            assert not self.checked, "reported before it was sent"
            if self.breaks:
                self.breaks = False
                context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
            for run in request.stored:
                self.again.update(run.keys[at : at + 16] for at in range(0, len(run.keys), 16))
            yield metadata_pb2.PublishResponse(sequence=request.sequence)


@contextmanager
def publishing_to(
    servicer: metadata_pb2_grpc.MetadataServicer, held: list[SimpleNamespace], counters: Counters
) -> Iterator[None]:
    """Run the publisher of a node that holds blocks, and a server."""
    volume = VolumeId("n/0")
    server = grpc.server(ThreadPoolExecutor(4))
    metadata_pb2_grpc.add_MetadataServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    arena = SimpleNamespace(volume_id=volume, usage=lambda: VolumeUsage(0, 0, 0))
    publisher = IndexPublisher(
        f"127.0.0.1:{port}",
        common_pb2.NodeInfo(node_id="n", boot_id=secrets.token_bytes(16), volumes=[common_pb2.VolumeInfo(volume_id=volume)]),
        cast("PublishedBlocks", SimpleNamespace(memory_volume=arena, node_volumes=[], held_by=lambda _: list(held))),
        ReplicaChangeLog([volume], counters, MonotonicClock()),
        counters,
        tls=None,
        anti_entropy_interval_s=60.0,
    )
    publisher.start()
    try:
        yield
    finally:
        publisher.stop(PATIENCE_S)
        server.stop(None).wait()


def test_blocks_of_lost_ranges_are_published_again() -> None:
    keys = chain("c", 300)
    lost = {key_range(key) for key in keys[::3]}
    held = [
        SimpleNamespace(key=key, parent=keys[at - 1] if at else None, depth=at, namespace_id=bytes(16), dram=object())
        for at, key in enumerate(keys)
    ]
    servicer, counters = LosingServer(lost), Counters()
    with publishing_to(servicer, held, counters):
        wait_until(lambda: servicer.checked == {77}, "the node reports that it sent them", PATIENCE_S)
        assert servicer.again == {bytes(key) for key in keys if key_range(BlockKey(key)) in lost}
        assert counters.get(node_metrics.LOST_RANGE_BLOCKS_SENT) >= len(servicer.again)


class FailingServer(AskingServer):
    """A metadata server that asks for a comparison of suspect ranges, and fails the first one."""

    def __init__(self) -> None:
        super().__init__((78, {5, 2_000}, False))
        self.compared: list[int] = []
        """Number of ranges per call."""

    def CompareDigests(  # noqa: N802
        self, request: metadata_pb2.CompareDigestsRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.CompareDigestsResponse:
        assert not self.checked, "reported before it was compared"
        self.compared.append(len(request.digests))
        if len(self.compared) == 1:
            context.abort(grpc.StatusCode.INTERNAL, "index away")
        return metadata_pb2.CompareDigestsResponse()


def test_failed_check_of_suspects_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.publish.publisher.RETRY_MOST_S", 0.01)
    servicer, counters = FailingServer(), Counters()
    with publishing_to(servicer, [], counters):
        wait_until(lambda: servicer.checked == {78}, "the node reports that it compared them", PATIENCE_S)
    assert servicer.compared == [128, 128, 128], "one call failed, and two parts of key space have suspects"
    assert counters.get(node_metrics.ANTI_ENTROPY_FAILED) == 1
