"""Chains of blocks for a pool, and a recorder of its demotions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvclient import CacheSpec
from kvclient.call.execution import CallScope
from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import KVStoreError
from kvstore.core.keys import KeyChain
from kvstore.core.types import BlockKey

SPEC = CacheSpec(model="pool", block_tokens=4, layers=3, layer_block_bytes=8192)
Chain = tuple[list[BlockKey], DenseBlocks]


def chain(blocks: int, seed: int, spec: CacheSpec = SPEC) -> Chain:
    random = np.random.default_rng(seed)
    keys = KeyChain(spec).keys(random.integers(0, 1 << 20, blocks * spec.block_tokens, dtype=np.uint32))
    data = np.frombuffer(random.bytes(blocks * spec.block_bytes), np.uint8)
    return keys, DenseBlocks(data.reshape(blocks, spec.layers, spec.layer_block_bytes))


def allocate(blocks: int, spec: CacheSpec = SPEC) -> DenseBlocks:
    return DenseBlocks(np.zeros((blocks, spec.layers, spec.layer_block_bytes), np.uint8))


def in_time() -> CallScope:
    return CallScope.after(60.0, MonotonicClock())


class Below:
    """Records demotions: the tiers below the pool."""

    def __init__(self) -> None:
        self.held: dict[BlockKey, bytes] = {}
        self.parents: dict[BlockKey, BlockKey | None] = {}
        self.calls = 0
        self.error: KVStoreError | None = None
        self.answer = True

    def __call__(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, blocks: BlockBuffer) -> bool:
        self.calls += 1
        if self.error is not None:
            raise self.error
        for at, key in enumerate(keys):
            self.held[key] = b"".join(bytes(piece) for piece in blocks.segments(at, 0, blocks.shape.layers))
            self.parents[key] = keys[at - 1] if at else parent
        return self.answer
