"""Orders of eviction that some namespaces' blocks follow in addition to the common one. Guarded by the table's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.tiers.contract import EvictionPolicy, Slot
from kvstore.tiers.eviction.policy import LruPolicy


class Evictable(Protocol):
    """A block as an order needs it."""

    key: BlockKey
    parent: BlockKey | None
    dram: Slot | None

    @property
    def nvme(self) -> Slot | None:
        """Its slot on a durable volume."""


class EvictionOrder:
    """Some namespaces' blocks in one tier, coldest first."""

    __slots__ = ("entering", "keys", "of_kept", "policy")

    def __init__(self, policy: EvictionPolicy, *, of_kept: bool = False) -> None:
        self.policy = policy
        self.of_kept = of_kept
        """Whether it is the order of a kept namespace, which ignores that the namespace is kept."""
        self.keys: set[BlockKey] = set()
        self.entering = 0
        """Namespaces whose earlier blocks are still being inserted. Nothing is evicted until then, as a parent may look like a
        leaf."""

    def insert(self, block: Evictable) -> None:
        """Insert a block that was added to the tier; no effect if it is known."""
        if block.key not in self.keys:
            self.keys.add(block.key)
            self.policy.insert(block.key, block.parent)

    def remove(self, block: Evictable) -> None:
        """Remove a block that is about to leave the tier."""
        self.keys.discard(block.key)
        self.policy.remove(block.key)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were used."""
        self.policy.touch(keys)


class TtlOrder(EvictionOrder):
    """A namespace's blocks in any tier, by their last use.

    Args:
        clock: time.
        ttl_s: how long a block may stay unused.
    """

    __slots__ = ("_clock", "ttl_s", "used_s")

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        super().__init__(LruPolicy())
        self._clock = clock
        self.ttl_s = ttl_s
        self.used_s: dict[BlockKey, float] = {}

    def insert(self, block: Evictable) -> None:
        """Insert a block that was added to a tier."""
        if block.key not in self.keys:
            super().insert(block)
            self.used_s[block.key] = self._clock.now_s()

    def remove(self, block: Evictable) -> None:
        """Remove a block that is about to leave its last tier."""
        if block.dram is None or block.nvme is None:
            super().remove(block)
            self.used_s.pop(block.key, None)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were used."""
        super().touch(keys)
        now_s = self._clock.now_s()
        self.used_s.update((key, now_s) for key in keys if key in self.keys)
