"""Garbage collector settings of commands and daemons."""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""Allocations between collections of the young generation. One load plan creates several hundred objects, many of which outlive
the default of 700 allocations. Almost none of them is part of a cycle."""


def collect_rarely() -> None:
    """Collect less often. Before imports, it shortens the start of a command: objects of modules are not scanned repeatedly."""
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from collections, and collect less often."""
    gc.collect()
    gc.freeze()
    collect_rarely()
