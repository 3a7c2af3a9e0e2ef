"""The connector conformance suite over vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_bed import VllmDriver, tiny

from kvstore.testing.connector.suite import ConnectorSuite


class TestVllm(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> VllmDriver:
        return VllmDriver(tiny("llama", folder))
