"""Tests of shares of quotas that one server makes and others hand out: the holder changes, and servers lose the index."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest

from kvproto.v1.common_pb2 import NodeInfo, Tier, VolumeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest, TenantUsage, VolumeUsage
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Unavailable
from kvstore.index.contract import PrefixIndex, ServerRole
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention import quota_shares
from kvstore.metadata.retention.quota_shares import KEPT_INTERVALS, QuotaShares
from kvstore.metadata.retention.settings_store import OperatorSettings, QuotaSetting
from kvstore.metadata.retention.share_table import SHARES_NOTE
from kvstore.observe.counters import Counters
from support.wait import WAIT_S

QUOTA = 1_000_000
INTERVAL_S = 0.25
NODES = ("a", "b", "c")
SETTINGS = OperatorSettings({"t": QuotaSetting(nvme=QUOTA)})


class Notes:
    """The notes of an index that servers share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.epoch = b"e" * 16


class Place:
    """One server's way to the index, and its role."""

    leases_roles = True

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.cut_off = False
        self.makes_shares = False

    @property
    def epoch(self) -> bytes:
        return self.notes.epoch

    def note(self, name: str) -> bytes | None:
        if self.cut_off:
            raise Unavailable("the index is away")
        return self.notes.values.get(name)

    def put_notes(self, notes: dict[str, bytes], *, announce: bool) -> None:
        assert not announce
        if self.cut_off:
            raise Unavailable("the index is away")
        self.notes.values.update(notes)

    def holds(self, role: ServerRole) -> bool:
        assert role is ServerRole.QUOTA
        return self.makes_shares


