"""Who leaves a node's arena, so that others may come. Everything here is called under the table's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.eviction.space import SpaceReclaimer
from kvstore.node.state.block_states import DramState
from kvstore.node.state.model import IN_TRANSFER, Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import EvictionPolicy, MappedVolume, Slot

CASCADE_AT_ONCE = 256
"""Blocks that one search for room sends to write-behind at most."""


_CLEAN: Final = int(DramState.CLEAN)
_LEAVING_MASK: Final = IN_TRANSFER | _CLEAN
"""Bits that say whether a block may leave as it is."""


class ArenaEvictor:
    """The order in which blocks leave the arena.

    Args:
        dram: the arena.
        blocks: the table's, by key.
        policy: the order.
        idle: whether nobody uses a block.
    """

    def __init__(
        self, dram: MappedVolume, blocks: Mapping[BlockKey, Block], policy: EvictionPolicy, idle: Callable[[Block], bool]
    ) -> None:
        self._blocks = blocks
        self._policy = policy
        self._idle = idle
        self.version = 0
        """Changes whenever the order does, except by use."""
        self.room = SpaceReclaimer(dram, blocks, policy)

    def insert(self, block: Block, slot: Slot) -> None:
        """A block has come."""
        self.version += 1
        self.room.insert(block, slot)
        self._policy.insert(block.key, block.parent)
        for order in block.namespace.dram_orders:
            order.insert(block)

    def remove(self, block: Block, slot: Slot) -> None:
        """A block has left."""
        self.version += 1
        self.room.remove(block, slot)
        self._policy.remove(block.key)
        for order in block.namespace.dram_orders:
            order.remove(block)

    def touch(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Blocks of a namespace were used in DRAM."""
        self._policy.touch(keys)
        for order in namespace.dram_orders:
            order.touch(keys)

    def restore(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Blocks of a namespace that is not pinned any more may leave again."""
        self._policy.restore(keys)
        for order in namespace.dram_orders:
            order.policy.restore(keys)

    def every(self) -> Iterator[BlockKey]:
        """All keys, coldest first, children before parents; those of pinned namespaces may be left out."""
        self.version += 1
        return self._policy.coldest(lambda _key: True)

    def coldest(self) -> Iterator[tuple[BlockKey, Slot]]:
        """What may leave as it is, with its slots, coldest first."""
        blocks = self._blocks
        self.version += 1

        def may_leave(key: BlockKey) -> bool | None:
            block = blocks[key]
            return None if block.namespace.pinned else not block.pins and block.bits & _LEAVING_MASK == _CLEAN

        for key in self._policy.coldest(may_leave):
            slot = blocks[key].dram
            assert slot is not None
            yield key, slot

    def victims(self, shape: BlockShape, count: int) -> tuple[list[Block], list[Block]]:
        """Those that leave for ``count`` slots or some of them (none: no room can be made), and those to be written behind.

        The latter are colder, or in the way, and lie in DRAM only: ``CASCADE_AT_ONCE`` of them at most.
        """
        blocks, idle = self._blocks, self._idle
        self.version += 1
        passed: dict[BlockKey, Block] = {}

        def may_leave(key: BlockKey) -> bool | None:
            block = blocks[key]
            if block.namespace.pinned:
                return None
            if not idle(block):
                return False
            if not block.clean and len(passed) < CASCADE_AT_ONCE:
                passed[key] = block
            return block.clean

        order = (blocks[key] for key in self._policy.coldest(may_leave))
        leaving = self.room.victims(shape, (count,), order, lambda block: block.dram, (may_leave,))
        if not leaving:
            leaving = self.room.among_pins(shape, lambda block: block.dram, lambda key: idle(blocks[key]) and blocks[key].clean)
        return leaving, list(passed.values())
