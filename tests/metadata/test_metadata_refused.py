"""Tests of rejected calls in a node's name: they change only the reason that is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo, VolumeInfo
from kvstore.core.clock import ManualClock
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_mutations import register_node
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.records import BootReport, CallRefusal
from kvstore.metadata.membership.refusals import REFUSED_S
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import RefusedNode, host_of_peer

TTL_S = 2.5
WHY = "the token is not known to this server"
HOST = "10.0.0.1"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    made = LmdbIndex.open(tmp_path / "index", map_bytes=64 << 20)
    volume = VolumeInfo(volume_id="n/v", tier="TIER_NVME")
    register_node(made, NodeInfo(node_id="n", boot_id=b"b" * 16, control_address=f"{HOST}:1", volumes=[volume]))
    yield made
    made.close()


@pytest.fixture
def table(index: LmdbIndex, clock: ManualClock) -> NodeTable:
    made = NodeTable(index, clock, TTL_S, Counters())
    assert made.record_heartbeat(pb.HeartbeatRequest(node_id="n", boot_id=b"b" * 16), "10.0.9.9")
    made.take_unshared().write(index)
    clock.advance(TTL_S + 1)
    made.tick()
    return made


@pytest.mark.parametrize("host", [HOST, "10.0.9.9"], ids=["registered address", "host of its heartbeats"])
def test_refused_from_its_host_shows_the_reason(table: NodeTable, host: str) -> None:
    visible = table.visible
    table.record_refusal(RefusedNode("n", host, WHY))
    (status,) = table.statuses()
    assert (status.alive, status.refused) == (False, WHY)
    assert table.visible == visible


@pytest.mark.parametrize(
    ("node_id", "host"), [("n", "10.0.0.2"), ("n", ""), ("stranger", HOST)], ids=["another host", "no host", "unknown node"]
)
def test_refused_by_a_stranger_shows_nothing(table: NodeTable, node_id: str, host: str) -> None:
    table.record_refusal(RefusedNode(node_id, host, WHY))
    assert [status.refused for status in table.statuses()] == [""]
    assert not table.take_unshared().refusals


def test_refused_node_that_reports_is_alive(table: NodeTable) -> None:
    table.record_refusal(RefusedNode("n", HOST, WHY))
    table.record_heartbeat(pb.HeartbeatRequest(node_id="n", boot_id=b"b" * 16), HOST)
    (status,) = table.statuses()
    assert (status.alive, status.refused) == (True, "")


def test_refused_long_ago_is_silence(table: NodeTable, clock: ManualClock) -> None:
    table.record_refusal(RefusedNode("n", HOST, WHY))
    clock.advance(REFUSED_S + 0.1)
    assert [status.refused for status in table.statuses()] == [""]


@pytest.mark.parametrize("start_s", [0.0, 1e9])
def test_refused_is_shared_whatever_the_clocks(table: NodeTable, index: LmdbIndex, start_s: float) -> None:
    clock = ManualClock(start_s)
    another = NodeTable(index, clock, TTL_S, Counters())
    another.tick()
    clock.advance(TTL_S + 1)
    table.record_refusal(RefusedNode("n", HOST, WHY))
    table.take_unshared().write(index)
    for _ in range(2):
        another.tick()
        assert [status.refused for status in another.statuses()] == [WHY]
        clock.advance(REFUSED_S - 0.1)
    clock.advance(0.2)
    another.tick()
    assert [status.refused for status in another.statuses()] == [""]


def test_refused_before_start_is_not_shown(table: NodeTable, index: LmdbIndex, clock: ManualClock) -> None:
    table.record_refusal(RefusedNode("n", HOST, WHY))
    table.take_unshared().write(index)
    started = NodeTable(index, clock, TTL_S, Counters())
    started.tick()
    clock.advance(TTL_S + 1)
    started.tick()
    assert [status.refused for status in started.statuses()] == [""]
    table.record_refusal(RefusedNode("n", HOST, WHY))
    table.take_unshared().write(index)
    started.tick()
    assert [status.refused for status in started.statuses()] == [WHY]


def test_report_and_refusal_notes_round_trip() -> None:
    report = BootReport(pb.HeartbeatRequest(node_id="n", boot_id=b"b" * 16), 2**64 - 1, "::1")
    assert BootReport.decode(report.encode()) == report
    refusal = CallRefusal(2**64 - 1, WHY)
    assert CallRefusal.decode(refusal.encode()) == refusal
    assert (BootReport.decode(b"x"), CallRefusal.decode(b"x")) == (None, None)


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:127.0.0.1:4711", "127.0.0.1"), ("ipv6:%5B::1%5D:4711", "::1"), ("ipv6:[::1]:4711", "::1"), ("unix:", ""), ("", "")],
)
def test_host_of_peer_is_without_port(peer: str, host: str) -> None:
    assert host_of_peer(peer) == host
