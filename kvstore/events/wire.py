"""vLLM's KV-event format (0.32): msgpack of these structs. Their names and the order of their fields are part of the format.

A message has three frames: the topic, the number of the batch in 8 bytes (big-endian), and the encoded batch. Fields of vLLM
that are never set here are omitted, as vLLM omits unset fields; ``tests/engines`` compares both.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks were stored in a medium.

    Attributes:
        block_hashes: the blocks; a chain if they have tokens or were published together, otherwise in any order.
        parent_block_hash: parent of the first block; None: it is the head of a chain, or its parent is unknown.
        token_ids: tokens of all blocks; empty without a model, since the store itself knows keys, not tokens.
        block_size: tokens per block; 0: the namespace is unknown.
        lora_id: never set: engines number adapters differently.
        medium: ``GPU``, ``CPU`` or ``STORAGE``.
        lora_name: the adapter.
        extra_keys: per block, inputs of its hash besides tokens; None: nothing.
        group_idx: never set: a published block is whole, with all KV cache groups.
        kv_cache_spec_kind: kind of the KV cache group whose tokens these are.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks were removed from a medium: no readable volume of the tier holds them."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All blocks of earlier events were removed."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Content of a message.

    Attributes:
        ts: seconds since 1970.
        events: the events, in order.
        data_parallel_rank: the configured rank.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Number of the empty message that ends a replay."""

encode: Final = msgspec.msgpack.Encoder().encode


def number(sequence: int) -> bytes:
    """The frame with a batch number."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
