"""The writer's waits against a store that does not answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvclient import BlockKey, StoreResult
from kvclient.engines.torch_blocks import KVLayout, LayerShape
from kvclient.engines.transformers.writer import OfferedRun, StoredChain, Writer
from kvstore.observe.limited_log import LimitedLog

LAYOUT = KVLayout(2, torch.float32, (LayerShape(1, 4, 1, 4),))
CHAINS = 8
DEADLINE_S = 0.05


class HungStore:
    """A store whose calls fail at their deadline on a scripted clock, after ``opened`` is set."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.now_s = 0.0

    def keys(self, tokens: Any, extras: Any, parent: BlockKey | None, depth: int) -> list[BlockKey]:
        return [BlockKey(bytes(tokens.view(np.uint8)).ljust(16))]

    def store(self, keys: list[BlockKey], packed: Any, *, parent: BlockKey | None, depth: int, deadline_s: float) -> StoreResult:
        self.opened.wait()
        self.now_s += deadline_s
        return StoreResult(np.zeros(0, np.uint8))


@pytest.fixture
def store() -> Iterator[HungStore]:
    made = HungStore()
    yield made
    made.opened.set()


def writer_of(store: HungStore) -> Writer:
    incidents = LimitedLog(logging.getLogger("kvclient"), 10.0)
    return Writer(store, LAYOUT, incidents, DEADLINE_S, 1 << 20, lambda: store.now_s)  # type: ignore[arg-type]


def offers() -> list[OfferedRun]:
    """One block of each of several sequences."""
    kv = torch.zeros(1, 1, 2, 4)
    return [OfferedRun(StoredChain(), 0, np.full(2, row, np.uint32), {}, [(kv, kv)]) for row in range(CHAINS)]


def test_writer_close_has_one_deadline_for_all_chains(store: HungStore) -> None:
    writer, made = writer_of(store), offers()
    assert writer.offer(made) is not None
    store.opened.set()
    writer.close()
    assert store.now_s <= 2 * DEADLINE_S + 1e-9, "the store that was running, and then all others together"
    assert all(offer.chain.broken for offer in made)


def test_writer_settle_returns_while_store_hangs(store: HungStore) -> None:
    writer = writer_of(store)
    future = writer.offer(offers())
    assert future is not None
    assert not writer.settle([future])
    store.opened.set()
    writer.close()
    assert writer.settle([future])
