"""Checks of volumes: their results, and how they end."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict, Unavailable
from kvstore.core.types import BlockRun, BlockShape, StoreOutcome
from kvstore.node.durability.volume_checks import ENDED, Check, CheckState, VolumeChecks, held_blocks
from kvstore.node.eviction.volume_commits import finish_eviction, quarantine, retry_quarantine
from kvstore.node.state.model import Block
from kvstore.testing.faulty_volume import VolumeFault, VolumeOperation
from support.node_harness import MIB, NodeHarness
from support.wait import wait_until

SHAPE = BlockShape(2, 2048)
BLOCKS = 12
FAST = 1 << 40
WAIT_S = 30.0


class Node(NodeHarness):
    """A node with one volume that may fail, and a chain on it and in DRAM."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, volumes=[MIB], faulty=[0], shapes=[SHAPE], clock=MonotonicClock())
        (self.volume,) = self.volumes
        self.chain = self.store_durably("chain", BLOCKS)
        self.checks = VolumeChecks(self.table, self.counters, self.clock)

    def at(self, position: int) -> Block:
        return self.block(self.chain[position])

    def check(self, operation: bytes = b"o" * 16) -> Check:
        check = self.checks.begin(self.volume, operation, FAST)
        wait_until_ended(check)
        return check

    def close(self) -> None:
        self.checks.close()
        assert all(block.pins == 0 for block in self.table.snapshot()), "a check did not unpin its blocks"
        super().close()


def wait_until_ended(check: Check) -> None:
    wait_until(lambda: check.state in ENDED, lambda: f"the check ends: {check}", poll_s=0.002)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "volume")
    yield made
    made.close()


def test_check_good_blocks_stay_and_are_not_marked_used(node: Node) -> None:
    assert node.checks.last(node.volume) is None
    order = node.coldest_on(node.volume)
    found = node.check()
    assert (found.state, found.blocks, found.good, found.bad) == (CheckState.DONE, BLOCKS, BLOCKS, 0)
    assert found.checked_bytes == BLOCKS * SHAPE.block_bytes
    assert node.coldest_on(node.volume) == order, "the order of eviction is what it was"


def test_check_bad_blocks_are_restored_from_dram(node: Node) -> None:
    """Position 3 is in DRAM too, position 11 is not."""
    cold = node.at(11)
    with node.table.residency.lock:
        node.table.residency.remove_from_dram(cold)
    node.faults.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.READ, keys=[node.chain[3], node.chain[11]], times=2)
    found = node.check()
    assert (found.good, found.bad, found.rewritten_blocks, found.unreadable) == (BLOCKS - 2, 2, 1, 0)
    assert node.counters.snapshot()["quarantined_blocks_total"] == node.volume.quarantined == 2
    assert node.chain[11] not in {block.key for block in node.table.snapshot()}, "it was nowhere else: a miss"
    node.write_back()
    assert node.table.are_durable(node.chain) == [True] * 11 + [False]
    again = node.check(b"p" * 16)
    assert (again.blocks, again.good, again.bad) == (BLOCKS - 1, BLOCKS - 1, 0), "the new copy is the catalog's, and good"


def test_check_unreadable_blocks_stay(node: Node) -> None:
    node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.READ, keys=[node.chain[5]], times=1)
    found = node.check()
    assert (found.state, found.good, found.unreadable, found.bad) == (CheckState.DONE, BLOCKS - 1, 1, 0)
    assert node.volume.quarantined == 0
    assert node.check(b"p" * 16).good == BLOCKS


def test_quarantine_does_not_remove_a_newer_replica(node: Node) -> None:
    block = node.at(3)
    bad = block.nvme
    assert bad is not None
    quarantine(node.table, node.volume, block, bad, node.counters)
    node.table.requeue_writeback([block])
    node.write_back()
    assert block.nvme is not None
    assert block.nvme != bad
    quarantine(node.table, node.volume, block, bad, node.counters)
    assert block.nvme is not None, "another reader of the same bad slot came later"
    assert node.volume.quarantined == 1


@pytest.mark.parametrize("written_again", [False, True])
def test_quarantine_not_committed_is_repeated(node: Node, tmp_path: Path, written_again: bool) -> None:
    block = node.at(3)
    bad = block.nvme
    assert bad is not None
    node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.COMMIT, times=2)
    quarantine(node.table, node.volume, block, bad, node.counters)
    with pytest.raises(OSError, match="Input/output"):
        retry_quarantine(node.volume, node.clock.now_s())
    if written_again:
        node.table.requeue_writeback([block])
        node.write_back()
    for _ in range(2):
        retry_quarantine(node.volume, node.clock.now_s())
    assert node.after_restart(0, tmp_path).get(block.key) == block.nvme
    assert (block.nvme is not None) == written_again
    assert node.counters.get("quarantined_uncommitted_blocks_total") == 1


