"""Invariants of a block table between two decisions. Tests check them after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.node.eviction.space import SlotMap
from kvstore.node.state.block_states import DramState, VolumeReplica
from kvstore.node.state.model import Block
from kvstore.node.state.residency import Residency
from kvstore.tiers.contract import Slot


def validate(residency: Residency) -> None:
    """Assert all invariants. The caller holds the table's lock."""
    slots: set[int] = set()
    for key, block in residency.blocks.items():
        assert block.key == key
        assert block.dram is not None or block.nvme is not None, "a block without a replica"
        assert block.pins >= 0, "negative pins"
        assert (block.dram is None) == (block.dram_state is DramState.ABSENT), "a state in DRAM that is not its slot's"
        assert not block.filling, "filling, and in the table"
        on_volume = block.volume_replica not in (VolumeReplica.ABSENT, VolumeReplica.REMOTE)
        assert (block.nvme_volume is not None) == on_volume, "a replica that is not its slot's"
        assert not (block.writing and block.nvme_volume is not None), "written although on a volume"
        assert block.checksums or None in (block.dram, block.nvme), "a block in both tiers that has lost its checksums"
        assert key not in residency.preparing, "held and being written"
        if block.dram is not None:
            assert block.dram.offset not in slots, "one slot, two blocks"
            slots.add(block.dram.offset)
    for grant in {id(one): one for one in residency.preparing.values()}.values():
        for slot in grant.slots.values():
            assert slot.offset not in slots, "a slot both held and being written"
            slots.add(slot.offset)
    assert len(residency.dram_policy) == sum(block.dram is not None for block in residency.blocks.values())
    for key, waiters in residency.waiters.items():
        held = residency.blocks.get(key)
        for waiter in waiters:
            assert key in waiter.missing, "a waiter that nobody keeps"
            assert held is None or held.dram is None or held.namespace is not waiter.namespace, "a waiter for what is there"
    resident_blocks = {block.dram: block for block in residency.blocks.values() if block.dram is not None}
    _check_slots(residency.arena_evictor.reclaimer.by_slot, resident_blocks)
    for node_volume in residency.node_volumes:
        mine = (block for block in residency.blocks.values() if block.nvme_volume is node_volume)
        durable = {nvme: block for block in mine if (nvme := block.nvme) is not None}
        _check_slots(residency.volume_evictor.by_slot(node_volume), durable)
        assert all(block.nvme_volume is node_volume for block in node_volume.aside.values()), "aside, and not there"
    assert len(residency.volume_evictor) == sum(block.nvme_volume is not None for block in residency.blocks.values())
    resident = Counter(block.namespace for block in residency.blocks.values() if block.dram is not None)
    assert {namespace: blocks for namespace, blocks in residency.arena_evictor.held_blocks.items() if blocks} == resident, (
        "blocks miscounted"
    )
    for node_volume in residency.node_volumes:
        durable_blocks = Counter(block.namespace for block in residency.blocks.values() if block.nvme_volume is node_volume)
        assert {
            namespace: blocks for namespace, blocks in residency.volume_evictor.held_on(node_volume).items() if blocks
        } == durable_blocks
    parting = Counter(block.namespace for block in residency.blocks.values() if block.evicting)
    for node_volume in residency.node_volumes:
        for namespace in residency.volume_evictor.held_on(node_volume):
            assert namespace.evicting_blocks == parting[namespace], "blocks on their way out miscounted"
    for block in residency.blocks.values():
        for order in (*block.namespace.dram_orders, *block.namespace.nvme_orders):
            assert len(order.policy) == len(order.keys), "an order that does not know what it holds"


def _check_slots(by_slot: SlotMap, blocks: Mapping[Slot, Block]) -> None:
    """Assert that a volume's slot map contains exactly the volume's blocks."""
    assert sorted(block.key for block in by_slot) == sorted(block.key for block in blocks.values()), "blocks misplaced"
    assert all(by_slot.get(slot) is block for slot, block in blocks.items()), "a block that is not where it lies"
