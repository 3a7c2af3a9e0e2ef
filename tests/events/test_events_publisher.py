"""Tests of the publisher's sockets: events and replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvclient.events import BlockMirror
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, Tier
from kvstore.config.events import EventsConfig
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.events.publisher import EventPublisher
from kvstore.events.translation import Translator, last_eight_bytes
from kvstore.observe.counters import Counters
from kvstore.testing.index.model import Chain
from support.kv_event_subscriber import ZmqSubscriber

NAMESPACE = b"n" * 16
CHAIN = Chain.of(NAMESPACE, range(200))


class Source:
    """A mirror with scripted changes, and its publisher."""

    def __init__(self, **settings: object) -> None:
        config = EventsConfig(
            metadata="127.0.0.1:7400",
            zmq="tcp://127.0.0.1:*",
            replay="tcp://127.0.0.1:*",
        ).model_copy(update=settings)
        self.mirror = BlockMirror()
        self.counters = Counters()
        self.translator = Translator(last_eight_bytes, {NAMESPACE: 64}.__getitem__)
        self.publisher = EventPublisher(config, self.translator.everything, self.counters)
        self.tell(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
        volume = pb.VolumeOpened(volume=1, volume_id="v", node_id="n", tier=Tier.TIER_DRAM, boot_id=b"b" * 16, served=True)
        self.tell(pb.WatchBlocksResponse(events=pb.BlockEvents(events=[pb.BlockEvent(opened=volume)])))
        self.tell(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))
        self.publisher.publish(lambda: [[]])
        self.publisher.published.set()

    def tell(self, message: pb.WatchBlocksResponse) -> None:
        change = self.mirror.apply(message)
        self.publisher.publish(lambda: self.translator.take(self.mirror, change))

    def store(self, start: int, end: int) -> None:
        run = CHAIN.run(start, end)
        stored = BlockRun(namespace_id=NAMESPACE, parent=run.parent or b"", depth=start, keys=b"".join(run.keys))
        event = pb.BlockEvent(stored=pb.BlocksStored(volume=1, runs=[stored]))
        self.tell(pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=1, events=[event])))

    def remove(self, start: int, end: int) -> None:
        gone = pb.BlocksRemoved(volume=1, namespace_id=NAMESPACE, keys=b"".join(CHAIN.keys[start:end]))
        self.tell(pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=1, events=[pb.BlockEvent(removed=gone)])))


@contextmanager
def source(**settings: object) -> Iterator[Source]:
    made = Source(**settings)
    try:
        yield made
    finally:
        made.publisher.close()


@contextmanager
def subscriber(made: Source, topic: str = "") -> Iterator[ZmqSubscriber]:
    one = ZmqSubscriber(made.publisher.endpoint, made.publisher.replay_endpoint, topic)
    try:
        yield one
    finally:
        one.close()


def blocks(*positions: int) -> set[tuple[object, str | None]]:
    return {(int.from_bytes(CHAIN.keys[at][8:], "big"), "CPU") for at in positions}


def test_replay_returns_missed_batches() -> None:
    with source(topic="kv@store") as made:
        for at in range(5):
            made.store(at, at + 1)
        with subscriber(made, "kv@store") as late:
            late.catch_up()
            assert late.believed == blocks(*range(5))
            assert late.last == 5  # 0 was empty
            late.dealer.send_multipart((b"", (3).to_bytes(8, "big")))
            assert [number for number, _ in late.replay(3)] == [3, 4, 5]
        counted = made.counters.snapshot()
        assert counted["events_stored_blocks_total"] == 5
        assert "events_cleared_total" not in counted
        assert "events_replay_snapshots_total" not in counted


def test_clock_numbers_after_restart_leave_gap_that_is_replayed() -> None:
    with source(numbers="clock", heartbeat_ms=1) as made, subscriber(made) as one:
        made.store(0, 3)
        one.last, one.believed = 41, {("what another publisher told", "CPU")}
        while one.believed != blocks(0, 1, 2):
            made.publisher.heartbeat()  # nothing happens
            one.read()
        assert one.replays == 1


def test_zero_numbers_after_restart_begin_again() -> None:
    with source(heartbeat_ms=1) as made, subscriber(made) as one:
        made.store(0, 3)
        one.last = one.heard = 10_000
        one.believed = {("what another publisher told", "CPU")}
        while one.believed != blocks(0, 1, 2):
            made.publisher.heartbeat()
            one.read()
        assert one.replays == 1
        assert "events_cleared_total" not in made.counters.snapshot()


def test_numbers_begin_again_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.events.publisher._MOST_NUMBERS", 8)
    with source() as made, subscriber(made) as one:
        for at in range(20):
            made.store(at, at + 1)
            one.read(0.01)
        one.until(blocks(*range(20)))
        with subscriber(made) as late:
            late.catch_up()
            assert late.believed == one.believed
            assert late.last < 8


def test_replay_and_live_events_give_true_state() -> None:
    with source() as made, subscriber(made) as one:
        for at in range(100):
            made.store(at, at + 1)
            if at % 3 == 0:
                made.remove(at, at + 1)
            one.read(0.0)  # whether the subscription has arrived yet is not known, and does not matter
        made.store(150, 160)
        one.catch_up()
        assert one.believed == blocks(*[at for at in range(100) if at % 3], *range(150, 160))


def test_replay_of_dropped_batches_sends_full_state() -> None:
    with source(replay_batches=4) as made:
        for at in range(50):
            made.store(at, at + 1)
        made.remove(10, 20)
        with subscriber(made) as late:
            for first in (0, 40):
                late.believed, late.last = {("stale", "CPU")} if first else set(), first - 1
                late.catch_up()
                assert late.believed == blocks(*range(10), *range(20, 50))
                assert late.last == 51
            assert [number for number, _ in late.replay(0)] == list(range(52))  # one router insists
            made.store(10, 11)
            late.catch_up()  # continues with later events
            assert late.believed == blocks(*range(11), *range(20, 50))
            assert late.replay(10_000) == []
        counted = made.counters.snapshot()
        assert counted["events_replay_snapshots_total"] == 3
        assert counted["events_cleared_total"] == 1


def test_replay_large_state_fits_published_numbers() -> None:
    """Few numbers are free, so that the batches are larger."""
    with source(replay_memory_bytes=200) as made:
        made.store(0, 200)
        made.remove(0, 1)
        with subscriber(made) as late:
            late.catch_up()
            assert late.believed == blocks(*range(1, 200))
            assert late.last == 2


def test_replay_malformed_request_is_refused() -> None:
    with source() as made, subscriber(made) as one:
        made.store(0, 3)
        one.dealer.send_multipart((b"", b"short"))
        one.dealer.send_multipart((b"no empty frame", b"12345678"))
        one.dealer.send_multipart((b"",))
        one.dealer.send_multipart((b"", bytes(8), b"more"))
        with subscriber(made) as huge:
            huge.dealer.send_multipart((b"", bytes(1 << 20)))  # its connection is closed
            one.catch_up()
        assert one.believed == blocks(0, 1, 2)
        assert made.counters.snapshot()["events_replays_refused_total"] == 4


def test_replay_malformed_requests_are_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    with source() as made, subscriber(made) as one:
        made.store(0, 3)
        for _ in range(100):
            one.dealer.send_multipart((b"", b"short"))
        one.catch_up()
        assert made.counters.snapshot()["events_replays_refused_total"] == 100
    assert len([record for record in caplog.records if "malformed replay request" in record.getMessage()]) <= 1


def test_replay_disconnected_peer_is_ignored() -> None:
    with source() as made, subscriber(made) as one:
        made.store(0, 100)
        for _ in range(5):
            with subscriber(made) as fleeting:
                fleeting.dealer.send_multipart((b"", bytes(8)))
        one.catch_up()
        assert one.believed == blocks(*range(100))


def test_publisher_connects_to_bound_socket() -> None:
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe("")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    config = EventsConfig(metadata="127.0.0.1:7400", zmq=f"tcp://127.0.0.1:{port}", connect=True, heartbeat_ms=1)
    publisher = EventPublisher(config, lambda _most: [], Counters())
    publisher.published.set()
    try:
        for _ in range(2_000):  # until the connection is established
            publisher.heartbeat()
            if sub.poll(10):
                break
        topic, number, payload = sub.recv_multipart()
        assert (topic, len(number), bool(payload)) == (b"", 8, True)
    finally:
        publisher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"zmq": "tcp://*:5557"},
        {"zmq": "tcp://0.0.0.0:5557"},
        {"zmq": "tcp://[::]:5557"},
        {"zmq": "tcp://router:5557"},
        {"zmq": "udp://127.0.0.1:5557"},
        {"zmq": "tcp://127.0.0.1"},
        {"zmq": "tcp://*:5557", "connect": True},
        {"zmq": "ipc:///tmp/x", "replay": "tcp://*:5558"},
        {"zmq": "ipc:///tmp/x", "topic": "t" * 600},
        {"zmq": "ipc:///tmp/x", "model": "user@model"},
    ],
    ids=str,
)
def test_config_remote_endpoint_requires_permission(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        EventsConfig(metadata="127.0.0.1:7400", **wrong).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "topic"),
    [
        ({}, ""),
        ({"model": "org/m"}, "kv@pool:kvstore@org/m"),
        ({"model": "m", "pool": "east"}, "kv@pool:east@m"),
        ({"model": "m", "nodes": ("host-1",)}, "kv@node:host-1@m"),
        ({"model": "m", "nodes": ("host-1", "host-2")}, "kv@pool:kvstore@m"),
        ({"model": "m", "nodes": ("host-1",), "topic": "kv@10.0.0.1:8000@served"}, "kv@10.0.0.1:8000@served"),
    ],
    ids=str,
)
def test_config_topic_names_holder_and_model(settings: dict[str, object], topic: str) -> None:
    assert EventsConfig(metadata="127.0.0.1:7400", zmq="ipc:///tmp/x", **settings).check().frame == topic  # type: ignore[arg-type]


def test_config_remote_metrics_require_permission() -> None:
    here = {"metadata": "127.0.0.1:7400", "zmq": "tcp://127.0.0.1:5557"}
    EventsConfig(**here, metrics_listen="127.0.0.1:1").check()
    EventsConfig(**here, metrics_listen="0.0.0.0:1", allow_insecure_metrics=True).check()
    with pytest.raises(InvalidArgument, match="set allow_insecure_metrics"):
        EventsConfig(**here, metrics_listen="0.0.0.0:1").check()
    with pytest.raises(InvalidArgument, match="allow_insecure_remote"):
        EventsConfig(metadata="127.0.0.1:7400", zmq="tcp://*:5557", allow_insecure_metrics=True).check()


def test_publisher_endpoint_in_use_is_unavailable() -> None:
    with source() as made:
        config = EventsConfig(metadata="127.0.0.1:7400", zmq=made.publisher.endpoint)
        with pytest.raises(Unavailable):
            EventPublisher(config, lambda _most: [], Counters())