def test_quarantine_is_repeated_on_read_only_volumes(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync, the catalog still takes removals. A catalog that takes none is asked again; no failure is counted."""
    block = node.at(3)
    bad = block.nvme
    assert bad is not None
    node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.COMMIT, times=1)
    quarantine(node.table, node.volume, block, bad, node.counters)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        node.table.requeue_writeback([block])
        node.write_back()
    assert "a sync of its slab failed" in (node.volume.volume.read_only or "")
    node.volume.resting_until_s = 0.0

    def refuse(*_: object) -> None:
        raise Unavailable("this volume is read-only")

    with monkeypatch.context() as patched:
        patched.setattr(node.slabs[0], "remove_replicas", refuse)
        retry_quarantine(node.volume, node.clock.now_s())
    assert node.volume.uncommitted == [(block.key, bad)]
    retry_quarantine(node.volume, node.clock.now_s())
    assert node.volume.uncommitted == []
    assert block.key not in node.after_restart(0, tmp_path)


def test_good_copy_written_during_quarantine_stays(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine stores the block again, and its write-back runs just before the catalog removes the bad replica."""
    block = node.at(3)
    bad, commit = block.nvme, node.volume.volume.commit
    assert bad is not None
    with node.table.residency.lock:
        node.table.residency.remove_from_dram(block)
    payload = hashlib.sha256(block.key).digest() * (SHAPE.block_bytes // 32)
    sums = layer_checksums(memoryview(payload), SHAPE)
    run = BlockRun(node.namespace.namespace_id, node.chain[2], 3, (block.key,))

    def bring() -> StoreOutcome:
        prepared = node.table.prepare(node.namespace, run, 0.0)
        for slot in prepared.slots.values():
            node.arena.view(slot, SHAPE.block_bytes)[:] = payload
        node.table.complete(prepared, list(prepared.slots), [sums] * len(prepared.slots))
        node.write_back()
        return prepared.outcomes[0]

    brought: list[StoreOutcome] = []

    def meanwhile(stored: Any, removed: Any) -> None:
        monkeypatch.setattr(node.volume.volume, "commit", commit)
        brought.append(bring())
        commit(stored, removed)

    monkeypatch.setattr(node.volume.volume, "commit", meanwhile)
    quarantine(node.table, node.volume, block, bad, node.counters)
    brought.append(bring())
    assert StoreOutcome.STORED in brought
    assert node.at(3).nvme not in (None, bad)
    assert node.after_restart(0, tmp_path)[block.key] == node.at(3).nvme


def test_loads_continue_while_a_check_lists_blocks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    class Blocks(list[Block]):
        def __iter__(self) -> Iterator[Block]:
            for block in super().__iter__():
                looked.append(node.table.residency.lock.locked())
                yield block

    snapshot = node.table.snapshot
    monkeypatch.setattr(node.table, "snapshot", lambda: Blocks(snapshot()))
    assert len(held_blocks(node.table, node.volume)) == BLOCKS
    assert looked == [False] * BLOCKS


def test_check_second_of_a_volume_conflicts_until_cancelled(node: Node) -> None:
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ, times=1)
    first = node.checks.begin(node.volume, b"1" * 16, FAST)
    assert node.faults.hanging.acquire(timeout=WAIT_S), "it reads"
    with pytest.raises(Conflict, match="already"):
        node.checks.begin(node.volume, b"2" * 16, FAST)
    assert node.checks.begin(node.volume, b"1" * 16, FAST) is first, "the same call, sent again"
    assert node.checks.cancel(node.volume) is first
    assert first.state is CheckState.RUNNING, "the read under way is waited for"
    node.faults.release_hangs()
    wait_until_ended(first)
    assert node.check(b"3" * 16).good == BLOCKS


def test_check_blocks_evicted_before_their_turn_are_gone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.durability.volume_checks.PIN_BLOCKS", 4)
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ, times=1)
    check = node.checks.begin(node.volume, b"1" * 16, FAST)
    assert node.faults.hanging.acquire(timeout=WAIT_S), "it reads the first four, which are pinned"
    victims = [node.block(key) for key in node.coldest_on(node.volume)]
    assert len(victims) == BLOCKS - 4
    with node.table.residency.lock:
        node.table.residency.mark_evicting(victims)
    node.volume.volume.commit([], [block.key for block in victims])
    finish_eviction(node.table.residency, node.volume, victims)
    node.faults.release_hangs()
    wait_until_ended(check)
    assert (check.state, check.good, check.gone, check.checked_blocks) == (CheckState.DONE, 4, BLOCKS - 4, BLOCKS)


def test_check_keeps_its_rate_and_stops_when_cancelled(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.durability.volume_checks.PIN_BLOCKS", 1)
    check = node.checks.begin(node.volume, b"1" * 16, 1)  # the first block, then a pause of an hour
    end_s = time.monotonic() + WAIT_S
    while check.good < 1:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    assert check.state is CheckState.RUNNING
    node.checks.cancel(node.volume)
    wait_until_ended(check)
    assert (check.state, check.checked_blocks) == (CheckState.CANCELLED, 1)


def test_quarantine_ended_by_bug_is_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    block = node.at(3)
    bad = block.nvme
    assert bad is not None
    monkeypatch.setattr(type(node.volume.volume), "commit", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        quarantine(node.table, node.volume, block, bad, node.counters)
    monkeypatch.undo()
    assert node.volume.uncommitted == [(block.key, bad)]
    retry_quarantine(node.volume, node.clock.now_s())
    assert node.volume.uncommitted == []
