"""The connector conformance suite over transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from generate_bed import saved
from kit_cases import unique_cases_only

from kvstore.lab.transformers_driver import TransformersDriver
from kvstore.testing.connector.suite import ConnectorSuite


@unique_cases_only
class TestTransformers(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> TransformersDriver:
        return TransformersDriver(saved("llama", folder))


class SlidingWindows(ConnectorSuite):
    """For soaks (``kvstore.testing.connector.soak``); ``test_transformers_cache`` covers sliding windows."""

    @classmethod
    def make_driver(cls, folder: Path) -> TransformersDriver:
        return TransformersDriver(saved("gemma3", folder))
