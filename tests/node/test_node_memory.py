"""Memory per block, so that it does not grow: of a table whose blocks are on NVMe and not in DRAM."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from kvstore.core.types import BlockKey, BlockShape, NamespaceId, VolumeId
from kvstore.lab.filled_table import BytelessVolume, FilledTable
from kvstore.node.eviction.space import SlotMap
from kvstore.node.state.block_states import VOLUME_SHIFT, DramState, VolumeReplica
from kvstore.node.state.model import STATE_MASK, Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.tiers.contract import Slot
from kvstore.tiers.eviction.policy_memory import GhostList
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
    """The reuse-distance policy remembers four evicted keys per held block."""
    ghosts = GhostList()
    before = traced_bytes()
    for number in range(20_000):
        ghosts.add(BlockKey(number.to_bytes(16, "big")), number)
    assert (traced_bytes() - before) / 20_000 < GHOST_BOUND_BYTES


def test_block_fields_are_kept_apart() -> None:
    """All small fields share one integer: a change of one leaves the others as they are."""
    namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE)
    checksums = bytes(range(256))
    block = Block(namespace, BlockKey(b"k" * 16), None, (1 << 24) - 1, checksums)
    block.dram = Slot(0, 4096, 1)
    node_volume = NodeVolume(BytelessVolume(VolumeId("n/nvme0"), 1 << 30))
    slot = Slot((1 << 46) - 4096, slot_bytes(SHAPE), (1 << 64) - 1)

    def state() -> dict[str, object]:
        names = ("dram_state", "volume_replica", "produced_here", "transient", "depth", "row", "nvme", "nvme_volume")
        return {name: getattr(block, name) for name in names}

    expected = state()
    assert list(expected.values()) == [DramState.ABSENT, VolumeReplica.ABSENT, True, False, (1 << 24) - 1, 0, None, None]
    for name, value in (("transient", True), ("produced_here", False)):
        setattr(block, name, value)
        expected[name] = value
        assert state() == expected
    for row in (1, (1 << 32) - 1, 7):
        block.row = expected["row"] = row
        assert state() == expected
    for at, states in ((0, DramState), (VOLUME_SHIFT, VolumeReplica)):
        for new in (*states, states(0)):
            block.bits = block.bits & ~(STATE_MASK << at) | new << at
            assert state() == expected | {"dram_state" if at == 0 else "volume_replica": new}
    block.put_on(node_volume, slot)
    expected |= {"nvme": slot, "nvme_volume": node_volume}
    assert state() == expected
    assert block.durable
    assert block.record().seal is None
    block.dram = None
    block.forget_checksums()
    assert (block.record().checksums, block.record().seal) == (b"", seal_of(checksums))
    block.take_off()
    assert state() == expected | {"nvme": None, "nvme_volume": None}


def test_block_in_dram_alone_keeps_its_checksums() -> None:
    block = Block(NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE), BlockKey(b"k" * 16), None, 0, b"sums")
    block.forget_checksums()
    assert block.checksums == b"sums"


def test_place_map_finds_blocks_of_several_sizes() -> None:
    namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE)
    by_slot = SlotMap()
    blocks = {
        Slot(start + number * size, size, 1): Block(namespace, BlockKey(b"%016d" % (start + number * size)), None, 0, b"")
        for start, size, count in ((0, 4096, 700), (3_000_000, 12_288, 300), (9_000_001 // 4096 * 4096, 8192, 5))
        for number in range(count)
    }
    for slot, block in blocks.items():
        assert by_slot.get(slot) is None
        by_slot.put(slot, block)
    assert {id(block) for block in by_slot} == {id(block) for block in blocks.values()}
    for slot, block in blocks.items():
        assert by_slot.get(slot) is block
        by_slot.take(slot)
        assert by_slot.get(slot) is None
        with pytest.raises(KeyError):
            by_slot.take(slot)
    assert list(by_slot) == []
