"""Range digests of key sets, with which two sides find differences without sending the keys.

Key space has 4,096 ranges, by the first 12 bits of the key. The digest of a range is the XOR of xxh3-64 (seed 0) over the 16-byte
keys held in it: order does not matter, and each added or removed key changes it by one XOR. The number of keys is sent with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core import limits
from kvstore.core.types import KEY_BYTES, BlockKey

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


def digest_ranges(packed: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Digests and counts of all ranges at once.

    Args:
        packed: all keys held, 16 bytes each, each once, in any order.

    Returns:
        uint64 ``[4096]`` digests and uint32 ``[4096]`` counts.
    """
    keys = np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)
    ranges = keys[:, 0].astype(np.intp) << 4 | keys[:, 1] >> 4
    hashes = np.fromiter((_hash(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)), np.uint64, len(keys))
    digests = np.zeros(limits.DIGEST_RANGES, np.uint64)
    np.bitwise_xor.at(digests, ranges, hashes)
    return digests, np.bincount(ranges, minlength=limits.DIGEST_RANGES).astype(np.uint32)
