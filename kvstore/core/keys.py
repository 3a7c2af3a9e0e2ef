"""Block keys: a hash chain over a request's tokens, so that equal keys imply equal prefixes.

For block ``i`` of a chain (``‖`` joins bytes)::

    key(0) = H(namespace ‖ tokens(0) ‖ extra(0))
    key(i) = H(key(i-1)  ‖ tokens(i) ‖ extra(i))

* ``tokens(i)``: the ids of exactly ``block_tokens`` tokens, uint32 little-endian. The length is fixed by the namespace, so the
  boundary between tokens and ``extra`` is unambiguous. A last, incomplete block cannot be shared; for the handoff of a whole
  prompt it has a separate key (``KeyChain.tail``).
* ``extra(i)``: other inputs of this block's KV (LoRA adapter, images, a cache salt), encoded by ``encode_extra``. Usually empty;
  an empty extra adds no bytes to the hash. Through the chain, the extra of one block changes the keys of all later blocks.
* ``H``: xxh3-128 (seed 0, canonical big-endian digest) or the first 16 bytes of SHA-256.

Golden vectors: ``tests/core/golden/keys.json``.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import KEY_BYTES, BlockKey

Tokens: TypeAlias = "npt.NDArray[np.integer[Any]] | array[int] | bytes | bytearray | memoryview | Iterable[int]"
"""Token ids: an integer array, bytes of uint32 little-endian, or any iterable of integers (slower: it is copied)."""

_TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1
_TAIL_MARK = b"\0\0tail"
"""No extra begins with a kind of no bytes."""


def encode_extra(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Encode the inputs of a block other than tokens.

    Each part is ``uint16 length ‖ kind (UTF-8) ‖ uint32 length ‖ value``, little-endian, in the given order. The order
    changes the key, so use a fixed one. Without parts the result is empty, which hashes like an absent extra.

    Args:
        parts: (kind, value), e.g. ``("lora", digest)`` or ``("image", hash)``.

    Raises:
        InvalidArgument: a kind is empty, or a part is too long for its length field.
    """
    encoded = bytearray()
    for kind, value in parts:
        name = kind.encode()
        if not 0 < len(name) < 2**16 or len(value) >= 2**32:
            raise InvalidArgument(
                "an extra requires a kind of 1 to 65535 bytes and a value below 4 GiB", kind=kind, bytes=len(value)
            )
        encoded += struct.pack("<H", len(name)) + name + struct.pack("<I", len(value)) + value
    return bytes(encoded)


