"""The connector conformance suite over vLLM with the store as a secondary tier."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tier_bed import TierDriver
from vllm_bed import tiny

from kvstore.testing.connector.suite import ConnectorSuite


class TestVllmTier(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> TierDriver:
        return TierDriver(tiny("llama", folder))
