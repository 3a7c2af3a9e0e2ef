"""The connector conformance suite over SGLang's tree."""

from __future__ import annotations

from pathlib import Path

from kit_cases import unique_cases_only
from sglang_driver import SGLangDriver

from kvstore.testing.connector.suite import ConnectorSuite


@unique_cases_only
class TestSGLang(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> SGLangDriver:
        return SGLangDriver()
