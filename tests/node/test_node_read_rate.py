"""What volumes read at most: measured on blocks that they hold, once, and not on what was never written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, VolumeId
from kvstore.node.durability import read_rate
from kvstore.node.durability.read_rate import ReadRate
from kvstore.node.durability.scrub import ENDED, VolumeChecks
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.faulty_volume import FaultPlan, FaultyVolume, VolumeFault, VolumeOperation
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(2, 32768)
BLOCKS = 32


class Node:
    """Two volumes, with the blocks of two chains on them."""

    def __init__(self, folder: Path) -> None:
        self.plan = FaultPlan()
        self.counters = Counters()
        self.clock = MonotonicClock()
        names = [VolumeId("n/nvme0"), VolumeId("n/nvme1")]
        slabs = [NvmeSlab.open(folder / name[2:], volume_id=name, capacity_bytes=8 << 20) for name in names]
        assert [list(slab.recover()) for slab in slabs] == [[], []]
        self.node_volumes = [NodeVolume(FaultyVolume(slab, self.plan)) for slab in slabs]
        log = ReplicaChangeLog([VolumeId("n/dram"), *names], self.counters, self.clock, keep=False)
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=8 << 20)
        self.table = BlockTable(
            self.arena, make_policy("lru"), self.node_volumes, log, self.counters, self.clock, writes_behind=True
        )  # fmt: skip
        self.target = LocalTarget(self.table, self.counters, self.clock)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)

    def fill(self) -> None:
        """Writes one chain to each volume: the target picks the one with the most room."""
        for chain in range(2):
            keys = tuple(BlockKey(hashlib.sha256(bytes([chain, depth])).digest()[:16]) for depth in range(BLOCKS))
            prepared = self.table.prepare(
                self.namespace, BlockRun(self.namespace.namespace_id, None, 0, keys), self.clock.now_s()
            )
            sums = []
            for key, slot in prepared.slots.items():
                payload = hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32)
                self.arena.view(slot, SHAPE.block_bytes)[:] = payload
                sums.append(layer_checksums(memoryview(payload), SHAPE))
            self.table.complete(prepared, list(prepared.slots), sums)
            self.target.persist(self.table.take_pending(BLOCKS, 1 << 30, 0.0), lambda: None)

    def close(self) -> None:
        self.arena.close()
        for node_volume in self.node_volumes:
            node_volume.volume.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(read_rate, "LEAST_BYTES", 1 << 20)
    return Node(tmp_path)


def test_read_rate_empty_volumes_are_not_measured(node: Node) -> None:
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    assert not rate.measure_if_due()
    assert rate.bytes_per_s is None
    node.close()


def test_read_rate_full_volumes_are_measured_once(node: Node) -> None:
    node.fill()
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    assert rate.measure_if_due()
    each = [rate.of(node_volume) for node_volume in node.node_volumes]
    assert all(one is not None and one > 0 for one in each)
    assert rate.bytes_per_s == pytest.approx(sum(one for one in each if one is not None))
    assert not rate.measure_if_due()
    assert all(block.pins == 0 for block in node.table.snapshot())
    node.close()


def test_read_rate_without_direct_io_is_unknown(node: Node) -> None:
    node.fill()
    rate = ReadRate(node.table, node.counters, node.clock, direct=False)
    assert not rate.measure_if_due()
    assert rate.bytes_per_s is None
    node.close()


def test_read_rate_failing_volume_leaves_it_unknown(node: Node) -> None:
    node.fill()
    node.plan.add(VolumeFault.IO_ERROR, operation=VolumeOperation.READ)
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    rate.measure_if_due()
    assert rate.bytes_per_s is None
    assert node.counters.get("node_read_rate_failed_total") == 1
    assert all(block.pins == 0 for block in node.table.snapshot())
    node.close()


def test_check_without_a_bound_follows_the_read_rate(node: Node) -> None:
    node.fill()
    checks = VolumeChecks(node.table, node.counters, node.clock, lambda _node_volume: 7e9)
    check = checks.begin(node.node_volumes[0], b"o" * 16, 0)
    assert check.bytes_per_s == 700_000_000
    while check.state not in ENDED:
        check.cancel.wait(0.01)
    assert (check.good, check.bad) == (BLOCKS, 0)
    checks.close()
    node.close()
