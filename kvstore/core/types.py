"""The value types that every part of the store speaks in: identities, tiers, outcomes.

Numbers of the enums are those of ``proto/kvstore/v1/common.proto``
(``tests/core/test_types.py`` holds them together).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, cast

import numpy as np

KEY_BYTES = 16
"""Length of a block key, a namespace id, a boot id, an operation id and a session id."""

BlockKey = NewType("BlockKey", bytes)
NamespaceId = NewType("NamespaceId", bytes)
NodeId = NewType("NodeId", str)
VolumeId = NewType("VolumeId", str)
BootId = NewType("BootId", bytes)
SessionId = NewType("SessionId", bytes)
OperationId = NewType("OperationId", bytes)


class Tier(IntEnum):
    """Tier of a volume; lower is nearer to the GPU."""

    HBM = 1
    DRAM = 2
    NVME = 3


class Outcome(IntEnum):
    """Outcome of one block of a load. All but ``HIT`` are misses, which the engine recomputes."""

    HIT = 1
    MISS = 2
    CORRUPT = 3
    UNAVAILABLE = 4
    TIMEOUT = 5
    NO_SPACE = 6


class StoreOutcome(IntEnum):
    """Outcome of one block of a store. The proto defines each."""

    STORED = 1
    """In a response to Prepare: a slot was granted. In a response to Complete: the block is visible."""
    EXISTS = 2
    IN_PROGRESS = 3
    SKIPPED = 4
    CORRUPT = 5
    LOST = 6


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Size of one block: ``layers`` layer blocks of ``layer_block_bytes`` bytes, concatenated."""

    layers: int
    layer_block_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return self.layers * self.layer_block_bytes


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one chain; ``keys[0]`` is the child of ``parent`` (None: head) at position ``depth``."""

    namespace: NamespaceId
    parent: BlockKey | None
    depth: int
    keys: tuple[BlockKey, ...]


def pack_keys(keys: list[BlockKey] | tuple[BlockKey, ...]) -> bytes:
    """Concatenates keys, 16 bytes each, as they travel."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Split packed keys.

    Raises:
        ValueError: the length is not a multiple of 16 (servers map this to ``InvalidArgument``).
    """
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys must have {KEY_BYTES} bytes each, got {len(packed)} bytes")
    # a third of the time of slicing; unlike "S16", a void keeps trailing zero bytes
    return cast("list[BlockKey]", np.frombuffer(packed, f"V{KEY_BYTES}").tolist()) if packed else []
