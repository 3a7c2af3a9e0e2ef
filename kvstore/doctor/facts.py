"""Facts of a host and requirements of its configuration: plain data, so that tests can describe any host.

Each probe process returns one JSON object. A failed probe returns only an error. Readers check the type of every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.process.memory.memory_sizing import USUAL_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class WantedVolume:
    """One NVMe volume of the configuration."""

    path: Path
    capacity_bytes: int
    direct: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNixl:
    """Requirements for NIXL, unless the configuration disables it."""

    required: bool = False
    trusted: bool = True
    """The operator accepts that any host that reaches the node may read and write its memory."""
    ruled_out: str | None = None
    """The setting that is incompatible with NIXL."""
    devices: str = ""
    transports: str = ""


@dataclass(frozen=True, slots=True)
class WantedTls:
    """Certificate files of one section of the configuration."""

    section: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of the configuration."""

    dram_bytes: int
    huge_pages: bool = False
    huge_pages_refused: bool = False
    """The configuration disables huge pages."""
    block_bytes: int = USUAL_BLOCK_BYTES
    defaults: Sequence[str] = ()
    """Settings derived from the host, each with its value and the reason."""
    tls: Sequence[WantedTls] = ()
    gds: str = "auto"
    volumes: Sequence[WantedVolume] = ()
    mounts: Sequence[Path] = ()
    nixl: WantedNixl | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Result of one probe. Accessors return None or an empty value if the type of a value is not the expected one."""

    said: Mapping[str, Any]
    error: str | None = None
    """Why the probe failed; None: it did not."""

    def number(self, name: str) -> int | None:
        """Integer value; None if missing."""
        value = self.said.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        """Non-empty string; None if missing."""
        value = self.said.get(name)
        return value if isinstance(value, str) and value else None

    def flag(self, name: str) -> bool | None:
        """Boolean value; None if missing."""
        value = self.said.get(name)
        return value if isinstance(value, bool) else None

    def texts(self, name: str) -> list[str]:
        """List of strings."""
        value = self.said.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def sections(self, name: str) -> list[Section]:
        """List of objects."""
        value = self.said.get(name)
        return [Section(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []

    def pairs(self, name: str) -> dict[str, Any]:
        """JSON object with any values."""
        value = self.said.get(name)
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Results of all probes by name. Probes of folders have a number, such as ``volume:0``."""

    sections: Mapping[str, Section] = field(default_factory=dict)

    def __getitem__(self, probe: str) -> Section:
        return self.sections.get(probe, _NOT_ASKED)

    def all(self, prefix: str) -> list[Section]:
        """List the results of ``prefix:0``, ``prefix:1`` and so on."""
        found: list[Section] = []
        while (section := self.sections.get(f"{prefix}:{len(found)}")) is not None:
            found.append(section)
        return found


_NOT_ASKED = Section({})
