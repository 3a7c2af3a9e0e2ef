"""SGLang's page hashes as block keys, and the place of a page in its chain.

SGLang names a page by SHA-256 over the hash of the page before it and its own tokens; a cache salt or an adapter seeds the chain.
So equal hashes mean equal prefixes, as the store's keys do, but they say nothing of the model or the rank: the first 16 bytes,
masked with the namespace, are the key (nodes and the index hold a key once, whatever namespace it is of).

Which page comes before, and how many there are, cannot be seen from a hash. SGLang tells it where
``hicache_storage_pass_prefix_keys`` is set: the hashes of all pages before a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from kvclient import BlockKey, InvalidArgument

_DIGEST_BYTES = 32
_KEY_BYTES = 16


class PageKeys:
    """Makes the keys of one namespace. Immutable.

    Args:
        namespace: 16 bytes.
    """

    def __init__(self, namespace: bytes) -> None:
        self._mask = np.frombuffer(namespace, np.uint64)

    def of(self, hashes: Sequence[str]) -> list[BlockKey]:
        """Keys of pages.

        Args:
            hashes: SHA-256 in hexadecimal digits, as SGLang writes them.

        Raises:
            InvalidArgument: one is no such thing.
        """
        try:
            digests = bytes.fromhex("".join(hashes))
        except ValueError as error:
            raise InvalidArgument("a page's key is no SHA-256 in hexadecimal digits") from error
        # White space is let through above, and two wrong lengths may make a right sum.
        if len(digests) != _DIGEST_BYTES * len(hashes) or set(map(len, hashes)) - {2 * _DIGEST_BYTES}:
            raise InvalidArgument("a page's key is no SHA-256 in hexadecimal digits")
        heads = np.frombuffer(digests, np.uint64).reshape(-1, _DIGEST_BYTES // 8)[:, : _KEY_BYTES // 8]
        packed = (heads ^ self._mask).tobytes()
        return cast("list[BlockKey]", [packed[at : at + _KEY_BYTES] for at in range(0, len(packed), _KEY_BYTES)])


class Prefix:
    """All pages before a batch.

    Args:
        hashes: theirs, from the head of the chain; None: SGLang does not tell. At the head it tells either nothing or no pages,
            so for reading, where a wrong guess only misses, nothing is taken for the head.
    """

    def __init__(self, hashes: Sequence[str] | None) -> None:
        self.hashes: Sequence[str] = hashes or ()
        self.told = hashes is not None

    @property
    def depth(self) -> int:
        """Position of the page behind it."""
        return len(self.hashes)
