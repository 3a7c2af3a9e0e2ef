"""Tests of several servers that exchange heartbeats by one index: simulated, with clocks, pauses and outages of their own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Unavailable
from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat, PrefixIndex
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_mutations import forget_node, register_node
from kvstore.metadata.membership import exchange
from kvstore.metadata.membership.node_table import READ_RATE_AGE_S, NodeTable, UnsharedChanges
from kvstore.metadata.membership.records import report_note
from kvstore.observe.counters import Counters
from samples import sample

BOOT = BootId(b"b" * 16)
ADDRESS = "127.0.0.1:1"
UNIT_S = 1 / 64
TTL, TICK, LONGEST_TICK, INTERVAL = 160, 20, 22, 32
"""In units: times of the simulation are exact."""


class CutIndex:
    """An index that one server cannot reach at times."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.away = False
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise Unavailable("the index does not answer")
        self.reads.append(name)
        return getattr(self._index, name)


class Server:
    """A server of the simulation: its table, its clock, and its faults."""

    def __init__(self, index: PrefixIndex, start_s: float = 0.0) -> None:
        self.index = CutIndex(index)
        self.clock = ManualClock(start_s)
        self.counters = Counters()
        self.table = NodeTable(cast("PrefixIndex", self.index), self.clock, TTL * UNIT_S, self.counters)
        self.table.view()
        self.paused = False

    def tick(self) -> None:
        """The exchange of one tick, as by maintenance."""
        changes = self.table.take_unshared()
        try:
            changes.write(cast("PrefixIndex", self.index))
        except Unavailable:
            self.table.write_failed(changes)
        self.table.tick()


def beat(node_id: str, number: int, **contents: Any) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(node_id=node_id, boot_id=BOOT, sequence=number, **contents)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    made = LmdbIndex.open(tmp_path / "index", map_bytes=16 << 20)
    for node_id in ("a", "b"):
        register_node(made, NodeInfo(node_id=node_id, boot_id=BOOT, control_address=ADDRESS))
    yield made
    made.close()


# ---- simulation ----
@dataclass
class SimulatedNode:
    """A node that beats until it ends."""

    node_id: NodeId
    next_beat: int
    ends: int
    last_arrival: int = 0
    last_record: int = 0
    """When its last heartbeat was written to the index."""
    number: int = 0
    server: int = -1


@dataclass
class Fault:
    """A pause of a server, or an outage of the index for a server."""

    server: int
    begins: int
    ends: int
    outage: bool


@dataclass
class World:
    """Servers and nodes, step by step."""

    servers: list[Server]
    nodes: list[SimulatedNode]
    faults: list[Fault]
    random: Any
    index: PrefixIndex
    fault_ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_tick = [self.random.randint(0, TICK) for _ in self.servers]
        self.fault_ended = [0] * len(self.servers)

    def faulty(self, server: int) -> bool:
        return self.servers[server].paused or self.servers[server].index.away

    def run(self, until: int) -> None:
        for now in range(until):
            for server in self.servers:
                server.clock.advance(UNIT_S)
            for fault in self.faults:
                self._apply(fault, now)
            for node in self.nodes:
                self._beat(node, now)
            for number, server in enumerate(self.servers):
                if now >= self.next_tick[number] and not server.paused:
                    self._tick(number, now)

    def _apply(self, fault: Fault, now: int) -> None:
        server = self.servers[fault.server]
        if now == fault.begins:
            server.index.away, server.paused = fault.outage, not fault.outage
        elif now == fault.ends:
            if server.paused:
                server.table.paused()
            server.index.away = server.paused = False
            self.fault_ended[fault.server] = now
            self.next_tick[fault.server] = now

    def _beat(self, node: SimulatedNode, now: int) -> None:
        if not node.next_beat <= now < node.ends:
            return
        node.next_beat = now + INTERVAL + self.random.randint(-3, 3)
        able = [number for number in range(len(self.servers)) if not self.faulty(number)]
        if able:
            node.server, node.last_arrival, node.number = self.random.choice(able), now, node.number + 1
            node.last_record = -1
            assert self.servers[node.server].table.record_heartbeat(beat(node.node_id, node.number))

    def _tick(self, number: int, now: int) -> None:
        server = self.servers[number]
        self.next_tick[number] = now + self.random.randint(TICK, LONGEST_TICK)
        if server.index.away:
            with pytest.raises(Unavailable):
                server.tick()
        else:
            server.tick()
        for node in self.nodes:
            if node.server == number and node.last_record < 0 and not server.index.away:
                node.last_record = now
            alive = server.table.is_alive(node.node_id)
            if now < node.ends:
                assert alive, "a node that beats is never hidden"
                continue
            quiet_since = [node.last_arrival, self.fault_ended[number], now if server.index.away else 0]
            if node.last_record < 0:
                continue  # the server that it told is paused, and will tell the others
            if now - max(node.last_record, *quiet_since) > TTL + 2 * LONGEST_TICK:
                assert not alive, "a silent node is hidden in time"
            if number == node.server and now - max(quiet_since) > TTL + LONGEST_TICK:
                assert not alive, "the server that it told needs one tick"


