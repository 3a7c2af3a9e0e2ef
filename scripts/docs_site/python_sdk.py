"""The public names of the Python packages, for mkdocstrings."""

from __future__ import annotations

from collections.abc import Iterable

import kvclient

BESIDE = {
    "kvclient.events": ("BlockWatcher", "BlockMirror"),
    "kvclient.metrics": ("collector",),
    "kvclient.device": ("DeviceCopier", "PagedCache", "DeviceBlocks", "PinReport"),
    "kvclient.hbm": ("HbmPool",),
    "kvclient.gds": ("LandingRing",),
}
"""Public modules that ``import kvclient`` does not load."""


def client() -> str:
    """Write all public names of ``kvclient``, in reading order."""
    return _described((f"kvclient.{name}" for name in kvclient.__all__), level=2)


def beside() -> str:
    """Write the public names of the modules that are imported by name."""
    return "\n".join(
        f"## {module}\n\n{_described((f'{module}.{name}' for name in names), level=3)}" for module, names in BESIDE.items()
    )


def _described(names: Iterable[str], *, level: int) -> str:
    return "\n".join(f"::: {name}\n    options:\n      heading_level: {level}\n" for name in names)
