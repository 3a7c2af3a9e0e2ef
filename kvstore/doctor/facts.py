"""Facts of a host, and what its configuration asks for: plain data, so that findings can be tested on hosts that do not exist.

Facts come from processes that look at drivers, kernels and folders. Each is a JSON object by the name of its probe; a probe that
failed has said nothing, and why is kept. Nothing is taken for granted about types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.process.memory_sizing import USUAL_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class WantedVolume:
    """One NVMe volume of the configuration."""

    path: Path
    capacity_bytes: int
    direct: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNixl:
    """NIXL, where the configuration does not switch it off."""

    required: bool = False
    trusted: bool = True
    """The operator has said that whoever reaches the node may read and write its memory."""
    ruled_out: str | None = None
    """The setting that goes with no NIXL."""
    devices: str = ""
    transports: str = ""


@dataclass(frozen=True, slots=True)
class WantedTls:
    """Files of certificates that one section of the configuration names."""

    section: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the configuration asks of the host."""

    dram_bytes: int
    huge_pages: bool = False
    huge_pages_refused: bool = False
    """The configuration says that there be none."""
    block_bytes: int = USUAL_BLOCK_BYTES
    defaults: Sequence[str] = ()
    """Settings that follow from the host, each with its value and the reason."""
    tls: Sequence[WantedTls] = ()
    gds: str = "auto"
    volumes: Sequence[WantedVolume] = ()
    mounts: Sequence[Path] = ()
    nixl: WantedNixl | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """What one probe found. Each look names what is expected; anything else is as if nothing had been said."""

    said: Mapping[str, Any]
    error: str | None = None
    """Why the probe said nothing."""

    def number(self, name: str) -> int | None:
        """A whole number."""
        value = self.said.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        """A string, not empty."""
        value = self.said.get(name)
        return value if isinstance(value, str) and value else None

    def flag(self, name: str) -> bool | None:
        """True or False."""
        value = self.said.get(name)
        return value if isinstance(value, bool) else None

    def texts(self, name: str) -> list[str]:
        """Strings in a row."""
        value = self.said.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def sections(self, name: str) -> list[Section]:
        """Objects in a row."""
        value = self.said.get(name)
        return [Section(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []

    def pairs(self, name: str) -> dict[str, Any]:
        """One object."""
        value = self.said.get(name)
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Facts:
    """What all probes found, by the probe's name; folders and nodes by name and a number."""

    sections: Mapping[str, Section] = field(default_factory=dict)

    def __getitem__(self, probe: str) -> Section:
        return self.sections.get(probe, _NOT_ASKED)

    def all(self, prefix: str) -> list[Section]:
        """The sections of ``prefix:0``, ``prefix:1`` and so on."""
        found: list[Section] = []
        while (section := self.sections.get(f"{prefix}:{len(found)}")) is not None:
            found.append(section)
        return found


_NOT_ASKED = Section({})
