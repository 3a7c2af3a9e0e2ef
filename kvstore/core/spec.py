"""Specification of interchangeable KV caches, and the digest that names their namespace.

**Namespace digest**, so that any language can make it: the first 16 bytes of SHA-256 over::

    "kvstore/namespace/1"                       19 ASCII bytes: version tag of this encoding
    13 fields, in the order and with the numbers of the proto message CacheSpec, each as
        number   uint8
        length   uint32, little-endian
        value    `length` bytes

Strings are UTF-8 as given (no normalisation), integers are uint64 little-endian (length 8), bytes are themselves. Every field
is written, empty ones with length 0. It is SHA-256 even if the *keys* of the namespace use another hash, because an untrusted
tenant may request a namespace. Golden vectors: ``tests/core/golden/namespaces.json``.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockShape, NamespaceId

_NAMESPACE_TAG = b"kvstore/namespace/1"
_UINT32_MAX = 2**32 - 1


class HashAlgorithm(StrEnum):
    """Hash of block keys. XXH3 if all tenants of a namespace trust each other, otherwise SHA-256."""

    XXH3_128 = "xxh3-128"
    SHA256_128 = "sha256-128"


@dataclass(frozen=True)
class CacheSpec:
    """One cache domain. Equal specs are one namespace; nothing crosses namespaces.

    Field meanings are those of the proto message of the same name. Checked when made.

    Raises:
        InvalidArgument: a field is of the wrong type or outside its limits.
    """

    model: str
    block_tokens: int
    layers: int
    layer_block_bytes: int
    weights_epoch: str = ""
    dtype: str = "bf16"
    layout: str = "opaque"
    layout_version: int = 1
    shard_rank: int = 0
    shard_count: int = 1
    hash_algorithm: HashAlgorithm = HashAlgorithm.XXH3_128
    tenant: str = ""
    salt: bytes = b""

    def __post_init__(self) -> None:
        _check_name("model", self.model, required=True)
        _check_name("dtype", self.dtype, required=True)
        _check_name("layout", self.layout, required=True)
        _check_name("weights_epoch", self.weights_epoch)
        _check_name("tenant", self.tenant)
        _check_range("block_tokens", self.block_tokens, 1, limits.MAX_BLOCK_TOKENS)
        _check_range("layers", self.layers, 1, limits.MAX_LAYERS)
        _check_range("layer_block_bytes", self.layer_block_bytes, limits.MIN_LAYER_BLOCK_BYTES, limits.MAX_LAYER_BLOCK_BYTES)
        _check_range("block_bytes", self.block_bytes, 1, limits.MAX_BLOCK_BYTES)
        _check_range("layout_version", self.layout_version, 0, _UINT32_MAX)
        _check_range("shard_count", self.shard_count, 1, limits.MAX_SHARDS)
        _check_range("shard_rank", self.shard_rank, 0, self.shard_count - 1)
        if not isinstance(self.salt, bytes):
            raise InvalidArgument("salt must be bytes", type=type(self.salt).__name__)
        if len(self.salt) > limits.MAX_SALT_BYTES:
            raise InvalidArgument("salt is too long; use a hash of it", bytes=len(self.salt), limit=limits.MAX_SALT_BYTES)
        try:
            object.__setattr__(self, "hash_algorithm", HashAlgorithm(self.hash_algorithm))
        except ValueError as error:
            known = ", ".join(HashAlgorithm)
            raise InvalidArgument("unknown hash algorithm", hash_algorithm=self.hash_algorithm, known=known) from error

    @property
    def shape(self) -> BlockShape:
        """The size of one block."""
        return BlockShape(self.layers, self.layer_block_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return self.layers * self.layer_block_bytes

    @cached_property
    def namespace(self) -> NamespaceId:
        """The 16-byte name of this cache domain; see the module for its encoding."""
        fields: tuple[str | int | bytes, ...] = (
            self.model,
            self.weights_epoch,
            self.dtype,
            self.block_tokens,
            self.layers,
            self.layer_block_bytes,
            self.layout,
            self.layout_version,
            self.shard_rank,
            self.shard_count,
            self.hash_algorithm.value,
            self.tenant,
            self.salt,
        )
        parts = [_NAMESPACE_TAG]
        for number, field in enumerate(fields, start=1):
            value = _field_bytes(field)
            parts += (struct.pack("<BI", number, len(value)), value)
        return NamespaceId(hashlib.sha256(b"".join(parts)).digest()[:KEY_BYTES])


def _field_bytes(field: str | int | bytes) -> bytes:
    if isinstance(field, str):
        return field.encode()
    if isinstance(field, int):
        return field.to_bytes(8, "little")
    return field


def _check_name(name: str, value: object, *, required: bool = False) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string", got=type(value).__name__)
    if required and not value:
        raise InvalidArgument(f"{name} is missing")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:  # lone surrogates
        raise InvalidArgument(f"{name} is not valid Unicode") from error
    if size > limits.MAX_NAME_BYTES:
        raise InvalidArgument(f"{name} is too long", bytes=size, limit=limits.MAX_NAME_BYTES)
    if not value.isprintable():  # names are shown: in logs, tables and pages
        raise InvalidArgument(f"{name} has characters that cannot be shown", value=ascii(value))


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be an integer", got=type(value).__name__)
    if not least <= value <= most:
        raise InvalidArgument(f"{name} is out of range", value=value, least=least, most=most)
