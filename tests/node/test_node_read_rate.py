"""The read rate of volumes: measured once, on blocks that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockShape, StoreOutcome
from kvstore.node.durability import read_rate
from kvstore.node.durability.read_rate import ReadRate
from kvstore.node.durability.volume_checks import ENDED, VolumeChecks
from kvstore.testing.faulty_volume import VolumeFault, VolumeOperation
from support.node_harness import MIB, NodeHarness
from support.wait import wait_until

SHAPE = BlockShape(2, 32768)
BLOCKS = 32


class Node(NodeHarness):
    """A node with two volumes that may fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, volumes=[8 * MIB] * 2, faulty=[0, 1], shapes=[SHAPE], arena_bytes=8 * MIB, clock=MonotonicClock()
        )

    def fill(self) -> None:
        """Write one chain to each volume: write-back picks the one with more free space."""
        for chain in range(2):
            assert self.store(chain, 0, BLOCKS) == [StoreOutcome.STORED] * BLOCKS
            self.write_back(BLOCKS)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(read_rate, "LEAST_BYTES", 1 << 20)
    made = Node(tmp_path)
    yield made
    made.close()


def test_read_rate_empty_volumes_are_not_measured(node: Node) -> None:
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    assert not rate.measure_if_due()
    assert rate.bytes_per_s is None


def test_read_rate_full_volumes_are_measured_once(node: Node) -> None:
    node.fill()
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    assert rate.measure_if_due()
    each = [rate.of(node_volume) for node_volume in node.volumes]
    assert all(one is not None and one > 0 for one in each)
    assert rate.bytes_per_s == pytest.approx(sum(one for one in each if one is not None))
    assert not rate.measure_if_due()
    assert all(block.pins == 0 for block in node.table.snapshot())


def test_read_rate_without_direct_io_is_unknown(node: Node) -> None:
    node.fill()
    rate = ReadRate(node.table, node.counters, node.clock, direct=False)
    assert not rate.measure_if_due()
    assert rate.bytes_per_s is None


def test_read_rate_failing_volume_leaves_it_unknown(node: Node) -> None:
    node.fill()
    node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.READ)
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    rate.measure_if_due()
    assert rate.bytes_per_s is None
    assert node.counters.get("node_read_rate_failed_total") == 1
    assert all(block.pins == 0 for block in node.table.snapshot())


def test_read_rate_hung_volume_ends_with_its_stall(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rate, "GIVE_UP_S", 60.0)
    node.fill()
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    rate = ReadRate(node.table, node.counters, node.clock, direct=True)
    rate.measure_if_due()
    assert rate.bytes_per_s is None
    assert all(node_volume.guard.stalled for node_volume in node.volumes), "the reads are guarded"
    assert node.counters.get("node_read_rate_failed_total") == 1
    assert all(block.pins == 0 for block in node.table.snapshot())
    node.faults.release_hangs()


def test_check_without_a_bound_follows_the_read_rate(node: Node) -> None:
    node.fill()
    checks = VolumeChecks(node.table, node.counters, node.clock, lambda _node_volume: 7e9)
    check = checks.begin(node.volumes[0], b"o" * 16, 0)
    assert check.bytes_per_s == 700_000_000
    wait_until(lambda: check.state in ENDED)
    assert (check.good, check.bad) == (BLOCKS, 0)
    checks.close()
