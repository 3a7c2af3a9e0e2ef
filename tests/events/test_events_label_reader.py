"""Tests of the reader of labels, with clients that are fakes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from labelled_world import BLOCKS, SPACE, block_of, label_of

from kvclient import CacheSpec, Outcome
from kvclient.events.labels import LabelNamespace
from kvstore.config.events import EventsConfig
from kvstore.core.errors import Unavailable
from kvstore.events import label_reader
from kvstore.events.label_reader import LabelReader
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import events as events_metrics

IDS = [block_of(*one) for one in BLOCKS]
ROWS = {SPACE.key(block_of(*one)): label_of(*one).encode(SPACE.spec.block_bytes) for one in BLOCKS}


class Client:
    """Loads from ``ROWS``. Each load takes ``load_s``."""

    now_s = 0.0
    load_s = 0.0
    open = 0
    deadlines: Sequence[float] = ()
    error: Exception | None = None

    @classmethod
    def connect(cls, *_args: object, **_settings: object) -> Client:
        cls.open += 1
        return cls()

    def lookup_heads(self, keys: Sequence[bytes], deadline_s: float) -> Sequence[bytes]:
        Client.deadlines = [*Client.deadlines, deadline_s]
        return keys

    def load(self, heads: Sequence[bytes], rows: np.ndarray, deadline_s: float) -> SimpleNamespace:
        Client.deadlines = [*Client.deadlines, deadline_s]
        Client.now_s += self.load_s
        if self.error is not None:
            raise self.error
        for row, key in zip(rows, heads, strict=True):
            row[:] = np.frombuffer(ROWS.get(bytes(key), bytes(len(row))), np.uint8)
        return SimpleNamespace(outcomes=np.full(len(heads), Outcome.HIT))

    def close(self) -> None:
        Client.open -= 1


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, counters: Counters) -> LabelReader:
    for name, value in (("now_s", 0.0), ("load_s", 0.0), ("open", 0), ("deadlines", ()), ("error", None)):
        monkeypatch.setattr(Client, name, value)
    monkeypatch.setattr(label_reader, "KVClient", Client)
    monkeypatch.setattr(label_reader, "time", SimpleNamespace(monotonic=lambda: Client.now_s))
    return LabelReader(EventsConfig(zmq="tcp://127.0.0.1:*"), counters)


def one_label_per_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_reader, "_MOST_BYTES", SPACE.spec.block_bytes)


def test_reads_of_labels_have_one_deadline(reader: LabelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    one_label_per_load(monkeypatch)
    monkeypatch.setattr(Client, "load_s", 2.0)
    read = reader.read(SPACE, IDS, 5.0)
    assert list(read.labels) == IDS[:3]
    assert (read.failed, read.unavailable) == ([], False)  # the others were not tried
    assert max(Client.deadlines) <= 5.0
    assert Client.deadlines[-1] <= 1.0


def test_malformed_label_fails_and_is_counted(reader: LabelReader, counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, SPACE.key(IDS[1]), bytes(SPACE.spec.block_bytes))
    read = reader.read(SPACE, IDS, 5.0)
    assert (read.failed, read.malformed) == (IDS[1:2], 1)
    assert counters.get(events_metrics.LABELS_MALFORMED) == counters.get(events_metrics.LABELS_FAILED) == 1


def test_store_that_does_not_answer_ends_the_read(reader: LabelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    one_label_per_load(monkeypatch)
    monkeypatch.setattr(Client, "error", Unavailable("no store"))
    read = reader.read(SPACE, IDS, 5.0)
    assert (read.labels, read.failed, read.unavailable) == ({}, IDS[:1], True)


def test_clients_of_the_reader_are_bounded(reader: LabelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_reader, "_MOST_CLIENTS", 2)
    for epoch in range(5):
        spec = CacheSpec(model="m", block_tokens=4, layers=1, layer_block_bytes=64, weights_epoch=str(epoch))
        reader.read(LabelNamespace.make([spec], engine_hash="sha256"), IDS[:1], 5.0)
    assert Client.open == 2
    reader.close()
    assert Client.open == 0
