"""What must hold in a block table between two decisions. For tests, which ask after everything they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.node.state.model import Block
    from kvstore.node.state.slot_map import PlaceMap
    from kvstore.node.table import BlockTable
    from kvstore.tiers.contract import Slot


def check_invariants(table: BlockTable) -> None:
    """Asserts all of it. The caller holds the table's lock."""
    slots: set[int] = set()
    for key, block in table._blocks.items():
        assert block.key == key
        assert block.dram is not None or block.nvme is not None, "a block without a replica"
        assert block.pins >= 0, "negative pins"
        assert block.checksums or None in (block.dram, block.nvme), "a block in both tiers that has lost its checksums"
        assert key not in table._preparing, "held and being written"
        if block.dram is not None:
            assert block.dram.offset not in slots, "one slot, two blocks"
            slots.add(block.dram.offset)
    for prepared in set(map(id, table._preparing.values())):
        store = next(one for one in table._preparing.values() if id(one) == prepared)
        for slot in store.slots.values():
            assert slot.offset not in slots, "a slot both held and being written"
            slots.add(slot.offset)
    assert len(table._dram_policy) == sum(block.dram is not None for block in table._blocks.values())
    for key, vigils in table._vigils.items():
        held = table._blocks.get(key)
        for vigil in vigils:
            assert key in vigil.missing, "a vigil that nobody keeps"
            assert held is None or held.dram is None or held.domain is not vigil.domain, "a vigil for what is there"
    resident_blocks = {block.dram: block for block in table._blocks.values() if block.dram is not None}
    _check_places(table._arena.room.by_place, resident_blocks)
    for home in table.homes:
        mine = (block for block in table._blocks.values() if block.nvme_home is home)
        durable = {place: block for block in mine if (place := block.nvme) is not None}
        _check_places(table._durable.by_place(home), durable)
        assert durable.keys().isdisjoint(home.outdated.slots()), "a slot that the catalog names twice"
        assert all(block.nvme_home is home for block in home.aside.values()), "aside, and not there"
    assert len(table._durable) == sum(block.nvme_home is not None for block in table._blocks.values())
    resident = Counter(block.domain for block in table._blocks.values() if block.dram is not None)
    assert {domain: blocks for domain, blocks in table._arena.room.held.items() if blocks} == resident, "blocks miscounted"
    for home in table.homes:
        durable_blocks = Counter(block.domain for block in table._blocks.values() if block.nvme_home is home)
        assert {domain: blocks for domain, blocks in table._durable.held_on(home).items() if blocks} == durable_blocks
    parting = Counter(block.domain for block in table._blocks.values() if block.leaving)
    for home in table.homes:
        for domain in table._durable.held_on(home):
            assert domain.parting == parting[domain], "blocks on their way out miscounted"
    for block in table._blocks.values():
        for order in (*block.domain.dram_orders, *block.domain.nvme_orders):
            assert len(order.policy) == len(order.keys), "an order that does not know what it holds"


def _check_places(places: PlaceMap, blocks: Mapping[Slot, Block]) -> None:
    """Asserts that a volume's blocks are known by where they lie, and nothing else is."""
    assert sorted(block.key for block in places) == sorted(block.key for block in blocks.values()), "blocks misplaced"
    assert all(places.get(slot) is block for slot, block in blocks.items()), "a block that is not where it lies"
