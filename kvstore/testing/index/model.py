"""What a prefix index must answer, as plain dictionaries; and chains to ask about."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core.types import BlockKey, BlockRun, NamespaceId
from kvstore.index.contract import Life, PrefixHit

Place = tuple[NamespaceId, int]
"""Where a key lies: namespace and depth."""


@dataclass(frozen=True)
class Chain:
    """Keys of one request. Equal ``path`` beginnings are equal keys, as with real ones."""

    namespace: NamespaceId
    keys: tuple[BlockKey, ...]

    @staticmethod
    def of(namespace: NamespaceId, path: Sequence[object]) -> Chain:
        """One key an element of the path, each a hash of all before it."""
        keys: list[BlockKey] = []
        previous: bytes = namespace
        for element in path:
            previous = hashlib.sha256(previous + repr(element).encode()).digest()[:16]
            keys.append(BlockKey(previous))
        return Chain(namespace, tuple(keys))

    @property
    def packed(self) -> bytes:
        """All keys, as a lookup takes them."""
        return b"".join(self.keys)

    def run(self, start: int, end: int) -> BlockRun:
        """Blocks ``[start, end)``, as a node publishes them."""
        return BlockRun(self.namespace, self.keys[start - 1] if start else None, start, self.keys[start:end])


@dataclass
class IndexModel:
    """Who holds what: the truth that an index is held against."""

    held: dict[Life, dict[BlockKey, Place]] = field(default_factory=dict)

    def publish(self, life: Life, stored: Iterable[BlockRun], removed: Iterable[BlockKey]) -> None:
        """As ``PrefixIndex.publish``, for keys that are at one place only."""
        mine = self.held[life]
        for key in removed:
            mine.pop(key, None)
        for run in stored:
            for depth, key in enumerate(run.keys, start=run.depth):
                mine[key] = (run.namespace, depth)

    def holds(self, life: Life, chain: Chain, position: int) -> bool:
        """Whether a life holds one block of a chain."""
        return self.held.get(life, {}).get(chain.keys[position]) == (chain.namespace, position)

    def present(self, chain: Chain, position: int, visible: Container[Life]) -> bool:
        """Whether any visible, open life holds it."""
        return any(life in visible and self.holds(life, chain, position) for life in self.held)

    def prefix(self, chain: Chain, visible: Container[Life]) -> int:
        """Blocks before the first that nobody holds."""
        return next((at for at in range(len(chain.keys)) if not self.present(chain, at, visible)), len(chain.keys))

    def prefix_closed(self, chain: Chain, visible: Container[Life]) -> bool:
        """Whether nothing is held behind the first block that nobody holds."""
        return not any(self.present(chain, at, visible) for at in range(self.prefix(chain, visible), len(chain.keys)))

    def all_keys(self) -> set[BlockKey]:
        """All keys that open lives hold."""
        return {key for mine in self.held.values() for key in mine}

    def check(self, chain: Chain, visible: Container[Life], hit: PrefixHit) -> None:
        """Asserts all that a lookup promises, whatever is held."""
        prefix = self.prefix(chain, visible)
        assert hit.blocks >= prefix, "a block that is held ends no hit"
        if self.prefix_closed(chain, visible):
            assert hit.blocks == prefix, "without holes, the hit is exact"
        if hit.blocks < len(chain.keys):
            assert not self.present(chain, hit.blocks, visible), "a hit ends where nobody holds the next block"
        covered: set[int] = set()
        for run in hit.runs:
            assert run.life in visible
            assert run.count >= 1
            assert 0 <= run.start <= run.start + run.count <= hit.blocks
            assert self.holds(run.life, chain, run.start + run.count - 1), "a run is true at its last block"
            covered.update(range(run.start, run.start + run.count))
        assert covered == set(range(hit.blocks)), "the runs cover the hit"

    def check_true(self, chain: Chain, hit: PrefixHit) -> None:
        """Asserts that every block of every run is held: what a lookup promises where no claim is stale."""
        for run in hit.runs:
            assert all(self.holds(run.life, chain, at) for at in range(run.start, run.start + run.count))
