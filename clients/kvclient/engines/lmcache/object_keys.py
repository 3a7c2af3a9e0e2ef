"""The store's keys of LMCache's objects. Each is the head of a separate chain: LMCache names no preceding object."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from kvstore.core.types import KEY_BYTES, BlockKey, NamespaceId

MIN_HASH_BYTES = 16
"""LMCache's shorter hashes may be equal for different tokens: their objects are neither stored nor loaded."""
_TAG = b"kvstore/lmcache/1"


class KeyParts(Protocol):
    """The parts of LMCache's ``ObjectKey``."""

    @property
    def chunk_hash(self) -> bytes:
        """Hash of the tokens up to the object's end."""

    @property
    def model_name(self) -> str:
        """Name of the model."""

    @property
    def kv_rank(self) -> int:
        """Parallel sizes and rank."""

    @property
    def object_group_id(self) -> int:
        """The object group."""

    @property
    def cache_salt(self) -> str:
        """Separates users."""


def store_key(namespace: NamespaceId, key: KeyParts) -> BlockKey:
    """Return the store's key: SHA-256 over the namespace and all parts of LMCache's key, with their lengths."""
    salt = key.cache_salt.encode()
    parts = struct.pack("<qqII", key.kv_rank, key.object_group_id, len(key.chunk_hash), len(salt))
    whole = hashlib.sha256(b"".join((_TAG, namespace, parts, key.chunk_hash, salt))).digest()
    return BlockKey(whole[:KEY_BYTES])


def is_strong(key: KeyParts) -> bool:
    """Whether different tokens have different hashes."""
    return isinstance(key.chunk_hash, bytes) and len(key.chunk_hash) >= MIN_HASH_BYTES
