"""The published blocks of a cache, as the node's publisher reads them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvclient.engine_cache.tracker import CacheChanges, CacheSpace, Place
from kvstore.core.keys import NamespaceKeyMask
from kvstore.core.types import BlockKey, NamespaceId, VolumeId, unpack_keys
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.tiers.contract import VolumeUsage


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A block with its keys in the namespace of caches; see ``ChainedBlock``."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    namespace_id: NamespaceId


class CacheVolume:
    """Device memory of an engine's KV cache.

    Args:
        volume_id: its id.
        capacity_bytes: bytes of its pages.
        block_bytes: bytes of a block, in all layers and shards.
    """

    def __init__(self, volume_id: VolumeId, capacity_bytes: int, block_bytes: int) -> None:
        self.volume_id = volume_id
        self.capacity_bytes = capacity_bytes
        self._block_bytes = block_bytes
        self.blocks = 0

    def usage(self) -> VolumeUsage:
        """Return capacity, and bytes and number of the published blocks."""
        return VolumeUsage(self.capacity_bytes, self.blocks * self._block_bytes, self.blocks)


_Fields = tuple[BlockKey, BlockKey | None, int, NamespaceId]
"""Fields of a ``PublishedBlock``. A plain tuple, for the reason that ``tracker`` gives."""


class CacheTable:
    """Implements ``PublishedBlocks``. One thread changes it.

    Args:
        volume: the volume.
        log: receives the changes.
    """

    def __init__(self, volume: CacheVolume, log: ReplicaChangeLog) -> None:
        self.memory_volume = volume
        self.node_volumes: Sequence[NodeVolume] = ()
        self._log = log
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, _Fields] = {}
        """By key in the store."""
        self._waiting: dict[BlockKey, _Fields | None] = {}

    def held_by(self, volume: VolumeId) -> Sequence[PublishedBlock]:
        """Return all published blocks."""
        with self._lock:
            fields = list(self._blocks.values()) if volume == self.memory_volume.volume_id else []
        return [PublishedBlock(*one) for one in fields]

    def merge(self, changes: CacheChanges) -> None:
        """Add changes to those that wait. A block that was held for less time than it waited is not published."""
        published = _published(changes.space, {key: place for key, place in changes.blocks.items() if place is not None})
        for key, place in changes.blocks.items():
            if (key in self._blocks) == (place is not None):
                self._waiting.pop(key, None)
            else:
                self._waiting[key] = published.get(key)

    def publish(self, most: int) -> tuple[int, int]:
        """Publish the oldest changes that wait, at most ``most``. Returns the numbers of added and removed blocks."""
        changes = [(key, self._waiting.pop(key)) for key in list(islice(self._waiting, most))]
        added = 0
        with self._lock:
            for key, fields in changes:
                if fields is None:
                    self._log.removed(self.memory_volume.volume_id, self._blocks.pop(key)[0])
                else:
                    self._blocks[key] = fields
                    self._log.stored(self.memory_volume.volume_id, PublishedBlock(*fields))
                    added += 1
            self.memory_volume.blocks = len(self._blocks)
        return added, len(changes) - added


def _published(space: CacheSpace, places: Mapping[BlockKey, Place]) -> dict[BlockKey, _Fields]:
    """Return the fields of blocks in the namespace of caches, by key in the store."""
    mask = NamespaceKeyMask(space.chain, space.namespace)
    keys = unpack_keys(mask.keys(list(places)))
    parents = unpack_keys(mask.keys([parent or key for key, (parent, _) in places.items()]))
    return {
        key: (masked, None if parent is None else masked_parent, depth, space.namespace)
        for (key, (parent, depth)), masked, masked_parent in zip(places.items(), keys, parents, strict=True)
    }
