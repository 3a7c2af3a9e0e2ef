"""Tests of the writer of labels, without a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from kvclient import CacheSpec
from kvclient.events import label_writer
from kvclient.events.block_groups import GroupBlockId
from kvclient.events.label_writer import LabelWriter
from kvclient.events.labels import BlockLabel, LabelNamespace

SPEC = CacheSpec(model="m", block_tokens=4, layers=1, layer_block_bytes=64)
WAIT_S = 30.0


class Run:
    """Blocks without labels, which the writer's thread cannot finish before ``go_on``."""

    def __init__(self, memory_bytes: int, go_on: threading.Event) -> None:
        self.memory_bytes = memory_bytes
        self.begun = threading.Event()
        self._go_on = go_on

    def labels(self) -> Iterator[tuple[GroupBlockId, BlockLabel]]:
        self.begun.set()
        assert self._go_on.wait(WAIT_S)
        yield from ()


def test_waiting_runs_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_writer, "_MOST_WAITING_BYTES", 1_000)
    counts: Counter[str] = Counter()
    go_on = threading.Event()
    writer = LabelWriter(
        LabelNamespace.make([SPEC], engine_hash="sha256"), pytest.fail, lambda name, count: counts.update({name: count})
    )
    try:
        first = Run(600, go_on)
        writer.put(first)
        assert first.begun.wait(WAIT_S)
        writer.put(Run(500, go_on))
        assert counts == {"labels_dropped": 1}
        writer.put(Run(400, go_on))
        writer.put(Run(2_000, go_on))
        assert counts == {"labels_dropped": 2}
        go_on.set()
        assert writer.flush(WAIT_S)
        writer.put(Run(1_000, go_on))
        assert writer.flush(WAIT_S)
        assert counts == {"labels_dropped": 2}
    finally:
        go_on.set()
        writer.close()
