"""Model of a prefix index in plain dictionaries, and chains for its tests."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.contract import PrefixHit, VolumeEpoch

Place = tuple[NamespaceId, int]
"""Namespace and depth of a key."""


@dataclass(frozen=True)
class Chain:
    """Keys of one request. Paths with a common prefix have the same leading keys."""

    namespace: NamespaceId
    keys: tuple[BlockKey, ...]

    @staticmethod
    def of(namespace: NamespaceId, path: Sequence[object]) -> Chain:
        """Make one key per element of the path: a hash of all elements up to it."""
        keys: list[BlockKey] = []
        previous: bytes = namespace
        for element in path:
            previous = hashlib.sha256(previous + repr(element).encode()).digest()[:16]
            keys.append(BlockKey(previous))
        return Chain(namespace, tuple(keys))

    @property
    def packed(self) -> bytes:
        """All keys, concatenated."""
        return b"".join(self.keys)

    def run(self, start: int, end: int) -> BlockRun:
        """The run of blocks ``[start, end)``."""
        return BlockRun(self.namespace, self.keys[start - 1] if start else None, start, self.keys[start:end])


@dataclass
class IndexModel:
    """Blocks of each open volume epoch."""

    held: dict[VolumeEpoch, dict[BlockKey, Place]] = field(default_factory=dict)

    def publish(self, volume_epoch: VolumeEpoch, stored: Iterable[BlockRun], removed: Iterable[BlockKey]) -> None:
        """Apply a batch as ``PrefixIndex.publish`` does, if each key has one namespace and depth."""
        mine = self.held[volume_epoch]
        for key in removed:
            mine.pop(key, None)
        for run in stored:
            for depth, key in enumerate(run.keys, start=run.depth):
                mine[key] = (run.namespace, depth)

    def holds(self, volume_epoch: VolumeEpoch, chain: Chain, position: int) -> bool:
        """Whether the volume epoch holds the block at a position of the chain."""
        return self.held.get(volume_epoch, {}).get(chain.keys[position]) == (chain.namespace, position)

    def present(self, chain: Chain, position: int, visible: Container[VolumeEpoch]) -> bool:
        """Whether a visible, open volume epoch holds the block at a position of the chain."""
        return any(volume_epoch in visible and self.holds(volume_epoch, chain, position) for volume_epoch in self.held)

    def prefix(self, chain: Chain, visible: Container[VolumeEpoch]) -> int:
        """Number of leading blocks that are present."""
        return next((at for at in range(len(chain.keys)) if not self.present(chain, at, visible)), len(chain.keys))

    def prefix_closed(self, chain: Chain, visible: Container[VolumeEpoch]) -> bool:
        """Whether no block after the first missing block is present."""
        return not any(self.present(chain, at, visible) for at in range(self.prefix(chain, visible), len(chain.keys)))

    def all_keys(self) -> set[BlockKey]:
        """All keys that open volume epochs hold."""
        return {key for mine in self.held.values() for key in mine}

    def check(self, chain: Chain, visible: Container[VolumeEpoch], hit: PrefixHit) -> None:
        """Assert what a lookup guarantees for any contents."""
        prefix = self.prefix(chain, visible)
        assert hit.blocks >= prefix, "a hit includes all leading present blocks"
        if self.prefix_closed(chain, visible):
            assert hit.blocks == prefix, "without holes, the hit is exact"
        if hit.blocks < len(chain.keys):
            assert not self.present(chain, hit.blocks, visible), "a hit ends before a missing block"
        covered: set[int] = set()
        for run in hit.runs:
            assert run.volume_epoch in visible
            assert run.count >= 1
            assert 0 <= run.start <= run.start + run.count <= hit.blocks
            assert self.holds(run.volume_epoch, chain, run.start + run.count - 1), "a run is true at its last block"
            covered.update(range(run.start, run.start + run.count))
        assert covered == set(range(hit.blocks)), "the runs cover the hit"

    def check_true(self, chain: Chain, hit: PrefixHit) -> None:
        """Assert that each block of each run is held, which a lookup guarantees if no claim is stale."""
        for run in hit.runs:
            assert all(self.holds(run.volume_epoch, chain, at) for at in range(run.start, run.start + run.count))
