"""What the scheduler's half of the connector calls: the engine's block pool, and receivers of its decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvclient import BlockKey


class BlockPool(Protocol):
    """The methods of the engine's block pool that the connector calls. Blocks have ``block_id`` and ``ref_cnt``."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Increase the use count of blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Decrease the use count of blocks."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove blocks from the prefix cache; requests that use them keep them."""


class StoreObserver(Protocol):
    """Receives which blocks are stored, to announce them."""

    def planned(self, request: Any, first: int, keys: Sequence[BlockKey]) -> object:  # noqa: ANN401
        """Receive blocks of a request that will be stored, and return what ``stored`` receives."""

    def stored(self, plan: Any) -> None:  # noqa: ANN401
        """Receive that planned blocks were stored."""

    def found(self, request: Any, keys: Sequence[BlockKey]) -> None:  # noqa: ANN401
        """Receive the leading blocks of a request that the store holds."""


class CacheWatch(Protocol):
    """Receives which blocks the engine's own prefix cache may hold."""

    def bind_pool(self, pool: Any) -> None:  # noqa: ANN401
        """Receive the engine's block pool."""

    def computed(self, request: Any, first: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:  # noqa: ANN401
        """Receive consecutive blocks of a request. Returns how many of them the engine has hashed."""

    def step(self) -> None:
        """Check a part of the known blocks, once per step."""

    def abandon(self) -> None:
        """Forget all blocks, for good."""
