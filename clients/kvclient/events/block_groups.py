"""Blocks that several namespaces hold together: one part in each KV cache group and shard. Pure.

A block of an engine is usable if every namespace of the engine holds its part. The keys of the parts differ only by their
namespaces: ``key ^ namespace`` is the same for all of them, and names the whole block here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NewType

from kvclient.events.mirror import BlockMirror, MirroredVolume
from kvstore.core.types import KEY_BYTES, BlockKey, NamespaceId

GroupBlockId = NewType("GroupBlockId", bytes)
"""``key ^ namespace`` of each part of one block."""


def xor(left: bytes, right: bytes) -> bytes:
    """Return the XOR of two keys."""
    return (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).to_bytes(KEY_BYTES, "big")


class BlockGroup:
    """The namespaces that hold the parts of the same blocks.

    Args:
        namespaces: at least one.
    """

    def __init__(self, namespaces: Sequence[NamespaceId]) -> None:
        self.namespaces = tuple(dict.fromkeys(namespaces))
        self._masks = {namespace: int.from_bytes(namespace, "big") for namespace in self.namespaces}

    def id_in(self, namespace: NamespaceId, key: BlockKey) -> GroupBlockId | None:
        """Return the block of a key in a namespace; None: not a namespace of this group."""
        mask = self._masks.get(namespace)
        if mask is None:
            return None
        return GroupBlockId((int.from_bytes(key, "big") ^ mask).to_bytes(KEY_BYTES, "big"))

    def ids_of(self, key: BlockKey) -> Iterator[GroupBlockId]:
        """Yield the blocks that a key of an unknown namespace may belong to."""
        number = int.from_bytes(key, "big")
        for mask in self._masks.values():
            yield GroupBlockId((number ^ mask).to_bytes(KEY_BYTES, "big"))

    def keys(self, block: GroupBlockId) -> Iterator[BlockKey]:
        """Yield the keys of the parts of a block."""
        number = int.from_bytes(block, "big")
        for mask in self._masks.values():
            yield BlockKey((number ^ mask).to_bytes(KEY_BYTES, "big"))

    def held_tiers(
        self, mirror: BlockMirror, block: GroupBlockId, accept: Callable[[MirroredVolume], bool] = lambda _volume: True
    ) -> int:
        """Return the tiers that hold a block, as bits; 0: a part is missing, or no volume that can be read has it.

        A tier holds a block if every part is in this tier or in one nearer to the GPU, and at least one part is in this tier. So
        a block whose parts are in different tiers is in the slowest of them.
        """
        every, some = ~0, 0
        for key in self.keys(block):
            bits = 0
            for volume in mirror.replicas(key):
                if volume.served and accept(volume):
                    bits |= 1 << volume.tier
            if not bits:
                return 0
            every &= ~((bits & -bits) - 1)  # the nearest tier of this part, and all slower ones
            some |= bits
        return every & some
