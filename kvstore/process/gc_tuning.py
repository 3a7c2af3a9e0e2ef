"""Garbage collector settings for a long-lived daemon."""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""Allocations between collections of the young generation. One load plan creates several hundred objects, many of which outlive
the default of 700 allocations. Almost none of them is part of a cycle."""


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
