"""What a block costs in memory, so that it stays so: of a table whose blocks lie on NVMe, and have left DRAM."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from kvstore.core.types import BlockKey, BlockShape, NamespaceId, VolumeId
from kvstore.lab.filled_table import BytelessVolume, FilledTable
from kvstore.node.state.eviction_reason import Leaving
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.state.slot_map import PlaceMap
from kvstore.tiers.contract import Slot
from kvstore.tiers.eviction.ghost_list import GhostList
from kvstore.tiers.nvme.slot_header import seal_of, slot_bytes

BOUND_BYTES = 430
"""Traced bytes per block; 389 when this was written, more right after a table has grown."""
GHOST_BOUND_BYTES = 34
SHAPE = BlockShape(32, 16)


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("tracing")
def test_durable_block_takes_few_bytes() -> None:
    table = FilledTable(layers=32)
    table.fill(6_144)  # more than DRAM holds
    before = traced_bytes()
    table.fill(20_480)
    assert (traced_bytes() - before) / 20_480 < BOUND_BYTES
    table.close()


@pytest.mark.usefixtures("tracing")
def test_ghost_takes_few_bytes() -> None:
    """The reuse-distance policy remembers four evicted keys per block that is here."""
    ghosts = GhostList()
    before = traced_bytes()
    for number in range(20_000):
        ghosts.add(BlockKey(number.to_bytes(16, "big")), number)
    assert (traced_bytes() - before) / 20_000 < GHOST_BOUND_BYTES


def test_block_keeps_every_field_apart() -> None:
    """All small fields lie in one integer: to change one leaves the others as they are."""
    namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE)
    checksums = bytes(range(256))
    block = Block(namespace, BlockKey(b"k" * 16), None, (1 << 24) - 1, checksums)
    block.dram = Slot(0, 4096, 1)
    node_volume = NodeVolume(BytelessVolume(VolumeId("n/nvme0"), 1 << 30))
    slot = Slot((1 << 46) - 4096, slot_bytes(SHAPE), (1 << 64) - 1)

    def state() -> dict[str, object]:
        flags = ("expendable", "elsewhere", "ours", "pending", "arriving", "passing", "leaving")
        return {name: getattr(block, name) for name in (*flags, "depth", "row", "disputed", "nvme", "nvme_volume", "durable")}

    expected = state()
    assert expected == dict.fromkeys(expected, False) | {
        "ours": True, "depth": (1 << 24) - 1, "row": 0, "disputed": 0, "nvme": None, "nvme_volume": None,
        "leaving": Leaving.STAYS,
    }  # fmt: skip
    for name, value in (("pending", True), ("expendable", True), ("ours", False), ("arriving", True), ("passing", True)):
        setattr(block, name, value)
        expected[name] = value
        assert state() == expected
    for count in range(1, 300):
        block.dispute()
        expected["disputed"] = min(count, 255)
        assert state() == expected
    for row in (1, (1 << 32) - 1, 7):
        block.row = expected["row"] = row
        assert state() == expected
    block.settle(node_volume, slot)
    expected |= {"nvme": slot, "nvme_volume": node_volume, "durable": True}
    assert state() == expected
    for why in (Leaving.FOR_QUOTA, Leaving.FOR_ROOM):
        block.leave(why)
        assert state() == expected | {"leaving": why}
        assert namespace.parting == 1
    assert block.stay() is Leaving.FOR_ROOM
    assert state() == expected
    assert block.stay() is Leaving.STAYS
    assert namespace.parting == 0
    assert block.record().seal is None
    block.dram = None
    block.forget_checksums()
    assert (block.record().checksums, block.record().seal) == (b"", seal_of(checksums))
    block.row = 0
    block.unsettle()
    assert state() == expected | {"nvme": None, "nvme_volume": None, "durable": False, "row": 0}


def test_block_in_dram_alone_keeps_its_checksums() -> None:
    block = Block(NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE), BlockKey(b"k" * 16), None, 0, b"sums")
    block.forget_checksums()
    assert block.checksums == b"sums"


def test_place_map_finds_blocks_of_several_sizes() -> None:
    namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE)
    places = PlaceMap()
    blocks = {
        Slot(start + number * size, size, 1): Block(namespace, BlockKey(b"%016d" % (start + number * size)), None, 0, b"")
        for start, size, count in ((0, 4096, 700), (3_000_000, 12_288, 300), (9_000_001 // 4096 * 4096, 8192, 5))
        for number in range(count)
    }
    for slot, block in blocks.items():
        assert places.get(slot) is None
        places.put(slot, block)
    assert {id(block) for block in places} == {id(block) for block in blocks.values()}
    for slot, block in blocks.items():
        assert places.get(slot) is block
        places.take(slot)
        assert places.get(slot) is None
        with pytest.raises(KeyError):
            places.take(slot)
    assert list(places) == []
