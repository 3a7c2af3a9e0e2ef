"""How the garbage collector of a long-lived daemon is set: it looks rarely, and not at what lives for ever."""

from __future__ import annotations

import gc
from typing import Final

NEW_OBJECTS: Final = 50_000
"""Between two looks at what is young. A plan makes some hundred objects of which many outlive 700, the default, and are looked
at several times each; almost none is part of a cycle."""


def settle() -> None:
    """What lives now lives for ever: the collector need not look at it again in the middle of an answer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