class KeyChain:
    """Makes the keys of one namespace. Immutable and thread-safe."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._step = spec.block_tokens * _TOKEN_BYTES
        self._sha = spec.hash_algorithm is HashAlgorithm.SHA256_128

    def keys(
        self,
        tokens: Tokens,
        *,
        extras: Mapping[int, bytes] | None = None,
        parent: BlockKey | None = None,
        first_block: int = 0,
    ) -> list[BlockKey]:
        """Keys of all full blocks of ``tokens``.

        Args:
            tokens: ids; the first is the first token of block ``first_block``.
            extras: by position of the block in its *chain*: the result of ``encode_extra``.
            parent: key of block ``first_block - 1``, to continue a chain; None at its head.
            first_block: position of the first block of ``tokens`` in the chain.

        Raises:
            InvalidArgument: a token is not an integer in ``[0, 2**32)``, bytes are not whole tokens, or ``parent`` and
                ``first_block`` contradict each other.
        """
        if (parent is None) != (first_block == 0) or first_block < 0:
            raise InvalidArgument("a parent is required if first_block is above 0, and only then", first_block=first_block)
        if parent is not None and len(parent) != KEY_BYTES:
            raise InvalidArgument("a parent key must have 16 bytes", bytes=len(parent))
        data = token_bytes(tokens)
        end = len(data) - len(data) % self._step
        previous: bytes = self.spec.namespace if parent is None else parent
        if extras:
            return self._with_extras(data, end, previous, extras, first_block)
        step = self._step
        keys: list[bytes] = []
        append = keys.append
        if self._sha:
            sha256 = hashlib.sha256
            for at in range(0, end, step):
                previous = sha256(previous + data[at : at + step]).digest()[:KEY_BYTES]
                append(previous)
        else:
            digest = xxhash.xxh3_128_digest
            for at in range(0, end, step):
                previous = digest(previous + data[at : at + step])
                append(previous)
        return cast("list[BlockKey]", keys)

    def tail(self, tokens: Tokens, parent: BlockKey | None = None, extra: bytes = b"") -> BlockKey:
        """Key of a partial block: the tokens after the last full block of a prompt.

        It never equals the key of a full block: tokens are padded to a whole block, and the suffix is not a valid extra.

        Args:
            tokens: 1 to ``block_tokens`` - 1 ids.
            parent: key of the previous block; None: the prompt is shorter than a block.
            extra: of this block, the result of ``encode_extra``.

        Raises:
            InvalidArgument: the number of tokens is out of range, or a token is invalid.
        """
        if parent is not None and len(parent) != KEY_BYTES:
            raise InvalidArgument("a parent key must have 16 bytes", bytes=len(parent))
        data = token_bytes(tokens)
        if not 0 < len(data) < self._step:
            raise InvalidArgument("a tail must have at least one token, and fewer than a block", tokens=len(data) // _TOKEN_BYTES)
        previous: bytes = self.spec.namespace if parent is None else parent
        content = previous + data.ljust(self._step, b"\0") + _TAIL_MARK + struct.pack("<I", len(data) // _TOKEN_BYTES) + extra
        return BlockKey(hashlib.sha256(content).digest()[:KEY_BYTES] if self._sha else xxhash.xxh3_128_digest(content))

    def _with_extras(
        self, data: bytes, end: int, previous: bytes, extras: Mapping[int, bytes], first_block: int
    ) -> list[BlockKey]:
        """Keys of a chain with extras. Not optimised, because extras are rare."""
        keys: list[BlockKey] = []
        for block, at in enumerate(range(0, end, self._step), start=first_block):
            content = previous + data[at : at + self._step] + extras.get(block, b"")
            previous = hashlib.sha256(content).digest()[:KEY_BYTES] if self._sha else xxhash.xxh3_128_digest(content)
            keys.append(BlockKey(previous))
        return keys


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as they are hashed: uint32 little-endian, one after the other.

    Raises:
        InvalidArgument: see ``KeyChain.keys``.
    """
    if isinstance(tokens, memoryview) and tokens.format != "B":
        tokens = np.asarray(tokens)
    if isinstance(tokens, bytes | bytearray | memoryview):
        if len(tokens) % _TOKEN_BYTES:
            raise InvalidArgument("tokens as bytes must have 4 bytes each", bytes=len(tokens))
        return bytes(tokens)
    if isinstance(tokens, array):
        tokens = np.frombuffer(tokens, dtype=tokens.typecode) if tokens else np.empty(0, np.uint32)
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    try:
        ids = array("I", tokens)
    except OverflowError as error:
        raise InvalidArgument("a token is negative or above 4294967295") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument("tokens must be integers", got=type(tokens).__name__) from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _array_bytes(tokens: npt.NDArray[Any]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidArgument("tokens must be a one-dimensional array of integers", shape=tokens.shape, dtype=tokens.dtype)
    if tokens.dtype != np.uint32 and tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN):
        raise InvalidArgument("a token is negative or above 4294967295", least=tokens.min(), most=tokens.max())
    return tokens.astype("<u4", copy=False).tobytes()


class NamespaceKeyMask:
    """Converts keys of a request's chain to keys of one namespace, by XOR with the difference of the two namespaces.

    Args:
        chain: the namespace whose chain makes the keys; its own keys stay as they are.
        namespace: the namespace of the resulting keys.
    """

    def __init__(self, chain: bytes, namespace: bytes) -> None:
        mask = np.frombuffer(chain, np.uint64) ^ np.frombuffer(namespace, np.uint64)
        self._mask = mask if mask.any() else None

    def keys(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the packed keys of the same blocks in the namespace."""
        packed = b"".join(keys)
        if self._mask is None:
            return packed
        return (np.frombuffer(packed, np.uint64).reshape(-1, 2) ^ self._mask).tobytes()
