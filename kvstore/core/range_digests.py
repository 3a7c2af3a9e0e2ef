"""Range digests of key sets, with which two sides find differences without sending the keys.

Key space has 4,096 ranges, by the first 12 bits of the key. The digest of a range is the XOR of xxh3-64 (seed 0) over the 16-byte
keys held in it: order does not matter, and each added or removed key changes it by one XOR. The number of keys is sent with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvstore.core.types import BlockKey

_hash = xxhash.xxh3_64_intdigest


def key_range(key: BlockKey) -> int:
    """Range of key space (0 to 4,095) that contains a key."""
    return key[0] << 4 | key[1] >> 4


def digest_keys(keys: Iterable[BlockKey]) -> int:
    """Digest of one range: XOR of xxh3-64 over its keys; 0 for an empty range."""
    digest = 0
    for key in keys:
        digest ^= _hash(key)
    return digest
