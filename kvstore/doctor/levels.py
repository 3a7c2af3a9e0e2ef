"""A finding, how much it matters, and how figures are shown in one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    INFO = "info"
    """Not there, and not asked for."""
    WARNING = "warning"
    """Works, but more slowly or less well than it could; or could not be found out."""
    MISSING = "missing"
    """The configuration requires it: a node would not start, or not do what it is to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for a person."""

    area: str
    level: Level
    what: str
    mend: str | None = None
    """A line for a shell that mends it or looks closer, or ``--set …``, the setting to change; what else to know follows a #."""


def show_size(size: int) -> str:
    """For people: three digits and a unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def whole(size: int) -> str:
    """A size for a setting: whole GiB, or MiB where it is less than one; not more than ``size``."""
    return f"{size >> 30}GiB" if size >> 30 else f"{max(1, size >> 20)}MiB"
