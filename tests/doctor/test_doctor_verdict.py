"""The verdict of a check, and the actions that it puts first."""

from __future__ import annotations

from kvstore.doctor.contract import Finding, Level
from kvstore.doctor.verdict import verdict

FINE = Finding("software", Level.OK, "Python 3.11")
ABSENT = Finding("GPU", Level.INFO, "none", "install one")


def warning(area: str, fix: str | None = None) -> Finding:
    return Finding(area, Level.WARNING, f"something with {area}", fix)


def test_verdict_without_problems_is_ready() -> None:
    assert verdict([FINE]).line == "READY: nothing to do"
    assert verdict([FINE]).actions == ()


def test_verdict_names_optional_commands() -> None:
    node = Finding("node", Level.INFO, "none runs", "kvstore node")
    found = verdict([FINE, node, ABSENT, Finding("storage", Level.INFO, "no volumes")])
    assert found.line == "READY; optional, see above: GPU, node"
    assert found.actions == ()


def test_verdict_counts_warnings() -> None:
    assert verdict([FINE, warning("network")]).line == "READY, with 1 warning"


def test_verdict_missing_is_not_ready_and_first() -> None:
    missing = Finding("TLS", Level.MISSING, "expired", "openssl x509   # look")
    found = verdict([warning("storage", "df -h"), missing])
    assert found.line == "NOT READY: 1 requirement of the configuration is missing, 1 warning"
    assert found.actions == ("TLS: expired  -> openssl x509", "storage: something with storage  -> df -h")


def test_verdict_has_three_actions_by_area_and_each_once() -> None:
    found = [
        warning("network"),
        warning("limits", "ulimit"),
        warning("node a", "sudo"),
        warning("node b", "sudo"),
        warning("memory"),
    ]
    assert [action.partition(":")[0] for action in verdict(found).actions] == ["memory", "limits", "node a"]
