"""Digests of all key ranges at once, computed independently of a change log."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core import limits
from kvstore.core.checksum import digest_keys
from kvstore.core.types import KEY_BYTES, BlockKey


def digest_ranges(packed: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Digests and counts of all ranges at once.

    Args:
        packed: all keys held, 16 bytes each, each once, in any order.

    Returns:
        uint64 ``[4096]`` digests and uint32 ``[4096]`` counts.
    """
    keys = np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)
    ranges = keys[:, 0].astype(np.intp) << 4 | keys[:, 1] >> 4
    each = (BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
    hashes = np.fromiter((digest_keys([key]) for key in each), np.uint64, len(keys))
    digests = np.zeros(limits.DIGEST_RANGES, np.uint64)
    np.bitwise_xor.at(digests, ranges, hashes)
    return digests, np.bincount(ranges, minlength=limits.DIGEST_RANGES).astype(np.uint32)
