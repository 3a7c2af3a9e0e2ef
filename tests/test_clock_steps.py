"""The wall clock may step (NTP, a suspended machine, an operator): nothing that is timed here may notice."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Unauthenticated
from kvstore.core.types import BootId, NamespaceId
from kvstore.transport.tickets import TicketAuthority

REPOSITORY = Path(__file__).resolve().parent.parent
BY_THE_CALENDAR = {
    REPOSITORY / path
    for path in (
        "kvstore/events/publisher.py",  # vLLM's format dates a batch; numbers begin there, to differ after a restart
        "kvstore/doctor/findings.py",  # certificates expire by the calendar
        "kvstore/health/host_reports.py",  # the same
        "clients/kvclient/engines/file_stamps.py",  # compared with times that the file system wrote
        # times that people read: figures of the last hour, cluster events, since when a finding is true
        "kvstore/control_api/history.py",
        "kvstore/observe/history.py",
        "kvstore/metadata/admin_service.py",
        "kvstore/metadata/cluster/event_journal.py",
        "kvstore/metadata/membership/server_table.py",
        "kvstore/cli/commands/store/shard_lines.py",
        "kvstore/testing/connector/soak.py",
        # the clocks of two hosts are compared, to warn of a difference
        "kvstore/metadata/membership/node_table.py",
        "kvstore/node/publish/publisher.py",
    )
}
NAMESPACE = NamespaceId(b"n" * 16)
YEAR_S = 365 * 86_400.0


def wall_clock_readings(tree: ast.AST) -> Iterator[int]:
    """Lines that read the wall clock, by any of its usual names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in {("time", "time"), ("time", "time_ns"), ("time", "CLOCK_REALTIME")} or (
                owner in {"datetime", "dt", "date"} and node.attr in {"now", "utcnow", "today"}
            ):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for name in node.names if name.name in {"time", "time_ns"})


@pytest.mark.parametrize("code", ["time.time()", "time.time_ns", "from time import time", "datetime.datetime.now()", "dt.now()"])
def test_the_search_finds_readings(code: str) -> None:
    assert list(wall_clock_readings(ast.parse(code))) == [1]


def test_nothing_reads_the_wall_clock() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for folder in ("kvstore", "clients")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path not in BY_THE_CALENDAR
        for line in wall_clock_readings(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], "leases, tickets and breakers are dated by kvstore.core.clock, which does not step"


@pytest.mark.parametrize("step_s", [-YEAR_S, -5.0, 5.0, YEAR_S])
def test_ticket_expiry_ignores_steps_of_the_wall_clock(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = TicketAuthority(b"s" * 32, BootId(b"b" * 16), MonotonicClock())
    ticket, short = authority.issue(NAMESPACE, 3600.0), authority.issue(NAMESPACE, 0.0)
    before_s = time.time()
    monkeypatch.setattr(time, "time", lambda: before_s + step_s)
    monkeypatch.setattr(time, "time_ns", lambda: int((before_s + step_s) * 1e9))
    scope = authority.verify(ticket)
    authority.check(scope, NAMESPACE)
    with pytest.raises(Unauthenticated, match="expired"):
        authority.verify(short)
    assert authority.verify(authority.issue(NAMESPACE, 3600.0)).namespace == NAMESPACE
