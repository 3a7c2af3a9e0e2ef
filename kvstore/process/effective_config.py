"""A value of a process's configuration as it tells others: servers see settings of their own, not the configuration itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One value.

    Attributes:
        key: dotted, e.g. ``node.dram``.
        value: as people write it; secrets are masked.
        source: ``default``, ``file``, ``environment``, ``flag`` or ``derived`` (from the host or other settings).
        detail: the file, the variable, the flag, the reason.
        description: what it does.
    """

    key: str
    value: str
    source: str
    detail: str
    description: str
