"""The store's log lines have the format of real engines, which configure their own loggers only."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

CONFIGURE = {
    "vllm": "from vllm.logger import configure_logging; from vllm.config.logging import LoggingConfig\n"
    "configure_logging(LoggingConfig()); engine = logging.getLogger('vllm')",
    "lmcache": "from lmcache.logging import init_logger; engine = init_logger('lmcache.kvstore')",
}
SHOWN = {"vllm": r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[", "lmcache": r"\d\d:\d\d:\d\d,\d+\] LMCache INFO:"}


@pytest.mark.parametrize("package", CONFIGURE)
def test_engine_log_has_level_and_time(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stdout")
    lines = (
        f"import logging; {CONFIGURE[package]}\n"
        "from kvclient.engines.engine_log import share_handlers\n"
        "share_handlers(engine)\n"
        'logging.getLogger("kvclient.x").info("ours")\n'
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=200, check=True)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "ours" in line]
    assert re.search(SHOWN[package], line), line
