"""Configuration values of a process as it reports them over RPC. Servers do not see the configuration itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting with its value and source.

    Attributes:
        key: dotted, e.g. ``node.dram``.
        value: as in a configuration file; secrets are masked.
        source: ``default``, ``file``, ``environment``, ``flag`` or ``derived`` (from the host or other settings).
        detail: path of the file, name of the variable or flag, or reason of the derived value.
        description: help text.
    """

    key: str
    value: str
    source: str
    detail: str
    description: str
