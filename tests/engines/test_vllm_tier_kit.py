"""The connector conformance suite over vLLM with the store as a secondary tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

from tier_bed import TierDriver, TierHookEngine
from vllm_bed import tiny

from kvstore.testing.connector.conversations import FLUSH_S, SOON, Conversations, run_seeded
from kvstore.testing.connector.faulty_store import FaultyStore, StoreFault
from kvstore.testing.connector.suite import ConnectorSuite

_LOAD_S = 0.03


@pytest.mark.thorough
class TestVllmTier(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> TierDriver:
        return TierDriver(tiny("llama", folder))


@dataclass(frozen=True)
class Bed:
    """An engine with the tier, its store, and prompts."""

    engine: TierHookEngine
    store: FaultyStore
    talk: Conversations


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("bed")
    driver = TierDriver(tiny("llama", folder))
    talk = Conversations.make(driver)
    with FaultyStore(folder / "store") as store, closing(driver.open(store.address, SOON)) as engine:
        yield Bed(engine, store, talk)


@contextmanager
def loads_slowed(tier: Any) -> Iterator[set[int]]:
    """Each load takes some steps of the engine. Yields the loads that are running."""
    running: set[int] = set()
    with ExitStack() as patches:
        for store in tier.stores.values():

            def load(*given: Any, load: Any = store.load) -> Any:
                running.add(threading.get_ident())
                time.sleep(_LOAD_S)
                result = load(*given)
                running.discard(threading.get_ident())
                return result

            patches.enter_context(mock.patch.object(store, "load", load))
        yield running


def test_tier_requests_aborted_anywhere_keep_the_tokens(bed: Bed) -> None:
    """While they are looked up, loaded, computed and stored."""
    longest = sorted(bed.talk.prompts, key=len)[-3:]
    bed.talk.ask(bed.engine, longest)
    assert bed.engine.flush(FLUSH_S)
    aborted_loads = 0
    with loads_slowed(bed.engine.tier) as running:
        for steps in range(24):
            bed.engine.forget()
            bed.engine.abort(longest, 2, steps)
            aborted_loads += len(running)
    assert aborted_loads
    bed.engine.forget()
    assert all(one.loaded_tokens for one in bed.talk.ask(bed.engine, longest))
    assert not bed.engine.counters()["bugs"]


def test_tier_each_fault_leaves_the_tokens(bed: Bed) -> None:
    """The suite's seeded runs: each fault once."""
    reports = [run_seeded(seed, bed.engine, bed.store, bed.talk) for seed in range(len(StoreFault))]
    assert not bed.engine.counters()["bugs"]
    assert {report.fault for report in reports} == set(StoreFault)
    assert any(report.loaded_tokens for report in reports)
    assert any(report.aborted for report in reports)
