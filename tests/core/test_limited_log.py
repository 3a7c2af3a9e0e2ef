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


def test_limited_log_interval_grows_for_rare_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Two causes may alternate, so each is quiet for longer than the first interval."""
    clock = ManualClock()
    limited = LimitedLog(logging.getLogger("test-rare"), 10.0, clock.now_s, most_interval_s=300.0)
    for _ in range(40):
        clock.advance(15.0)
        limited.warning("interrupted")
    assert [record.getMessage() for record in caplog.records] == [
        "interrupted",
        "interrupted",
        "interrupted (suppressed=1)",
        "interrupted (suppressed=2)",
        "interrupted (suppressed=5)",
        "interrupted (suppressed=10)",
    ]


def test_limited_log_interval_grows_while_lines_go_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limited = LimitedLog(logging.getLogger("test-growing"), 10.0, clock.now_s, most_interval_s=40.0)

    def repeat(seconds: int) -> list[str]:
        caplog.clear()
        for _ in range(seconds):
            clock.advance(1.0)
            limited.warning("interrupted: %s", "refused", cause="Unavailable")
        return [record.getMessage() for record in caplog.records]

    lines = [f"interrupted: refused (suppressed={number})" for number in (9, 19, 39, 39)]
    assert repeat(111) == ["interrupted: refused", *lines]
    limited.warning("interrupted: %s", "bad token", cause="Unauthenticated")
    assert caplog.records[-1].getMessage() == "interrupted: bad token"
    clock.advance(40.0)
    assert repeat(11) == ["interrupted: refused", "interrupted: refused (suppressed=9)"]