@settings(max_examples=sample(25, of=300), deadline=None)
@given(
    starts_s=st.lists(st.integers(-(2**30), 2**30).map(float), min_size=1, max_size=3),
    ends=st.lists(st.integers(100, 900), min_size=1, max_size=3),
    fault=st.none() | st.builds(Fault, st.integers(0, 2), st.integers(50, 400), st.integers(0, 600), st.booleans()),
    random=st.randoms(use_true_random=False),
)
def test_exchange_hides_silent_nodes_in_time_and_no_others(
    starts_s: list[float],
    ends: list[int],
    fault: Fault | None,
    random: Any,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = LmdbIndex.open(Path(folder) / "index", map_bytes=16 << 20)
        nodes = [SimulatedNode(NodeId(f"n{number}"), random.randint(0, INTERVAL), end) for number, end in enumerate(ends)]
        for node in nodes:
            register_node(index, NodeInfo(node_id=node.node_id, boot_id=BOOT, control_address=ADDRESS))
        faults = []
        if fault is not None:
            fault.server %= len(starts_s)
            fault.ends += fault.begins + 1
            faults.append(fault)
        World([Server(index, start_s) for start_s in starts_s], nodes, faults, random, index).run(1_300)
        index.close()


# ---- single steps ----
def test_exchange_node_is_alive_for_all_by_one_server(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index, 1e9)
    for number in range(1, 20):
        for server in (one, two):
            server.clock.advance(0.5)
        one.table.record_heartbeat(beat("a", number))
        for server in (one, two):
            server.tick()
            assert server.table.is_alive(NodeId("a"))
            assert server.table.is_alive(NodeId("b")) == (number * 0.5 <= TTL * UNIT_S)
    assert [status.heartbeat_age_ms for status in two.table.statuses()] == [0, 9_500]


def test_exchange_unnumbered_heartbeats_keep_a_node_alive(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    for _ in range(20):
        for server in (one, two):
            server.clock.advance(0.5)
        one.table.record_heartbeat(beat("a", 0))
        one.tick()
        two.tick()
        assert two.table.is_alive(NodeId("a"))


def test_exchange_registration_again_shows_the_node_to_all(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    one.table.record_heartbeat(beat("a", 7))
    one.tick()
    two.tick()
    for server in (one, two):
        server.clock.advance(3.0)
        server.tick()
        assert not server.table.is_alive(NodeId("a"))
    one.table.record_registration(NodeId("a"), BOOT)
    assert one.table.is_alive(NodeId("a"))
    one.tick()
    two.tick()
    assert two.table.is_alive(NodeId("a"))


def test_exchange_restart_registered_elsewhere_stays_visible(index: LmdbIndex) -> None:
    """The counter of a new boot starts at 1. If it continued that of the last boot, later heartbeats would look older."""
    registers, hears = Server(index), Server(index)
    for number in range(1, 41):
        hears.table.record_heartbeat(beat("a", number))
        hears.tick()
        registers.tick()
    boot_id = BootId(b"c" * 16)
    register_node(index, NodeInfo(node_id="a", boot_id=boot_id, control_address=ADDRESS))
    registers.table.record_registration(NodeId("a"), boot_id)
    registers.tick()
    for number in range(1, 21):
        hears.table.record_heartbeat(pb.HeartbeatRequest(node_id="a", boot_id=boot_id, sequence=number))
        for server in (hears, registers):
            server.clock.advance(0.5)
            server.tick()
            assert server.table.is_alive(NodeId("a"))


def test_exchange_report_is_written_if_its_contents_change(index: LmdbIndex) -> None:
    server = Server(index)
    usages = [pb.VolumeUsage(volume_id="a/v", used_bytes=5)]
    for number in range(1, 6):
        ahead_ms = round(time.time() * 1000) + 60_000 + number  # the time of day changes always, the offset hardly
        server.table.record_heartbeat(beat("a", number, usages=usages, unix_ms=ahead_ms))
        changes = server.table.take_unshared()
        assert (list(changes.beats.beats), list(changes.beats.reports)) == (["a"], ["a"] if number == 1 else [])
        changes.write(index)
        server.table.tick()
    assert index.beats() == {"a": Beat(BOOT, 5, 1)}
    server.table.record_heartbeat(beat("a", 6, usages=[]))
    server.tick()
    assert index.beats() == {"a": Beat(BOOT, 6, 6)}


def test_exchange_clock_offset_is_known_at_other_servers(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    usages = [pb.VolumeUsage(volume_id="a/v", used_bytes=5)]
    for number, ahead_s in enumerate((60, 60, -90), 1):
        one.table.record_heartbeat(beat("a", number, usages=usages, unix_ms=round((time.time() + ahead_s) * 1000)))
        one.tick()
        two.tick()
        assert round(two.table.status(NodeId("a")).clock_offset_ms / 1000) == ahead_s


def test_exchange_report_is_read_when_somebody_asks(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    for number in range(1, 4):
        one.table.record_heartbeat(beat("a", number, usages=[pb.VolumeUsage(used_bytes=number)], read_bytes_per_s=number))
        one.tick()
        two.index.reads.clear()
        two.tick()
        assert "note" not in two.index.reads
        assert two.table.status(NodeId("a")).usages[0].used_bytes == number
        assert two.index.reads.count("note") == 1
        two.table.statuses()
        assert two.index.reads.count("note") == 1, "what did not change is not read again"


def test_exchange_read_rate_is_read_rarely(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    for number in range(1, 4):
        one.table.record_heartbeat(beat("a", number, read_bytes_per_s=number))
        one.tick()
        two.tick()
        assert two.table.read_bytes_per_s(NodeId("a")) == 1
    two.clock.advance(READ_RATE_AGE_S)
    assert two.table.read_bytes_per_s(NodeId("a")) == 3


def test_exchange_node_that_changes_servers_has_one_report(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    for number in range(1, 12):
        teller = (one, two)[number // 2 % 2]
        teller.table.record_heartbeat(beat("a", number, usages=[pb.VolumeUsage(used_bytes=number // 3)]))
        for server in (one, two):
            server.tick()
        one.tick()
        for server in (one, two):
            assert server.table.status(NodeId("a")).usages[0].used_bytes == number // 3
            assert next(server.table.live_nodes())[1] is not None


def test_exchange_many_reports_are_read_at_once(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    ids = [f"n{number:02}" for number in range(40)]
    for node_id in ids:
        register_node(index, NodeInfo(node_id=node_id, boot_id=BOOT, control_address=ADDRESS))
        one.table.record_heartbeat(beat(node_id, 1, usages=[pb.VolumeUsage(volume_id=node_id)]))
    one.tick()
    two.tick()
    two.index.reads.clear()
    shown = {status.node.node_id: status for status in two.table.statuses()}
    assert [shown[node_id].usages[0].volume_id for node_id in ids] == ids
    assert (two.index.reads.count("notes"), two.index.reads.count("note")) == (1, 0)


def test_exchange_contents_of_failed_write_are_written_later(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    usages = [pb.VolumeUsage(used_bytes=1)]
    for number in range(1, 4):
        one.table.record_heartbeat(beat("a", number, usages=usages))
        changes = one.table.take_unshared()
        if number == 1:
            one.table.write_failed(changes)
        else:
            changes.write(index)
        assert list(changes.beats.reports) == (["a"] if number < 3 else [])
        one.table.tick()
    two.tick()
    assert two.table.status(NodeId("a")).usages[0].used_bytes == 1


def test_exchange_heartbeats_from_before_a_pause_are_dropped(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    one.table.record_heartbeat(beat("a", 1, usages=[pb.VolumeUsage(used_bytes=1)]))
    two.table.record_heartbeat(beat("a", 2, usages=[pb.VolumeUsage(used_bytes=2)]))
    two.tick()
    one.table.paused()
    one.tick()
    assert index.beats()[NodeId("a")] == Beat(BOOT, 2, 2)
    assert one.table.status(NodeId("a")).usages[0].used_bytes == 2


def test_exchange_heartbeats_whose_reports_waited_are_dropped(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Server(index), Server(index)
    for number, most_s in ((1, -1.0), (2, 1.0)):
        monkeypatch.setattr(exchange, "MAX_BEAT_AGE_S", most_s)
        one.table.record_heartbeat(beat("a", number, usages=[pb.VolumeUsage(used_bytes=7)]))
        assert index.beats() == {}
        one.tick()
    two.tick()
    assert index.beats() == {NodeId("a"): Beat(BOOT, 2, 1)}
    assert two.table.status(NodeId("a")).usages[0].used_bytes == 7


def test_exchange_heartbeats_that_waited_are_not_written(index: LmdbIndex) -> None:
    taken_s = time.monotonic() - exchange.MAX_BEAT_AGE_S - 1.0
    with pytest.raises(Unavailable):
        exchange.UnsharedBeats({NodeId("a"): Beat(BOOT, 1, 1)}, taken_s=taken_s).write(index)
    assert index.beats() == {}


def test_exchange_report_stays_while_index_rejects_writes(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unavailable("no space for the index")

    one, two = Server(index), Server(index)

    def used(server: Server) -> int:
        return server.table.status(NodeId("a")).usages[0].used_bytes

    one.table.record_heartbeat(beat("a", 1, usages=[pb.VolumeUsage(used_bytes=7)]))
    one.tick()
    with monkeypatch.context() as full:
        full.setattr(index, "put_beats", fail)
        full.setattr(index, "put_notes", fail)
        for number in (2, 3):
            one.table.record_heartbeat(beat("a", number, usages=[pb.VolumeUsage(used_bytes=8)]))
            one.tick()
            assert used(one) == 8
    one.table.record_heartbeat(beat("a", 4, usages=[pb.VolumeUsage(used_bytes=8)]))
    one.tick()
    two.tick()
    assert used(two) == 8


def test_exchange_node_forgotten_in_a_failed_write_is_dropped(index: LmdbIndex) -> None:
    one = Server(index)
    one.table.record_heartbeat(beat("a", 1, usages=[pb.VolumeUsage(used_bytes=7)]))
    unwritten = one.table.take_unshared()
    forget_node(index, NodeId("a"), BOOT)
    one.table.tick()
    one.table.write_failed(unwritten)
    one.table.record_heartbeat(beat("b", 1))
    one.tick()
    assert set(index.beats()) == {NodeId("b")}


def test_exchange_refusals_do_not_delay_heartbeats(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_notes: object, *, announce: bool) -> None:
        raise Unavailable(f"the index does not answer (announce={announce})")

    monkeypatch.setattr(index, "put_notes", fail)
    heard = {NodeId("a"): Beat(BOOT, 2, 1)}
    with pytest.raises(Unavailable):
        UnsharedChanges(exchange.UnsharedBeats(heard), {"refusal": b"r"}).write(index)
    assert index.beats() == heard


def test_exchange_late_heartbeat_of_forgotten_node_is_removed(index: LmdbIndex) -> None:
    one, two = Server(index), Server(index)
    two.table.record_heartbeat(beat("a", 1))
    late = two.table.take_unshared()
    forget_node(index, NodeId("a"), BOOT)
    late.write(index)
    one.tick()
    assert set(one.table.orphaned_beats) == {"a"}
    forget_node(index, NodeId("b"), BOOT)
    assert index.notes("node/") == {}
    index.put_notes({report_note(NodeId("a")): None})
    index.put_beats(dict.fromkeys(one.table.orphaned_beats))
    one.tick()
    assert not one.table.orphaned_beats


def test_exchange_other_boot_shows_no_life(index: LmdbIndex) -> None:
    server = Server(index)
    for number in range(10):
        server.clock.advance(0.5)
        index.put_beats({NodeId("a"): Beat(BootId(b"x" * 16), number, 0)})
        server.tick()
    assert not server.table.is_alive(NodeId("a"))


def test_exchange_index_outage_hides_no_node(index: LmdbIndex) -> None:
    server = Server(index)
    server.index.away = True
    for _ in range(20):
        server.clock.advance(0.5)
        with pytest.raises(Unavailable):
            server.tick()
        assert server.table.is_alive(NodeId("a"))
    server.index.away = False
    server.tick()
    server.clock.advance(TTL * UNIT_S)
    server.tick()
    assert server.table.is_alive(NodeId("a"))
    server.clock.advance(UNIT_S)
    server.tick()
    assert not server.table.is_alive(NodeId("a"))
    assert server.counters.snapshot()["metadata_nodes_expired_total"] == 2
