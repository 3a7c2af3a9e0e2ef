"""The namespace of blocks in the caches of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.core.keys import NamespaceKeyMask
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NamespaceId

CACHE_LAYOUT = "engine-cache"


def cache_spec(spec: CacheSpec) -> CacheSpec:
    """Return the namespace in which engines publish the blocks of their caches.

    Args:
        spec: the namespace of the store whose chain makes the keys.
    """
    return replace(spec, layout=CACHE_LAYOUT, salt=spec.namespace)


def cache_keys(spec: CacheSpec, keys: Sequence[BlockKey]) -> tuple[NamespaceId, bytes]:
    """Return the namespace of the caches, and packed keys of the same blocks in it.

    Args:
        spec: namespace of ``keys``.
        keys: keys of the store.
    """
    cache = cache_spec(spec).namespace
    return cache, NamespaceKeyMask(spec.namespace, cache).keys(keys)
