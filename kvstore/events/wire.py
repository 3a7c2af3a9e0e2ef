"""vLLM's KV-event format (0.32), as bytes: msgpack of these structs, whose names and order of fields are part of it.

A message has three frames: topic, the batch's number in 8 bytes (big-endian), the encoded batch. Fields of vLLM's
that are never set here are left out, as vLLM leaves them out while they are unset; ``tests/engines`` holds both to each other.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks are in a medium from now on.

    Attributes:
        block_hashes: which; a chain, if they come of one publish, else in any order.
        parent_block_hash: of the first; None: it begins a chain, or its parent is not known.
        token_ids: always empty: the store knows keys, not tokens.
        block_size: tokens a block; 0: the namespace is not known.
        lora_id: never set.
        medium: ``GPU``, ``CPU`` or ``STORAGE``.
        lora_name: never set: an adapter is part of the namespace, and so of the hash.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks are no longer in a medium: nobody has them there who can be read."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing that was told before holds."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a message carries.

    Attributes:
        ts: seconds since 1970.
        events: in order.
        data_parallel_rank: as configured.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Number of the empty message that ends a replay."""

encode: Final = msgspec.msgpack.Encoder().encode


def number(sequence: int) -> bytes:
    """A batch's number, as a frame."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
