"""SGLang's page hashes as block keys, and the position of a page in its chain.

SGLang identifies a page by SHA-256 over the previous page's hash and the page's tokens; a cache salt or an adapter seeds the
chain. Equal hashes therefore mean equal prefixes, as with the store's keys, but they do not identify the model or the rank. The
key is the first 16 bytes, masked with the namespace, because nodes and the index hold a key once across all namespaces.

A hash does not reveal the previous page or the depth. With ``hicache_storage_pass_prefix_keys``, SGLang passes the hashes of all
pages before a batch.
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
        """Return the keys of pages.

        Args:
            hashes: SHA-256 in hexadecimal digits, as SGLang writes them.

        Raises:
            InvalidArgument: a hash is invalid.
        """
        try:
            digests = bytes.fromhex("".join(hashes))
        except ValueError as error:
            raise InvalidArgument("a page's key must be a SHA-256 in hexadecimal digits") from error
        # The check above accepts white space, and two wrong lengths may add up to the right sum.
        if len(digests) != _DIGEST_BYTES * len(hashes) or set(map(len, hashes)) - {2 * _DIGEST_BYTES}:
            raise InvalidArgument("a page's key must be a SHA-256 in hexadecimal digits")
        heads = np.frombuffer(digests, np.uint64).reshape(-1, _DIGEST_BYTES // 8)[:, : _KEY_BYTES // 8]
        packed = (heads ^ self._mask).tobytes()
        return cast("list[BlockKey]", [packed[at : at + _KEY_BYTES] for at in range(0, len(packed), _KEY_BYTES)])


class Prefix:
    """All pages before a batch.

    Args:
        hashes: their hashes, from the head of the chain; None: SGLang did not pass them. At the head of a chain SGLang passes
            None or an empty list, so reads treat None as the head: a wrong guess is only a miss.
    """

    def __init__(self, hashes: Sequence[str] | None) -> None:
        self.hashes: Sequence[str] = hashes or ()
        self.is_known = hashes is not None
        """Whether SGLang passed the hashes."""

    @property
    def depth(self) -> int:
        """Depth of the page after the prefix."""
        return len(self.hashes)
