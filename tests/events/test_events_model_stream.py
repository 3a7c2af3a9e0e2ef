"""Tests of the stream of one model, with a store in memory and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from labelled_world import BLOCKS, SHARDS, SPACE, World, block_of, engine_hash, hash_of, whole

from kvclient.events import BlockMirror
from kvclient.events.block_groups import GroupBlockId
from kvclient.events.labels import LabelNamespace
from kvstore.config.events import EventsConfig
from kvstore.core.spec import CacheSpec
from kvstore.events import label_retries, model_stream
from kvstore.events.label_reader import LabelsRead
from kvstore.events.model_stream import ModelStream
from kvstore.events.publisher import EventPublisher
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import events as events_metrics

SECOND = LabelNamespace.make([CacheSpec("m", 4, 2, 64, weights_epoch="2")], engine_hash="sha256")
THIRD = LabelNamespace.make([CacheSpec("m", 4, 2, 64, weights_epoch="3")], engine_hash="sha256")
SPECS = [SPACE.spec, *SHARDS]
OTHERS = [*(CacheSpec("m", 4, 2, 64, weights_epoch=epoch) for epoch in "23"), SECOND.spec, THIRD.spec]


class Bed:
    """A stream whose watcher, reader and list of namespaces are those of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        config = EventsConfig(zmq="tcp://127.0.0.1:*", model="m", **settings)
        bed = self
        self.world = World(most_label_bytes=config.labels_memory_bytes)
        self.specs: list[CacheSpec] = list(SPECS)
        self.now_s = 0.0
        self.subscriptions = 0
        self.complete = True
        self.unreadable: set[GroupBlockId] = set()
        self.down = False
        self.reads: list[list[GroupBlockId]] = []
        self.counters = Counters()
        incomplete = BlockMirror()

        class Watcher:
            def __init__(self, *_args: object, **_settings: object) -> None:
                bed.subscriptions += 1

            def read(self, look: Callable[[BlockMirror], None]) -> None:
                look(bed.world.mirror if bed.complete else incomplete)

            def check(self) -> None:
                """Accept everything."""

            def close(self) -> None:
                """Nothing is open."""

        class Reader:
            def __init__(self, *_args: object) -> None:
                """Read from the bed."""

            def read(self, _namespace: LabelNamespace, blocks: Sequence[GroupBlockId], _end_s: float) -> LabelsRead:
                bed.reads.append(list(blocks))
                if bed.down:
                    return LabelsRead(unavailable=True)
                failed = [block for block in blocks if block in bed.unreadable]
                return LabelsRead({one: bed.world.labels[one] for one in blocks if one not in failed}, failed)

            def close(self) -> None:
                """Nothing is open."""

        monkeypatch.setattr(model_stream, "BlockWatcher", Watcher)
        monkeypatch.setattr(model_stream, "LabelReader", Reader)
        monkeypatch.setattr(model_stream, "list_namespaces", lambda *_args, **_settings: list(self.specs))
        self.publisher = EventPublisher(config, self.world.translator.everything, self.counters)
        self.stream = ModelStream(config, self.world.translator, self.publisher, self.counters, lambda: self.now_s)

    @property
    def ready(self) -> bool:
        return self.publisher.published.is_set()

    def steps(self, count: int, each_s: float = 0.2) -> None:
        for _ in range(count):
            self.stream.step()
            self.now_s += each_s

    def hold(self, *blocks: tuple[int, int]) -> None:
        for one in blocks:
            for part in range(3):
                self.world.store(1, part, *one)


@pytest.fixture
def make_bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bed]]:
    beds: list[Bed] = []

    def make(**settings: Any) -> Bed:
        beds.append(Bed(monkeypatch, **settings))
        return beds[-1]

    yield make
    for bed in beds:
        bed.stream.close()
        bed.publisher.close()


