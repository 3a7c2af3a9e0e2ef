"""States of a block and the transitions between them.

1. A block has a state in DRAM and a replica on a durable volume, in one byte together: one bit per state, so that a predicate
   over several states is one mask.
2. ``CLEAN`` means that the block may leave DRAM as it is: it is durable elsewhere, or write-back gave it up, or it is only a copy
   of another node's block, or the node writes nothing back. A ``DIRTY`` block must be written first, unless its time to live ends
   or its namespace is invalidated.
3. Every change goes through ``Residency``, which checks it against the tables below and records it in a ``TransitionLog``. A
   change that the tables do not have is a bug: it raises ``InvalidTransition`` with the earlier transitions of the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey

STORY_LENGTH: Final = 4_096
"""Transitions that a table remembers, of all blocks together."""
VOLUME_SHIFT: Final = 4


class DramState(IntEnum):
    """A block's state in DRAM."""

    ABSENT = 0
    FILLING = 1
    """Its first layers are in its slot. The block is not in the table yet. Its pins keep the slot alive."""
    DIRTY = 2
    """Must be written before it is evicted, except by a time to live or an invalidation."""
    WRITING = 4
    """Waits for write-back, or is being written."""
    CLEAN = 8
    """May be evicted."""


class VolumeReplica(IntEnum):
    """A block's replica on a durable volume of this node, or on the storage node."""

    ABSENT = 0
    PRESENT = 1
    REMOTE = 2
    """On the storage node."""
    EVICTING = 4
    """Being evicted, to free space or on an operator's request. No new read may begin."""
    EVICTING_FOR_QUOTA = 8
    """As ``EVICTING``, because its tenant holds more than its share. If the block is still in DRAM, it becomes dirty, but
    nothing waits until it is durable again: the share may have no space for it."""


DRAM_TRANSITIONS: Final[Mapping[DramState, frozenset[DramState]]] = {
    DramState.ABSENT: frozenset({DramState.FILLING, DramState.DIRTY, DramState.WRITING, DramState.CLEAN}),
    DramState.FILLING: frozenset({DramState.ABSENT, DramState.CLEAN}),
    DramState.DIRTY: frozenset({DramState.ABSENT, DramState.WRITING, DramState.CLEAN}),
    DramState.WRITING: frozenset({DramState.CLEAN}),
    DramState.CLEAN: frozenset({DramState.ABSENT, DramState.DIRTY, DramState.WRITING}),
}
VOLUME_TRANSITIONS: Final[Mapping[VolumeReplica, frozenset[VolumeReplica]]] = {
    VolumeReplica.ABSENT: frozenset({VolumeReplica.PRESENT, VolumeReplica.REMOTE}),
    VolumeReplica.PRESENT: frozenset({VolumeReplica.EVICTING, VolumeReplica.EVICTING_FOR_QUOTA}),
    VolumeReplica.REMOTE: frozenset({VolumeReplica.ABSENT}),
    VolumeReplica.EVICTING: frozenset({VolumeReplica.PRESENT, VolumeReplica.ABSENT}),
    VolumeReplica.EVICTING_FOR_QUOTA: frozenset({VolumeReplica.PRESENT, VolumeReplica.ABSENT}),
}
LEGAL_IN_DRAM: Final = frozenset(old << 4 | new for old, targets in DRAM_TRANSITIONS.items() for new in targets)
"""The transitions as ``old << 4 | new``: checked for every block that comes, leaves or is written."""
LEGAL_ON_VOLUME: Final = frozenset(old << 4 | new for old, targets in VOLUME_TRANSITIONS.items() for new in targets)


class InvalidTransition(Internal):
    """A block was to change between states that no transition connects: a bug of the node."""


class TransitionLog:
    """The last transitions of all blocks of a table. Guarded by the table's lock."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: deque[tuple[BlockKey, DramState | VolumeReplica]] = deque(maxlen=STORY_LENGTH)
        """(key, new state), oldest first."""

    def of(self, key: BlockKey) -> list[str]:
        """The transitions of a block that are remembered, oldest first."""
        return [f"{type(new).__name__}.{new.name}" for each, new in self.entries if each == key]

    def invalid(self, key: BlockKey, old: DramState | VolumeReplica, new: DramState | VolumeReplica) -> InvalidTransition:
        """The error for a transition that the tables do not have."""
        return InvalidTransition(
            f"a block cannot change from {type(old).__name__}.{old.name} to {new.name}",
            key=key.hex(),
            story=", ".join(self.of(key)) or "none remembered",
        )
