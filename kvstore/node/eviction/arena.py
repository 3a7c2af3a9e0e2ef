"""Eviction from a node's arena. Called under the table's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.eviction.space import SpaceReclaimer
from kvstore.node.state.block_states import DramState
from kvstore.node.state.model import IN_TRANSFER, Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Evictable, EvictionPolicy, MappedVolume, Slot

CASCADE_AT_ONCE = 256
"""Maximum number of dirty blocks that one search for space sends to write-back."""


_CLEAN: Final = int(DramState.CLEAN)
_LEAVING_MASK: Final = IN_TRANSFER | _CLEAN
"""Bits that decide whether a block may be evicted without a write: of these, exactly CLEAN must be set."""


class ArenaEvictor:
    """The order of eviction from the arena.

    Args:
        dram: the arena.
        blocks: the table's, by key.
        policy: the order.
        idle: whether a block is neither pinned nor in transfer.
        node_volumes: the node's durable volumes; the caller changes the list in place.
    """

    def __init__(
        self,
        dram: MappedVolume,
        blocks: Mapping[BlockKey, Block],
        policy: EvictionPolicy,
        idle: Callable[[Block], bool],
        node_volumes: Sequence[NodeVolume],
    ) -> None:
        self._blocks = blocks
        self._policy = policy
        self._idle = idle
        self._node_volumes = node_volumes
        self.version = 0
        """Grows when iterators of the order become invalid: with insertions, removals and searches, but not with uses."""
        self.reclaimer = SpaceReclaimer(dram, blocks, policy)

    @property
    def is_last_tier(self) -> bool:
        """Whether blocks that hints protect stay in the arena: the node has no volume now."""
        return not self._node_volumes

    def insert(self, block: Block, slot: Slot) -> None:
        """Insert a block that was added to DRAM."""
        self.version += 1
        self.reclaimer.insert(block, slot)
        self._policy.insert(block.key, block.parent)
        for order in block.namespace.dram_orders:
            order.insert(block)

    def remove(self, block: Block, slot: Slot) -> None:
        """Remove a block that was evicted from DRAM."""
        self.version += 1
        self.reclaimer.remove(block, slot)
        self._policy.remove(block.key)
        for order in block.namespace.dram_orders:
            order.remove(block)

    def touch(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Note that blocks of a namespace were used in DRAM."""
        self._policy.touch(keys)
        for order in namespace.dram_orders:
            order.touch(keys)

    def restore(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Make blocks evictable again whose namespace is no longer kept, or that no hint protects any more."""
        self.version += 1
        self._policy.restore(keys)
        for order in namespace.dram_orders:
            order.policy.restore(keys)

    def demote(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Make blocks of a namespace the first ones to be evicted, until their next use."""
        self.version += 1
        self._policy.demote(keys)
        for order in namespace.dram_orders:
            order.policy.demote(keys)

    @property
    def held_blocks(self) -> dict[NodeNamespace, int]:
        """Number of blocks of each namespace in DRAM."""
        return self.reclaimer.held

    def held(self, namespace: NodeNamespace) -> int:
        """Return the number of blocks of a namespace in DRAM."""
        return self.reclaimer.held.get(namespace, 0)

    def evictable_keys(self) -> Iterator[BlockKey]:
        """Iterate over the keys of evictable blocks, coldest first, children before parents.

        Omitted are blocks that an earlier search skipped: those of kept namespaces, and those that hints protect.
        """
        self.version += 1
        return self._policy.coldest(lambda _key: True)

    def coldest(self) -> Iterator[tuple[BlockKey, Slot]]:
        """Clean idle blocks with their slots, coldest first."""
        blocks = self._blocks
        self.version += 1

        def may_leave(key: BlockKey) -> Evictable:
            block = blocks[key]
            return None if block.namespace.kept else not block.pins and block.bits & _LEAVING_MASK == _CLEAN

        for key in self._policy.coldest(may_leave):
            slot = blocks[key].dram
            assert slot is not None
            yield key, slot

    def victims(self, shape: BlockShape, count: int) -> tuple[list[Block], list[Block]]:
        """Blocks to evict for ``count`` slots or some of them (none: no space can be freed), and dirty blocks to write back.

        The dirty ones are colder than these, or in the same span: at most ``CASCADE_AT_ONCE``.
        """
        blocks, idle, is_last_tier = self._blocks, self._idle, self.is_last_tier
        self.version += 1
        met_dirty: dict[BlockKey, Block] = {}

        def may_leave(key: BlockKey) -> Evictable:
            block = blocks[key]
            if block.namespace.kept or (is_last_tier and key in block.namespace.hinted):
                return None
            if not idle(block):
                return False
            if not block.clean and len(met_dirty) < CASCADE_AT_ONCE:
                met_dirty[key] = block
            return block.clean

        order = (blocks[key] for key in self._policy.coldest(may_leave))
        leaving = self.reclaimer.victims(shape, (count,), order, lambda block: block.dram, may_leave)
        if not leaving and self.reclaimer.is_shut_out(shape):
            leaving = self.reclaimer.coldest_protected_span(shape, lambda block: idle(block) and block.clean)
        return leaving, list(met_dirty.values())