def test_new_namespaces_are_subscribed_to_together(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.steps(2)
    assert bed.subscriptions == 1
    bed.specs += [OTHERS[0], SECOND.spec]
    bed.steps(5, each_s=2.0)
    bed.specs += [OTHERS[1], THIRD.spec]
    bed.steps(5, each_s=2.0)
    assert bed.subscriptions == 1
    bed.steps(10, each_s=2.0)
    assert bed.subscriptions == 2
    assert {SECOND.spec.namespace, THIRD.spec.namespace} <= set(bed.world.translator.namespaces)
    bed.steps(100, each_s=2.0)
    assert bed.subscriptions == 2


def test_snapshot_is_awaited_before_another_subscription(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.complete = False
    bed.steps(2)
    bed.specs += OTHERS
    bed.steps(100, each_s=2.0)
    assert bed.subscriptions == 1
    bed.complete = True
    bed.steps(2, each_s=2.0)
    assert bed.subscriptions == 2


def test_stream_of_all_namespaces_is_not_subscribed_again(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_stream.limits, "MAX_WATCH_FILTER", 1)
    bed = make_bed()
    bed.steps(2)
    bed.specs += OTHERS
    bed.steps(3, each_s=2.0)
    assert bed.subscriptions == 1
    assert SECOND.spec.namespace in bed.world.translator.namespaces


def test_failed_label_is_read_again_with_growing_pauses(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.hold(*BLOCKS)
    bed.unreadable = {block_of(0, 3)}
    bed.steps(2)
    assert len(bed.reads) == 1
    bed.world.snapshot()  # everything is looked at again, and the label is not read
    bed.steps(2)
    assert len(bed.reads) == 1
    bed.steps(3_600, each_s=1.0)
    assert [len(one) for one in bed.reads] == [len(BLOCKS), *[1] * 6]  # 30, 60, ... 960 s
    bed.unreadable = set()
    bed.steps(3_600, each_s=1.0)
    assert bed.world.translator.unlabelled == 0


def test_forgotten_failures_are_found_by_a_rare_scan(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_stream, "_MOST_FAILURES", 2)
    bed = make_bed()
    bed.hold(*BLOCKS)
    bed.unreadable = {block_of(*one) for one in BLOCKS}
    bed.steps(1_000, each_s=1.0)
    assert bed.counters.get(events_metrics.LABELS_FORGOTTEN) > 0
    assert len(bed.reads) < 30
    bed.unreadable = set()
    bed.steps(4_000, each_s=1.0)
    assert bed.world.translator.unlabelled == 0


def test_store_that_is_down_is_asked_rarely_and_delays_no_start(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.hold(*BLOCKS)
    bed.down = True
    bed.steps(100)
    assert len(bed.reads) == 1
    assert bed.ready
    bed.down = False
    bed.steps(200)
    assert bed.world.translator.unlabelled == 0


def test_start_ends_while_new_labels_keep_coming(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_stream, "_MOST_LABELS", 1)
    bed = make_bed()
    bed.hold(*BLOCKS[:4])
    for step in range(7):
        bed.hold(BLOCKS[4 + step % 4])  # more than one step reads
        bed.steps(1)
        for part in range(2):
            bed.world.remove(1, part, *BLOCKS[4 + (step + 1) % 4])
    assert bed.world.translator.wanted
    assert bed.ready
    assert {engine_hash(hash_of(0, at)) for at in range(4)} <= set(published(bed))


def published(bed: Bed) -> list[object]:
    return [one for batch in bed.world.translator.everything(10) for event in batch for one in getattr(event, "block_hashes", [])]


def test_start_does_not_wait_for_blocks_that_left(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_stream, "_MOST_LABELS", 1)
    bed = make_bed()
    bed.hold(*BLOCKS)
    bed.steps(1)
    for one in BLOCKS:
        bed.world.remove(1, 0, *one)
    bed.steps(2)
    assert bed.ready


def test_start_publishes_labelled_blocks_before_it_is_ready(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    whole(bed.world, 0, 3)
    bed.hold((0, 0), (0, 1), (0, 2))
    while not bed.ready:
        bed.steps(1)
    assert len(published(bed)) == 3


def test_labels_beyond_the_memory_are_dropped_and_counted(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(labels_memory_bytes=1 << 20)
    translator = bed.world.translator
    translator.label_bytes = 1 << 20  # as after many labels
    bed.hold(*BLOCKS)
    bed.steps(3)
    assert bed.ready
    assert bed.reads == []
    assert bed.counters.get(events_metrics.LABELS_DROPPED) == len(BLOCKS) == translator.unlabelled
    translator.label_bytes = 0
    bed.steps(int(label_retries.PAUSES_S[0]) + 2, each_s=1.0)
    assert translator.unlabelled == 0
    assert len(published(bed)) == len(BLOCKS)