class Nodes:
    """Live nodes, and the blocks that each holds."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(NODES, 0)
        self.reported = 0

    def heartbeat(self, node: str) -> HeartbeatRequest:
        return HeartbeatRequest(
            node_id=node,
            boot_id=node.encode() * 16,
            sequence=self.reported,
            usages=[VolumeUsage(volume_id=node)],
            tenants=[TenantUsage(tenant="t", nvme_bytes=self.held[node])],
        )

    def live_nodes(self) -> Iterator[tuple[NodeInfo, HeartbeatRequest]]:
        for node in NODES:
            volume = VolumeInfo(volume_id=node, tier=Tier.TIER_NVME, capacity_bytes=1 << 30)
            yield NodeInfo(node_id=node, boot_id=node.encode() * 16, volumes=[volume]), self.heartbeat(node)

    def is_draining(self, node: str) -> bool:
        assert node in NODES
        return False


class Cluster:
    """Two servers over one index, and the shares that the nodes have."""

    def __init__(self, thread: IndexThread) -> None:
        self.thread = thread
        self.clock = ManualClock()
        self.nodes = Nodes()
        self.notes = Notes()
        self.places = [Place(self.notes), Place(self.notes)]
        self.places[0].makes_shares = True
        self.counters = Counters()
        self.servers = [
            QuotaShares(
                cast("NodeTable", self.nodes), cast("PrefixIndex", place), thread, place, self.counters, self.clock, INTERVAL_S
            )
            for place in self.places
        ]
        self.shares: dict[str, int] = {}

    async def beat(self, node: str, server: int) -> bool:
        """Let a node beat to a server. Returns whether it got shares; else it keeps its last one."""
        answer = await self.servers[server].answer(SETTINGS, self.nodes.heartbeat(node))
        if answer is None:
            return False
        (share,) = answer.shares
        self.shares[node] = share.nvme_bytes
        return True

    def make_holder(self, server: int) -> None:
        for number, place in enumerate(self.places):
            place.makes_shares = number == server

    async def round(self) -> None:
        """Time passes, and each holder makes shares."""
        self.clock.advance(INTERVAL_S)
        for shares, place in zip(self.servers, self.places, strict=True):
            shares.tick(SETTINGS)
            if place.makes_shares:
                await shares.answer(SETTINGS, self.nodes.heartbeat("a"))  # waits for the shares


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(quota_shares, "MAX_WAIT_S", WAIT_S)
    thread = IndexThread("test-shares")
    yield Cluster(thread)
    await thread.close()


async def test_shares_of_the_holder_are_handed_out_by_all(cluster: Cluster) -> None:
    assert not await cluster.beat("a", 1), "no server has made shares yet"
    await cluster.round()
    for number, node in enumerate(NODES):
        assert await cluster.beat(node, number % 2)
    assert QUOTA - len(NODES) <= sum(cluster.shares.values()) <= QUOTA


async def test_shares_stay_within_quota_when_the_holder_changes(cluster: Cluster) -> None:
    for turn in range(20):
        cluster.make_holder(turn // 3 % 2)
        cluster.nodes.held = {node: QUOTA // 3 * ((turn + number) % 3) for number, node in enumerate(NODES)}
        for _ in range(2):  # two heartbeats of each node
            await cluster.round()
            for number, node in enumerate(NODES):
                assert await cluster.beat(node, (turn + number) % 2)
        assert 0 < sum(cluster.shares.values()) <= QUOTA


async def test_shares_written_late_by_former_holder_are_ignored(cluster: Cluster) -> None:
    await cluster.round()
    late = cluster.notes.values[SHARES_NOTE]
    cluster.make_holder(1)
    cluster.nodes.held["a"] = QUOTA
    for _ in range(3):
        await cluster.round()
        for node in NODES:
            await cluster.beat(node, 0)
    before = dict(cluster.shares)
    cluster.notes.values[SHARES_NOTE] = late
    cluster.clock.advance(2 * INTERVAL_S)
    for node in NODES:
        await cluster.beat(node, 0)
    assert cluster.shares == before
    await cluster.round()
    assert cluster.notes.values[SHARES_NOTE] != late, "the holder replaces it by its next shares"


async def test_server_without_the_index_answers_without_shares(cluster: Cluster) -> None:
    await cluster.round()
    assert await cluster.beat("a", 1)
    cluster.places[1].cut_off = True
    cluster.clock.advance(2 * INTERVAL_S)
    assert await cluster.beat("a", 1)
    cluster.clock.advance(KEPT_INTERVALS * INTERVAL_S)
    assert not await cluster.beat("a", 1)
    cluster.places[0].cut_off = True
    await cluster.round()
    cluster.clock.advance(KEPT_INTERVALS * INTERVAL_S)
    assert not await cluster.beat("b", 0), "shares that no other server can read are not handed out"
    cluster.places[0].cut_off = cluster.places[1].cut_off = False
    await cluster.round()
    assert await cluster.beat("b", 0)
    assert await cluster.beat("a", 1)


async def test_shares_begin_again_after_the_index_lost_them(cluster: Cluster) -> None:
    for _ in range(5):
        await cluster.round()
    assert await cluster.beat("a", 1)
    cluster.notes.values.clear()
    cluster.notes.epoch = b"f" * 16
    cluster.make_holder(1)
    await cluster.round()
    cluster.clock.advance(INTERVAL_S)
    for number, node in enumerate(NODES):
        assert await cluster.beat(node, number % 2)
    assert 0 < sum(cluster.shares.values()) <= QUOTA


async def test_shares_answer_does_not_wait_for_long_reads(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.round()
    assert await cluster.beat("a", 0)
    monkeypatch.setattr(quota_shares, "MAX_WAIT_S", 0.01)
    ended = threading.Event()
    read = asyncio.create_task(cluster.thread.run(ended.wait, WAIT_S))
    cluster.clock.advance(INTERVAL_S)
    try:
        assert await cluster.beat("b", 0), "the last known shares"
        assert not await cluster.beat("c", 1), "this server knows none"
        assert not read.done()
        assert cluster.counters.get("metadata_quota_answers_late_total") == 2
    finally:
        ended.set()
    monkeypatch.setattr(quota_shares, "MAX_WAIT_S", WAIT_S)
    assert await cluster.beat("c", 1), "the read that began before has ended"
    await read
