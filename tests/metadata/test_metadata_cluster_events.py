"""The file of cluster events, and the events that are derived from observations."""

from __future__ import annotations

import errno
import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvproto.v1.common_pb2 import NODE_STATE_ACTIVE, NODE_STATE_DRAINED, NodeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.health import codes
from kvstore.health.findings import HealthFinding
from kvstore.metadata.cluster import event_journal
from kvstore.metadata.cluster.event_journal import KEEP_S, MAX_EVENTS, ClusterEvent, EventJournal, encode_lines
from kvstore.metadata.cluster.event_sources import FindingEvents, NodeEvents
from kvstore.observe.counters import Counters
from kvstore.process import atomic_file
from kvstore.process.atomic_file import write_atomically


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


def test_events_file_that_cannot_be_replaced_stops_growing(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stay in memory until the file can be replaced, and are shown once."""
    monkeypatch.setattr(event_journal, "MAX_FILE_BYTES", 64 << 10)
    path, counters = tmp_path / "index.events.jsonl", Counters()
    one = journal(tmp_path, wall, counters)
    while not path.exists() or path.stat().st_size <= 32 << 10:
        one.record("a", "", "A sentence." * 30)
        one.flush()
    before = path.stat().st_size

    def fail(path: Path, raw: bytes) -> None:
        raise OSError(errno.ENOSPC, "no inodes")

    with monkeypatch.context() as patched:
        patched.setattr(event_journal, "write_atomically", fail)
        one.record("b", "", "B.")
        for _ in range(20):
            one.flush()
        assert kinds(one).count("b") == 1, "from memory"
        assert path.stat().st_size == before
    assert counters.snapshot()["metadata_cluster_event_file_failures_total"] == 21
    assert kinds(one)[-1] == "b"
    assert kinds(journal(tmp_path, wall))[-1] == "b"
    assert path.stat().st_size <= (16 << 10) + 100


def test_events_of_long_texts_do_not_replace_each_time(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_journal, "MAX_FILE_BYTES", 64 << 10)
    replaced: list[int] = []

    def count(path: Path, raw: bytes) -> None:
        replaced.append(len(raw))
        write_atomically(path, raw)

    monkeypatch.setattr(event_journal, "write_atomically", count)
    one = journal(tmp_path, wall)
    for number in range(100):
        one.record("a", str(number), "\N{SNOWMAN}" * 500)
        one.flush()
    assert 1 <= len(replaced) <= 30
    assert max(replaced) <= (16 << 10) + 100
    assert one.read()[-1].subject == "99"


def test_first_events_of_two_servers_are_both_kept(tmp_path: Path, wall: Wall) -> None:
    """The second server writes between the first one's check of the empty file and its truncation."""
    path = tmp_path / "index.events.jsonl"
    first, second = journal(tmp_path, wall), journal(tmp_path, wall)
    first.record("a", "", "A.")
    second.record("b", "", "B.")
    plain = open

    def open_racing(*arguments: Any, **options: Any) -> Any:
        file = plain(*arguments, **options)
        truncate = file.truncate

        def race(size: int) -> int:
            if not others:
                others.append(threading.Thread(target=second.flush))
                others[0].start()
                others[0].join(0.2)  # it waits for the lock; without a lock it writes now
            return int(truncate(size))

        file.truncate = race
        return file

    others: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(event_journal, "open", open_racing, raising=False)
        first.flush()
        others[0].join()
    assert sorted(kinds(journal(tmp_path, wall))) == ["a", "b"]
    assert path.read_bytes().count(b"kvstore_cluster_events") == 1


@pytest.mark.parametrize("number", ["1" + "0" * 400, str(1 << 63), "1e400", "-1", "NaN"])
def test_event_with_an_impossible_id_is_skipped(tmp_path: Path, wall: Wall, number: str) -> None:
    one = journal(tmp_path, wall)
    one.record("a", "", "A.")
    one.flush()
    with (tmp_path / "index.events.jsonl").open("a") as file:
        file.write(f'{{"id": {number}, "kind": "k", "subject": "", "text": ""}}\n')
    assert kinds(one) == ["a"]


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
    assert one.read()[-1].text.startswith("n: no longer: ")


def test_nodes_that_change_become_events(tmp_path: Path, wall: Wall) -> None:
    one = journal(tmp_path, wall)
    events = NodeEvents(one)
    info = NodeInfo(node_id="n", boot_id=bytes(16), control_address="n:1")
    events.observe([])
    for status in (
        NodeStatus(node=info, alive=True, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, alive=True, state=NODE_STATE_ACTIVE),
        NodeStatus(node=info, alive=True, state=NODE_STATE_DRAINED),
        NodeStatus(node=NodeInfo(node_id="n", boot_id=b"x" * 16, control_address="n:1"), alive=True, state=NODE_STATE_DRAINED),
    ):
        events.observe([status])
    events.observe([])
    assert kinds(one) == ["node_registered", "node_back", "node_drain", "node_restarted", "node_removed"]


def test_events_of_an_engine_cache_name_it(tmp_path: Path, wall: Wall) -> None:
    """Its end loses nothing, so it must not read like the loss of a node."""
    one = journal(tmp_path, wall)
    events, info = NodeEvents(one), NodeInfo(node_id="c", boot_id=bytes(16))
    for statuses in ([], [NodeStatus(node=info, alive=True)], [NodeStatus(node=info, heartbeat_age_ms=61_000)], []):
        events.observe(statuses)
    assert [(event.kind, event.text) for event in one.read()] == [
        ("node_registered", "Engine cache c registered."),
        ("node_removed", "Engine cache c was forgotten 61 s after its last heartbeat."),
    ]


def test_events_wait_in_memory_for_a_lock(tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_file, "LOCK_S", 0.05)
    counters = Counters()
    one = journal(tmp_path, wall, counters)
    with (tmp_path / "index.events.jsonl.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        one.record("a", "", "A.")
        assert kinds(one) == ["a"], "from memory"
    assert counters.snapshot()["metadata_cluster_event_file_failures_total"] == 1
    one.flush()
    assert kinds(journal(tmp_path, wall)) == ["a"]
