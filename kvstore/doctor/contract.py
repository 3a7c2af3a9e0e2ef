"""Findings, their severity, and sizes for settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"
    """Absent and not required."""
    WARNING = "warning"
    """Works, but slower or worse than possible; or could not be determined."""
    MISSING = "missing"
    """Required by the configuration: a node would fail to start or to work as configured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: area, severity, message and fix."""

    area: str
    level: Level
    message: str
    fix: str | None = None
    """Shell command that fixes or inspects the problem, or ``--set …`` for a setting. A comment may follow a #."""


def setting_size(size: int) -> str:
    """Format a size for a setting, rounded down to whole GiB, or to MiB if it is less than 1 GiB."""
    return f"{size >> 30}GiB" if size >> 30 else f"{max(1, size >> 20)}MiB"
