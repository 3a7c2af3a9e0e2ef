"""The store's log lines in an engine: its format, unless the application has configured logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

LINES = """
import logging, sys
{before}
engine = logging.getLogger("engine")
{engine}
from kvclient.engines.engine_log import share_handlers
share_handlers(engine)
share_handlers(engine)
logging.getLogger("kvclient.x").info("ours %d", 1)
logging.getLogger("kvstore.x").debug("too much")
{after}
logging.getLogger("kvstore.x").warning("later")
"""
ENGINE = """
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("engine %(levelname)s %(message)s"))
engine.addHandler(handler)
engine.setLevel("INFO")
"""


def logged(before: str = "", engine: str = ENGINE, after: str = "") -> list[str]:
    """Return what a process writes. pytest configures logging, so tests of it need another process."""
    script = LINES.format(before=before, engine=engine, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_engine_log_lines_have_the_engine_format() -> None:
    assert logged() == ["engine INFO ours 1", "engine WARNING later"]


def test_engine_log_configured_later_writes_lines_once() -> None:
    assert logged(after="logging.basicConfig()") == ["engine INFO ours 1", "engine WARNING later"]


@pytest.mark.parametrize("logger", ["", "kvclient"])
def test_engine_log_of_the_application_is_left_alone(logger: str) -> None:
    own = f"""
mine = logging.StreamHandler()
mine.setFormatter(logging.Formatter("mine %(message)s"))
logging.getLogger("{logger}").addHandler(mine)
logging.getLogger("{logger}").setLevel("INFO")
"""
    later = "mine later" if not logger else "engine WARNING later"
    assert logged(before=own) == ["mine ours 1", later]


def test_engine_log_without_handlers_changes_nothing() -> None:
    assert logged(engine="") == ["later"]
