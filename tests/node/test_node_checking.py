"""Checks of a volume under a table: what they find, what they leave alone, and how they end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, StoreOutcome, VolumeId
from kvstore.node.durability.scrub import ENDED, Check, CheckState, VolumeChecks
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.eviction.on_demand import quarantine
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.faulty_volume import FaultPlan, FaultyVolume, VolumeFault, VolumeOperation
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(2, 2048)
BLOCKS = 12
FAST = 1 << 40
WAIT_S = 30.0


class Node:
    """One volume, with twelve blocks of a chain on it and in DRAM."""

    def __init__(self, folder: Path) -> None:
        self.plan = FaultPlan()
        self.counters = Counters()
        clock = MonotonicClock()
        slab = NvmeSlab.open(folder, volume_id=VolumeId("n/nvme0"), capacity_bytes=1 << 20, io_threads=1)
        assert list(slab.recover()) == []
        self.node_volume = NodeVolume(FaultyVolume(slab, self.plan))
        log = ReplicaChangeLog([VolumeId("n/dram"), slab.volume_id], self.counters, clock, keep=False)
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=1 << 20)
        self.table = BlockTable(
            self.arena, make_policy("lru"), [self.node_volume], log, self.counters, clock, writes_behind=True
        )  # fmt: skip
        self.target = LocalTarget(self.table, self.counters, clock)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
        self.keys = tuple(BlockKey(hashlib.sha256(bytes([depth])).digest()[:16]) for depth in range(BLOCKS))
        prepared = self.table.prepare(self.namespace, BlockRun(self.namespace.namespace_id, None, 0, self.keys), clock.now_s())
        sums = []
        for key, slot in prepared.slots.items():
            payload = hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32)
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload
            sums.append(layer_checksums(memoryview(payload), SHAPE))
        self.table.complete(prepared, list(prepared.slots), sums)
        self.write_behind()
        self.checks = VolumeChecks(self.table, self.counters, clock)

    def write_behind(self) -> None:
        while blocks := self.table.take_pending(BLOCKS, 1 << 20, 0.0):
            self.target.persist(blocks, lambda: None)

    def block(self, position: int) -> Block:
        return next(block for block in self.table.snapshot() if block.key == self.keys[position])

    def check(self, operation: bytes = b"o" * 16) -> Check:
        made = self.checks.begin(self.node_volume, operation, FAST)
        ended(made)
        return made

    def close(self) -> None:
        self.checks.close()
        self.table.validate()
        assert all(block.pins == 0 for block in self.table.snapshot()), "a check lets go of what it has read"
        self.table.close()
        self.node_volume.volume.close()
        self.arena.close()


def ended(check: Check) -> None:
    end_s = time.monotonic() + WAIT_S
    while check.state not in ENDED:
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "volume")
    yield made
    made.close()


def test_what_is_good_stays_as_it_is_and_is_not_used(node: Node) -> None:
    assert node.checks.last(node.node_volume) is None
    order = [block.key for block in node.table.nvme_victims(node.node_volume)]
    node.table.cancel_nvme_eviction([node.block(position) for position in range(BLOCKS)])
    found = node.check()
    assert (found.state, found.blocks, found.good, found.bad) == (CheckState.DONE, BLOCKS, BLOCKS, 0)
    assert found.checked_bytes == BLOCKS * SHAPE.block_bytes
    victims = node.table.nvme_victims(node.node_volume)
    node.table.cancel_nvme_eviction(victims)
    assert [block.key for block in victims] == order, "the order of eviction is what it was"


def test_what_is_bad_leaves_and_comes_back_from_dram(node: Node) -> None:
    """Position 3 lies in DRAM too, 11 does not."""
    cold = node.block(11)
    with node.table.residency.lock:
        node.table.residency.evict_dram(cold)
    node.plan.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.READ, keys=[node.keys[3], node.keys[11]], times=2)
    found = node.check()
    assert (found.good, found.bad, found.rewritten_blocks, found.unreadable) == (BLOCKS - 2, 2, 1, 0)
    assert node.counters.snapshot()["quarantined_blocks_total"] == node.node_volume.quarantined == 2
    assert node.keys[11] not in {block.key for block in node.table.snapshot()}, "it was nowhere else: a miss"
    node.write_behind()
    assert node.table.are_durable(node.keys) == [True] * 11 + [False]
    again = node.check(b"p" * 16)
    assert (again.blocks, again.good, again.bad) == (BLOCKS - 1, BLOCKS - 1, 0), "the new copy is the catalog's, and good"


def test_what_cannot_be_read_stays(node: Node) -> None:
    node.plan.add(VolumeFault.IO_ERROR, operation=VolumeOperation.READ, keys=[node.keys[5]], times=1)
    found = node.check()
    assert (found.state, found.good, found.unreadable, found.bad) == (CheckState.DONE, BLOCKS - 1, 1, 0)
    assert node.node_volume.quarantined == 0
    assert node.check(b"p" * 16).good == BLOCKS


def test_a_replica_that_proved_bad_is_not_taken_for_the_one_that_followed(node: Node) -> None:
    block = node.block(3)
    bad = block.nvme
    assert bad is not None
    quarantine(node.table, node.node_volume, block, bad, node.counters)
    node.table.requeue_writeback(node.namespace, [block.key])
    node.write_behind()
    assert block.nvme is not None
    assert block.nvme != bad
    quarantine(node.table, node.node_volume, block, bad, node.counters)
    assert block.nvme is not None, "another reader of the same bad slot came later"
    assert node.node_volume.quarantined == 1


def test_a_good_copy_that_is_written_while_a_bad_one_is_forgotten_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine brings the block again, and it is written behind, just as the catalog is to forget the bad one."""
    block = node.block(3)
    bad, commit = block.nvme, node.node_volume.volume.commit
    assert bad is not None
    with node.table.residency.lock:
        node.table.residency.evict_dram(block)
    payload = hashlib.sha256(block.key).digest() * (SHAPE.block_bytes // 32)
    sums = layer_checksums(memoryview(payload), SHAPE)
    run = BlockRun(node.namespace.namespace_id, node.keys[2], 3, (block.key,))

    def bring() -> StoreOutcome:
        prepared = node.table.prepare(node.namespace, run, 0.0)
        for slot in prepared.slots.values():
            node.arena.view(slot, SHAPE.block_bytes)[:] = payload
        node.table.complete(prepared, list(prepared.slots), [sums] * len(prepared.slots))
        node.write_behind()
        return prepared.outcomes[0]

    brought: list[StoreOutcome] = []

    def meanwhile(stored: Any, removed: Any) -> None:
        monkeypatch.setattr(node.node_volume.volume, "commit", commit)
        brought.append(bring())
        commit(stored, removed)

    monkeypatch.setattr(node.node_volume.volume, "commit", meanwhile)
    quarantine(node.table, node.node_volume, block, bad, node.counters)
    brought.append(bring())
    assert StoreOutcome.STORED in brought
    assert node.block(3).nvme not in (None, bad)
    assert dict(node.node_volume.volume._inner._listed())[block.key] == node.block(3).nvme, "or a restart would not find it"  # type: ignore[attr-defined]


def test_loads_go_on_while_a_check_looks_for_what_it_is_to_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    class Blocks(list[Block]):
        def __iter__(self) -> Iterator[Block]:
            for block in super().__iter__():
                looked.append(node.table.residency.lock.locked())
                yield block

    snapshot = node.table.snapshot
    monkeypatch.setattr(node.table, "snapshot", lambda: Blocks(snapshot()))
    assert len(node.checks._held(node.node_volume)) == BLOCKS
    assert looked == [False] * BLOCKS


def test_one_check_of_a_volume_at_a_time_and_it_can_be_called_off(node: Node) -> None:
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ, times=1)
    first = node.checks.begin(node.node_volume, b"1" * 16, FAST)
    assert node.plan.hanging.acquire(timeout=WAIT_S), "it reads"
    with pytest.raises(Conflict, match="already"):
        node.checks.begin(node.node_volume, b"2" * 16, FAST)
    assert node.checks.begin(node.node_volume, b"1" * 16, FAST) is first, "the same call, sent again"
    assert node.checks.cancel(node.node_volume) is first
    assert first.state is CheckState.RUNNING, "the read under way is waited for"
    node.plan.release_hangs()
    ended(first)
    assert node.check(b"3" * 16).good == BLOCKS


def test_blocks_that_left_before_their_turn_are_told_apart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.durability.scrub.PIN_BLOCKS", 4)
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ, times=1)
    check = node.checks.begin(node.node_volume, b"1" * 16, FAST)
    assert node.plan.hanging.acquire(timeout=WAIT_S), "it reads the first four, which are pinned"
    victims = node.table.nvme_victims(node.node_volume)
    assert len(victims) == BLOCKS - 4
    node.node_volume.volume.commit([], [block.key for block in victims])
    node.table.evicted_nvme(node.node_volume, victims)
    node.plan.release_hangs()
    ended(check)
    assert (check.state, check.good, check.gone, check.checked_blocks) == (CheckState.DONE, 4, BLOCKS - 4, BLOCKS)


def test_a_check_keeps_to_its_rate_and_a_cancelled_one_stops_short(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.durability.scrub.PIN_BLOCKS", 1)
    check = node.checks.begin(node.node_volume, b"1" * 16, 1)  # the first block, then an hour of rest
    end_s = time.monotonic() + WAIT_S
    while check.good < 1:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    assert check.state is CheckState.RUNNING
    node.checks.cancel(node.node_volume)
    ended(check)
    assert (check.state, check.checked_blocks) == (CheckState.CANCELLED, 1)
