"""Log lines that peers can cause are rate-limited."""

from __future__ import annotations

import logging

import pytest

from kvstore.core.clock import ManualClock
from kvstore.observe.limited_log import LimitedLog


def test_limited_log_one_line_per_kind_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limited = LimitedLog(logging.getLogger("test-limited"), 10.0, clock.now_s)
    for number in range(100):
        limited.warning("refused %s: %d are open", "a peer", number)
    limited.warning("another kind")
    clock.advance(9.9)
    limited.warning("refused %s: %d are open", "a peer", 100)
    clock.advance(0.1)
    limited.warning("refused %s: %d are open", "a peer", 101)
    limited.warning("refused %s: %d are open", "a peer", 102)
    clock.advance(10.0)
    limited.warning("refused %s: %d are open", "a peer", 103)
    assert [record.getMessage() for record in caplog.records] == [
        "refused a peer: 0 are open",
        "another kind",
        "refused a peer: 101 are open (suppressed=100)",
        "refused a peer: 103 are open (suppressed=1)",
    ]
