"""The Python packages: which names are public, each for mkdocstrings to describe from its docstring."""

from __future__ import annotations

from collections.abc import Iterable

import kvclient

BESIDE = {
    "kvclient.events": ("BlockWatcher", "BlockMirror"),
    "kvclient.metrics": ("collector",),
    "kvclient.device": ("DeviceCopier", "PagedCache", "DeviceBlocks", "PinReport"),
    "kvclient.hbm": ("HbmPool",),
}
"""What engines use of modules that ``import kvclient`` leaves alone."""


def client() -> str:
    """All public names of ``kvclient``, in the order in which a reader meets them."""
    return _described((f"kvclient.{name}" for name in kvclient.__all__), level=2)


def beside() -> str:
    """What is imported from other modules."""
    return "\n".join(
        f"## {module}\n\n{_described((f'{module}.{name}' for name in names), level=3)}" for module, names in BESIDE.items()
    )


def _described(names: Iterable[str], *, level: int) -> str:
    return "\n".join(f"::: {name}\n    options:\n      heading_level: {level}\n" for name in names)
