"""Chains of keys, and the bytes of their blocks."""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.core.checksum import layer_checksums
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, BlockShape


def key_of(*parts: object) -> BlockKey:
    """Return a key that some values identify, e.g. the name of a chain and the position in it."""
    return BlockKey(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:16])


def chain(name: object, length: int, first: int = 0) -> list[BlockKey]:
    """Return the keys ``[first, length)`` of a chain."""
    return [key_of(name, depth) for depth in range(first, length)]


def token_chain(spec: CacheSpec, blocks: int, seed: int = 0) -> list[BlockKey]:
    """Return the keys of a prompt of consecutive tokens."""
    return KeyChain(spec).keys(np.arange(blocks * spec.block_tokens, dtype=np.uint32) + seed * 1000)


def payload_of(key: BlockKey, shape: BlockShape) -> bytes:
    """Return the bytes of a key's block. All layers differ."""
    return hashlib.shake_128(key).digest(shape.block_bytes)


def checksums_of(key: BlockKey, shape: BlockShape) -> bytes:
    """Return the layer checksums of a key's block."""
    return layer_checksums(memoryview(payload_of(key, shape)), shape)
