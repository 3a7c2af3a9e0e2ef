"""A cluster whose daemon logged a traceback fails its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.embedded.cluster import LocalCluster
from support.unexpected_errors import LINES, TRACEBACK, unexpected_errors


def test_traceback_in_log_is_found_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("node started\nWARNING volume stalled\n")
    assert unexpected_errors(tmp_path) == []
    (tmp_path / "b.log").write_text(f"node started\nERROR write-back failed\n  {TRACEBACK}:\n" + "  more\n" * 2 * LINES)
    (found,) = unexpected_errors(tmp_path)
    assert found.startswith(f"b.log:\nERROR write-back failed\n  {TRACEBACK}:")
    assert len(found.splitlines()) == LINES + 1


def test_closed_cluster_with_traceback_in_log_fails(tmp_path: Path) -> None:
    cluster = LocalCluster([], tmp_path)
    (tmp_path / "n.log").write_text(f"ERROR retention round failed\n{TRACEBACK}:\n")
    with pytest.raises(pytest.fail.Exception, match="retention round failed"):
        cluster.close()
