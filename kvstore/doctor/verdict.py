"""Verdict of a check: one line, and the actions that help most. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.contract import Finding, Level

MOST_ACTIONS: Final = 3
_ORDER: Final = (Level.MISSING, Level.WARNING, Level.INFO)
_AREAS: Final = ("storage", "memory", "TLS", "metadata server", "index", "limits", "node")
"""Areas in the order in which a problem there costs data or prevents a start; others follow."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Summary of all findings."""

    line: str
    actions: tuple[str, ...]
    """Up to three commands, each with its reason."""


def verdict(found: Sequence[Finding]) -> Verdict:
    """Summarize findings: missing requirements before warnings, then by area; equal commands count once."""
    missing = sum(finding.level is Level.MISSING for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    if missing:
        count = (
            f"{missing} requirement{'' if missing == 1 else 's'} of the configuration {'is' if missing == 1 else 'are'} missing"
        )
        line = f"NOT READY: {count}, {_warnings(warnings)}"
    elif warnings:
        line = f"READY, with {_warnings(warnings)}"
    else:
        optional = sorted({finding.area for finding in found if finding.level is Level.INFO and finding.fix})
        line = f"READY; optional, see above: {', '.join(optional)}" if optional else "READY: nothing to do"
    return Verdict(line, tuple(_actions(found)))


def _warnings(count: int) -> str:
    return f"{count} warning{'' if count == 1 else 's'}"


def _actions(found: Sequence[Finding]) -> list[str]:
    problems = [finding for finding in found if finding.level in (Level.MISSING, Level.WARNING)]
    ordered = sorted(problems, key=lambda finding: (_ORDER.index(finding.level), _area(finding), not finding.fix))
    chosen: dict[str, str] = {}
    for finding in ordered:
        command = (finding.fix or "").partition("#")[0].strip()
        chosen.setdefault(command or finding.message, _action(finding, command))
        if len(chosen) == MOST_ACTIONS:
            break
    return list(chosen.values())


def _action(finding: Finding, command: str) -> str:
    return f"{finding.area}: {finding.message}" + (f"  -> {command}" if command else "")


def _area(finding: Finding) -> int:
    known = [number for number, area in enumerate(_AREAS) if finding.area.startswith(area)]
    return known[0] if known else len(_AREAS)
