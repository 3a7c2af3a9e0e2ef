"""The connector conformance suite over vLLM with the store as a secondary tier."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tier_bed import TierDriver
from vllm_bed import tiny

from kvstore.testing.connector.conversations import SOON, Conversations, run_seeded
from kvstore.testing.connector.faulty_store import FaultyStore, StoreFault
from kvstore.testing.connector.suite import ConnectorSuite


@pytest.mark.thorough
class TestVllmTier(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> TierDriver:
        return TierDriver(tiny("llama", folder))


def test_tier_each_fault_leaves_the_tokens(tmp_path: Path) -> None:
    """The suite's seeded runs: each fault once."""
    driver = TierDriver(tiny("llama", tmp_path))
    talk = Conversations.make(driver)
    with FaultyStore(tmp_path / "store") as store, closing(driver.open(store.address, SOON)) as engine:
        reports = [run_seeded(seed, engine, store, talk) for seed in range(len(StoreFault))]
        assert not engine.counters()["bugs"]
    assert {report.fault for report in reports} == set(StoreFault)
    assert any(report.loaded_tokens for report in reports)
