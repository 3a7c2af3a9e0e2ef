"""Eviction from a node's durable volumes. Called under the table's lock.

The blocks of a chain are spread over all volumes of a node, so that one load reads from all of them. Therefore one order covers
all volumes: children are evicted before their parents on any volume, so every block that stays can be found by lookups. To make
space on one volume, the coldest blocks are evicted until that volume has enough; colder blocks of other volumes are evicted with
them, which frees space there for the next batches. ``kvstore.node.eviction.space`` handles blocks of other sizes.

A volume that rejects changes (read-only, or backing off after an error) does not delay the others: its blocks are skipped and
left out of the order until it accepts changes again.

The policy's rows are kept in the blocks (``BlockRows``): a second dict of keys would double the memory of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, BlockShape
from kvstore.node.eviction.space import PLAN_LIMIT, SlotMap, SpaceReclaimer
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Evictable, EvictionPolicy, Rows, Slot


class BlockRows:
    """Rows of the policy, by key: see ``kvstore.tiers.contract.Rows``.

    A policy also knows keys that are not in the table (parents of blocks on volumes): a dict here has their rows. Guarded by the
    table's lock.

    Args:
        blocks: the table's, by key.
    """

    __slots__ = ("_blocks", "_of_absent")

    def __init__(self, blocks: Mapping[BlockKey, Block]) -> None:
        self._blocks = blocks
        self._of_absent: dict[BlockKey, int] = {}

    def get(self, key: BlockKey, default: int, /) -> int:
        """The row of a key, or ``default``."""
        block = self._blocks.get(key)
        if block is not None and block.row:
            return block.row
        return self._of_absent.get(key, default)

    def __setitem__(self, key: BlockKey, row: int, /) -> None:
        block = self._blocks.get(key)
        if block is None:
            self._of_absent[key] = row
        else:
            block.row = row

    def __delitem__(self, key: BlockKey, /) -> None:
        if self._of_absent.pop(key, None) is None:
            self._blocks[key].row = 0

    def keep(self, block: Block) -> None:
        """Keep the row of a block that leaves the table, if it has one."""
        if block.row:
            self._of_absent[block.key], block.row = block.row, 0


class VolumeEvictor:
    """The order of eviction from the durable volumes of one node.

    Args:
        blocks: the table's, by key.
        make_policy: makes the order; it keeps its rows in the given mapping.
        node_volumes: the volumes.
        clock: time.
    """

    def __init__(
        self,
        blocks: Mapping[BlockKey, Block],
        make_policy: Callable[[Rows], EvictionPolicy],
        node_volumes: Sequence[NodeVolume],
        clock: Clock,
    ) -> None:
        self._blocks = blocks
        self._rows = BlockRows(blocks)
        policy = self._policy = make_policy(self._rows)
        self._node_volumes = node_volumes
        self._clock = clock
        self._reclaimers = {id(node_volume): SpaceReclaimer(node_volume.volume, blocks, policy) for node_volume in node_volumes}

    def add_volume(self, node_volume: NodeVolume) -> None:
        """Prepare for blocks of another volume."""
        reclaimer = SpaceReclaimer(node_volume.volume, self._blocks, self._policy)
        self._reclaimers = {**self._reclaimers, id(node_volume): reclaimer}  # replaced: ``held`` reads it without the lock

    def remove_volume(self, node_volume: NodeVolume) -> None:
        """Forget a volume that holds no blocks."""
        self._reclaimers = {key: reclaimer for key, reclaimer in self._reclaimers.items() if key != id(node_volume)}

    def __len__(self) -> int:
        return len(self._policy) + sum(len(node_volume.aside) for node_volume in self._node_volumes)

    def insert(self, block: Block, node_volume: NodeVolume, slot: Slot) -> None:
        """Insert a block that was added to a slot of a volume."""
        self._reclaimers[id(node_volume)].insert(block, slot)
        self._policy.insert(block.key, block.parent)
        for order in block.namespace.nvme_orders:
            order.insert(block)

    def remove(self, block: Block, node_volume: NodeVolume) -> None:
        """Remove a block that was evicted from a volume."""
        slot = block.nvme
        if slot is not None:
            self._reclaimers[id(node_volume)].remove(block, slot)
        if node_volume.aside.pop(block.key, None) is None:
            self._policy.remove(block.key)
        for order in block.namespace.nvme_orders:
            order.remove(block)

    def on_left_table(self, block: Block) -> None:
        """Note that a block left the table. Blocks on volumes may still name it as their parent."""
        self._rows.keep(block)

    def touch(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Note that blocks of a namespace were used on their volumes."""
        self._policy.touch(keys)
        for order in namespace.nvme_orders:
            order.touch(keys)

    def restore(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Make blocks evictable again whose namespace is no longer kept, or that no hint protects any more."""
        self._policy.restore(keys)
        for order in namespace.nvme_orders:
            order.policy.restore(keys)

    def demote(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> None:
        """Make blocks of a namespace the first ones to be evicted, until their next use."""
        self._policy.demote(keys)
        for order in namespace.nvme_orders:
            order.policy.demote(keys)

    def children(self, key: BlockKey) -> int:
        """Number of a block's children on all volumes."""
        return self._policy.children(key)

    def held(self, namespace: NodeNamespace) -> int:
        """Number of blocks of a namespace on all volumes. Without the table's lock: perhaps slightly old."""
        return sum(reclaimer.held.get(namespace, 0) for reclaimer in self._reclaimers.values())

    def held_on(self, node_volume: NodeVolume) -> dict[NodeNamespace, int]:
        """Number of blocks of each namespace on one volume."""
        return self._reclaimers[id(node_volume)].held

    def by_slot(self, node_volume: NodeVolume) -> SlotMap:
        """The blocks of a volume by slot."""
        return self._reclaimers[id(node_volume)].by_slot

    def coldest(self, node_volume: NodeVolume, may_leave: Callable[[Block], bool]) -> Iterator[tuple[BlockKey, Slot]]:
        """Evictable blocks of one volume with their slots, coldest first, children before parents on the same volume."""
        self._take_back()
        blocks = self._blocks

        def leaves(key: BlockKey) -> Evictable:
            block = blocks[key]
            return None if block.namespace.kept else block.nvme_volume is not node_volume or may_leave(block)

        for key in self._policy.coldest(leaves):
            block = blocks[key]
            if block.nvme_volume is node_volume and block.nvme is not None:
                yield key, block.nvme

    def victims(
        self, node_volume: NodeVolume, shape: BlockShape, counts: Sequence[int], *may_leave: Callable[[Block], bool]
    ) -> list[Block]:
        """Return blocks to evict, from all volumes, for slots on one volume. Empty: no space can be freed.

        Args:
            node_volume: the volume.
            shape: of the new blocks.
            counts: numbers of slots, by preference: the first for which space can be freed.
            may_leave: rules, by preference: all counts are tried with the first rule before the next one.
        """
        self._take_back()
        fit = {id(each) for each in self._node_volumes if each.takes_changes(self._clock.now_s())} | {id(node_volume)}

        def slot_of(block: Block) -> Slot | None:
            return block.nvme if block.nvme_volume is node_volume else None

        def passing(rule: Callable[[Block], bool]) -> Callable[[BlockKey], Evictable]:
            def leaves(key: BlockKey) -> Evictable:
                block = self._blocks[key]
                if block.namespace.kept or key in block.namespace.hinted:
                    return None
                return id(block.nvme_volume) not in fit or rule(block)

            return leaves

        reclaimer = self._reclaimers[id(node_volume)]
        for rule in map(passing, may_leave):
            unfit: list[Block] = []
            order = (self._blocks[key] for key in self._policy.coldest(rule))
            met = _up_to_limit(order, lambda block: id(block.nvme_volume) in fit, slot_of, unfit)
            found = reclaimer.victims(shape, counts, met, slot_of, rule)
            unfit += (block for block in found if id(block.nvme_volume) not in fit)
            for block in unfit:
                if block.nvme_volume is not None:
                    self._policy.remove(block.key)
                    block.nvme_volume.aside[block.key] = block
            victims = [block for block in found if id(block.nvme_volume) in fit]
            if victims:
                return victims
        if not reclaimer.is_shut_out(shape):
            return []
        return reclaimer.coldest_protected_span(shape, lambda block: id(block.nvme_volume) in fit and may_leave[-1](block))

    def _take_back(self) -> None:
        """Insert skipped blocks again, as new ones, for volumes that accept changes again."""
        for node_volume in self._node_volumes:
            if node_volume.aside and node_volume.takes_changes(self._clock.now_s()):
                for block in node_volume.aside.values():
                    self._policy.insert(block.key, block.parent)
                node_volume.aside.clear()


def _up_to_limit(
    order: Iterator[Block], fit: Callable[[Block], bool], slot_of: Callable[[Block], Slot | None], unfit: list[Block]
) -> Iterator[Block]:
    """Yield evictable blocks. Blocks of volumes that reject changes go to ``unfit`` instead.

    The search ends after ``PLAN_LIMIT`` blocks on other volumes, or ``PLAN_LIMIT`` unfit blocks.
    """
    others = 0
    for block in order:
        if not fit(block):
            unfit.append(block)
        else:
            yield block
            others += slot_of(block) is None
        if max(others, len(unfit)) >= PLAN_LIMIT:
            return
