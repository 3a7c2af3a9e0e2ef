"""The connector conformance suite over SGLang's tree."""

from __future__ import annotations

from pathlib import Path

from sglang_driver import SGLangDriver

from kvstore.testing.connector.suite import ConnectorSuite


class TestSGLang(ConnectorSuite):
    @classmethod
    def make_driver(cls, folder: Path) -> SGLangDriver:
        return SGLangDriver()
