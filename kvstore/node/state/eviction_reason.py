"""Why a block is on its way out of its durable volume."""

from __future__ import annotations

from enum import IntEnum


class Leaving(IntEnum):
    """Whether a block is on its way out, and why."""

    STAYS = 0
    FOR_ROOM = 1
    """Others need the room, or somebody asked for it."""
    FOR_QUOTA = 2
    """Its tenant holds more than its share: nobody owes it to be durable any more."""
