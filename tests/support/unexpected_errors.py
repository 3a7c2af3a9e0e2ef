"""Fails a test whose cluster logged a traceback: a daemon that survives an unexpected error has a bug nevertheless."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kvstore.embedded.cluster import LocalCluster

TRACEBACK = "Traceback (most recent call last)"
LINES = 40
"""Lines that the failure shows of each traceback."""


def unexpected_errors(folder: Path) -> list[str]:
    """The ends of logs in a folder, from the first traceback of each."""
    found = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        first = next((number for number, line in enumerate(lines) if TRACEBACK in line), None)
        if first is not None:
            begin = max(0, first - 1)
            found.append("\n".join([f"{path.name}:", *lines[begin : begin + LINES]]))
    return found


def fail_on_unexpected_errors() -> None:
    """Check the logs of every cluster that a test closes from now on. A cluster is checked once."""
    close = LocalCluster.close

    @functools.wraps(close)
    def checked_close(cluster: LocalCluster) -> None:
        errors = unexpected_errors(cluster.base_dir)
        close(cluster)
        if found := errors or unexpected_errors(cluster.base_dir):
            pytest.fail("unexpected error in a daemon:\n" + "\n".join(found), pytrace=False)

    LocalCluster.close = checked_close  # type: ignore[method-assign]
