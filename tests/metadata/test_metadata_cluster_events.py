"""The file of cluster events, and the events that are derived from observations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvproto.v1.common_pb2 import NODE_STATE_ACTIVE, NODE_STATE_DRAINED, NodeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.health import codes
from kvstore.health.findings import HealthFinding
from kvstore.metadata.cluster import event_journal
from kvstore.metadata.cluster.event_journal import KEEP_S, MAX_EVENTS, ClusterEvent, EventJournal, encode_lines
from kvstore.metadata.cluster.event_sources import FindingEvents, NodeEvents
from kvstore.observe.counters import Counters


class Wall:
    """A time of day that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_767_225_600.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


def journal(tmp_path: Path, wall: Wall, counters: Counters | None = None) -> EventJournal:
    return EventJournal(tmp_path / "index.events.jsonl", counters or Counters(), wall_s=wall)


def kinds(journal: EventJournal) -> list[str]:
    return [one.kind for one in journal.read()]


def test_events_survive_a_restart_in_order(tmp_path: Path, wall: Wall) -> None:
    first = journal(tmp_path, wall)
    assert first.read() == []
    first.record("metadata_started", "", "It started.")
    first.record("order", "n", "Drain ordered.", who="alice")
    ids = [one.id for one in first.read()]
    assert ids == sorted(set(ids))
    (started, order) = journal(tmp_path, wall).read()
    assert (started.kind, order.subject, order.who, order.at_s) == ("metadata_started", "n", "alice", pytest.approx(wall.now_s))


def test_events_torn_and_foreign_lines_are_skipped(tmp_path: Path, wall: Wall) -> None:
    first = journal(tmp_path, wall)
    first.record("a", "", "A.")
    first.flush()
    path = tmp_path / "index.events.jsonl"
    path.write_bytes(path.read_bytes() + b'[]\n{"id": "x"}\n{"id": 1, "kind": 2, "subject": "", "text": ""}\n\xff\n{"id": 176')
    second = journal(tmp_path, wall)
    assert kinds(second) == ["a"]
    second.record("b", "", "B.")
    assert kinds(second) == ["a", "b"], "an event after a torn line is kept"


def test_events_older_than_a_day_are_dropped(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)
    one.record("old", "", "Old.")
    wall.now_s += KEEP_S / 2
    one.record("new", "", "New.")
    assert kinds(one) == ["old", "new"]
    wall.now_s += KEEP_S / 2 + 1
    assert kinds(one) == ["new"]


def test_events_file_is_replaced_when_large(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_journal, "MAX_FILE_BYTES", 64 << 10)
    monkeypatch.setattr(event_journal, "MAX_EVENTS", 100)
    one = journal(tmp_path, wall)
    for number in range(2_000):
        one.record("a", str(number), "A sentence.")
        one.flush()
    assert (tmp_path / "index.events.jsonl").stat().st_size < 64 << 10
    found = journal(tmp_path, wall).read()
    assert 50 <= len(found) <= 100
    assert found[-1].subject == "1999"
    assert MAX_EVENTS > 100


def test_events_wait_in_memory_for_a_disk(tmp_path: Path, wall: Wall) -> None:
    folder = tmp_path / "gone"
    counters = Counters()
    one = EventJournal(folder / "events", counters, wall_s=wall)
    one.record("a", "", "A.")
    one.flush()
    assert counters.snapshot()["metadata_cluster_event_file_failures_total"] == 1
    folder.mkdir()
    assert kinds(one) == ["a"]
    assert (folder / "events").exists()


def test_events_beyond_the_bound_are_dropped_and_counted(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_journal, "_MAX_QUEUED", 3)
    counters = Counters()
    one = EventJournal(tmp_path / "gone" / "events", counters, wall_s=wall)
    for kind in "abcde":
        one.record(kind, "", "A sentence.")
    assert kinds(one) == ["c", "d", "e"]
    assert counters.snapshot()["metadata_cluster_events_dropped_total"] == 2


def test_events_recorded_during_a_write_are_kept(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_journal, "_MAX_QUEUED", 2)
    one = journal(tmp_path, wall)

    def busy(events: list[ClusterEvent]) -> bytes:
        lines = encode_lines(events)
        if len(events) == 2:
            one.record("c", "", "C.")  # drops the oldest queued event, which is written at this time
        return lines

    monkeypatch.setattr(event_journal, "encode_lines", busy)
    one.record("a", "", "A.")
    one.record("b", "", "B.")
    one.flush()
    assert kinds(one) == ["a", "b", "c"]


def test_events_of_a_torn_write_are_shown_once(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)
    one.record("a", "", "A.")
    one.flush()
    path = tmp_path / "index.events.jsonl"
    line = path.read_bytes().splitlines()[1]
    path.write_bytes(path.read_bytes() + line[:20] + b"\n" + line + b"\n")
    assert kinds(one) == ["a"]


@pytest.mark.parametrize("header", [b'{"kvstore_cluster_events": 2}\n', b"notes of an operator\n", b"\xff" * 5_000])
def test_events_file_of_another_version_is_not_touched(tmp_path: Path, wall: Wall, header: bytes) -> None:
    path, counters = tmp_path / "index.events.jsonl", Counters()
    path.write_bytes(header)
    one = journal(tmp_path, wall, counters)
    one.record("a", "", "A.")
    assert kinds(one) == ["a"], "from memory"
    assert path.read_bytes() == header
    assert counters.snapshot()["metadata_cluster_event_file_failures_total"] == 2, "a write and a read"


def test_events_file_torn_in_its_first_line_is_begun_again(tmp_path: Path, wall: Wall) -> None:
    path = tmp_path / "index.events.jsonl"
    path.write_bytes(b'{"kvstore_cl')
    one = journal(tmp_path, wall)
    assert one.read() == []
    one.record("a", "", "A.")
    assert kinds(one) == kinds(journal(tmp_path, wall)) == ["a"]


def test_events_are_recorded_and_read_by_several_threads(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)

    def record() -> None:
        for number in range(300):
            one.record("a", str(number), "A sentence.")

    with ThreadPoolExecutor(4) as pool:
        recording = [pool.submit(record) for _ in range(3)]
        while not all(task.done() for task in recording):
            pool.submit(one.read).result()
        for task in recording:
            task.result()
    found = one.read()
    assert len(found) == len({event.id for event in found}) == 900


def test_findings_raised_and_cleared_become_events(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)
    events = FindingEvents(one)
    events.observe([HealthFinding(codes.NODE_DOWN, "n", "Node n has not reported for 3 s.")])
    events.observe([HealthFinding(codes.NODE_DOWN, "n", "Node n has not reported for 4 s.")])
    events.observe([])
    assert [(event.kind, event.code, event.subject) for event in one.read()] == [
        ("finding_raised", "NODE_DOWN", "n"),
        ("finding_cleared", "NODE_DOWN", "n"),
    ]


def test_nodes_that_change_become_events(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)
    events = NodeEvents(one)
    info = NodeInfo(node_id="n", boot_id=bytes(16))
    events.observe([])
    for status in (
        NodeStatus(node=info, alive=True, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, alive=True, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, alive=True, state=NODE_STATE_DRAINED),
        NodeStatus(node=NodeInfo(node_id="n", boot_id=b"x" * 16), alive=True, state=NODE_STATE_DRAINED),
    ):
        events.observe([status])
    events.observe([])
    assert kinds(one) == ["node_registered", "node_back", "node_drain", "node_restarted", "node_removed"]
