"""A node with a volume that stops answering: other volumes, DRAM and stores are served, and nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.v1.common_pb2 import NODE_STATE_DRAINED, DrainOrder
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import PermissionDenied
from kvstore.core.types import BlockKey, NodeId, Outcome, StoreOutcome, Tier, VolumeId
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.control.drain import Drainer
from kvstore.node.control.migrator import BlockMigrator
from kvstore.node.control.pull import Puller
from kvstore.node.durability.volume_checks import CheckState, VolumeChecks
from kvstore.node.durability.volume_watch import requeue_dram_only
from kvstore.node.durability.writeback import WriteBack
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.locate import pin_stored
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.loads.runs import SourceRange
from kvstore.node.state.model import NodeVolume
from kvstore.testing.faulty_volume import VolumeFault, VolumeOperation
from kvstore.transport.contract import LateBytes
from support.node_harness import MIB, NodeHarness
from support.wait import wait_until

CHAIN = 8
STALL_S = 0.2
WAIT_S = 30.0
"""Deadline of every load and flush. A request that waits for it fails the test."""
SOON_S = 10.0
"""A generous bound for requests that must not wait for their deadline."""


class Node(NodeHarness):
    """A node with two volumes. The first can hang."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, volumes=[MIB, MIB], faulty=[0], stall_s=STALL_S, clock=MonotonicClock())
        self.hung, self.good = self.volumes
        self.behind: WriteBack | None = None
        self.lost_slots = 0
        """Slots that late bytes of a failed read may reach. No block gets them."""

    def store_chain(self, chain: str) -> list[BlockKey]:
        """Store a chain in DRAM, to be written back."""
        assert self.store(chain, 0, CHAIN) == [StoreOutcome.STORED] * CHAIN
        return self.keys(chain, CHAIN)

    def store_on(self, volume: NodeVolume, chain: str) -> list[BlockKey]:
        """Store a chain on one volume and evict it from DRAM."""
        keys = self.store_chain(chain)
        other = self.good if volume is self.hung else self.hung
        other.resting_until_s = self.clock.now_s() + WAIT_S
        self.write_back()
        other.resting_until_s = 0.0
        assert all(self.block(key).nvme_volume is volume for key in keys)
        evict_tier(self.table, Tier.DRAM)
        return keys

    def load(self, keys: Sequence[BlockKey]) -> list[Outcome | None]:
        """Load, compare every byte of hits, and unpin."""
        began_s = time.monotonic()
        outcomes = self.outcomes(self.loader.load(self.request(keys, WAIT_S)), len(keys))
        assert time.monotonic() - began_s < SOON_S
        return outcomes

    def start_write_back(self) -> None:
        self.behind = WriteBack(self.table, self.target, self.counters)
        self.behind.start()

    def answers_again(self) -> None:
        """Release the disk and wait until all outstanding I/O has ended and cleaned up."""
        self.faults.clear()
        self.faults.release_hangs()
        wait_until(self._all_ended, "all I/O has ended")
        assert not self.hung.guard.stalled

    def _all_ended(self) -> bool:
        guards = [volume.guard for volume in self.volumes]
        return not any(guard.outstanding or guard.abandoned or guard.windows for guard in guards)

    def check_nothing_leaked(self) -> None:
        """Check that every used slot of arena and volumes belongs to a block."""
        self.table.validate()
        blocks = self.table.snapshot()
        assert all(block.pins == 0 and not block.writing and not block.evicting for block in blocks)
        assert self.arena.usage().blocks == self.lost_slots + sum(block.dram is not None for block in blocks)
        for volume in self.volumes:
            of_volume = sum(block.nvme_volume is volume for block in blocks)
            assert volume.volume.usage().blocks == of_volume

    def close(self) -> None:
        self.faults.clear()
        self.faults.release_hangs()
        if self.behind is not None:
            self.behind.stop(WAIT_S)
        self.table.give_up_pending()
        self.loader.close()
        wait_until(self._all_ended, "all I/O has ended")
        self.check_nothing_leaked()
        super().close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


HIT, GONE = [Outcome.HIT] * CHAIN, [Outcome.UNAVAILABLE] * CHAIN


def test_load_volume_hung_others_go_on(node: Node) -> None:
    hung, good = node.store_on(node.hung, "hung"), node.store_on(node.good, "good")
    dram = node.store_chain("dram")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    with ThreadPoolExecutor(8) as engines:  # more than the loader has threads
        waiting = [engines.submit(node.load, hung) for _ in range(6)]
        assert node.faults.hanging.acquire(timeout=WAIT_S)
        assert node.load(dram) == HIT
        assert node.load(good) == HIT
        assert [one.result(WAIT_S) for one in waiting] == [GONE] * 6
    assert node.hung.guard.stalled
    outstanding = node.hung.guard.outstanding
    assert node.load((*good, *hung, *dram)) == [*HIT, *GONE, *HIT]
    assert node.hung.guard.outstanding == outstanding <= 2, "I/O accumulates at the hung volume"
    assert node.counters.get("volume_stall_refused_blocks_total") >= 7 * CHAIN
    node.answers_again()
    assert node.load(hung) == HIT


def test_load_stuck_read_keeps_its_arena_slots(node: Node) -> None:
    """The kernel may still write to these slots, so they must not be reused."""
    hung = node.store_on(node.hung, "hung")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    assert node.load(hung) == GONE
    stuck = node.arena.usage().blocks
    assert 0 < stuck <= CHAIN
    grants = []
    while (grant := node.prepare(f"fill{len(grants)}", 0, 1)).slots:
        grants.append(grant)
    assert node.arena.usage().blocks == stuck + len(grants), "slots of the stuck read were reused"
    for grant in grants:
        node.table.abandon(grant)
    assert node.arena.usage().blocks == stuck
    node.answers_again()
    assert node.load(hung) == HIT


def test_load_waiting_for_stuck_load_is_answered(node: Node) -> None:
    """The second load finds the blocks claimed by the first, whose read hangs."""
    hung = node.store_on(node.hung, "hung")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    with ThreadPoolExecutor(2) as engines:
        first = engines.submit(node.load, hung)
        assert node.faults.hanging.acquire(timeout=WAIT_S)
        second = engines.submit(node.load, hung)
        assert first.result(WAIT_S) == second.result(WAIT_S) == GONE


def test_store_volume_hung_other_volume_takes_blocks(node: Node) -> None:
    node.store_on(node.good, "ballast")  # the hung volume has more free space, so it is tried first
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.WRITE)
    node.start_write_back()
    keys = node.store_chain("new")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    assert node.table.are_durable(keys) == [True] * CHAIN
    assert all(node.block(key).nvme_volume is node.good for key in keys)
    assert node.hung.volume.usage().blocks == CHAIN, "slots of a hung write were freed"
    node.answers_again()
    assert node.hung.volume.usage().blocks == 0


@pytest.mark.parametrize("operation", [VolumeOperation.WRITE, VolumeOperation.COMMIT])
def test_flush_all_volumes_hung_reports_not_durable_soon(node: Node, operation: VolumeOperation) -> None:
    node.table.node_volumes.remove(node.good)
    node.faults.add(VolumeFault.HANG, operation=operation)
    node.start_write_back()
    began_s = time.monotonic()
    keys = [node.store_chain(f"chain{number}") for number in range(5)]
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)
    assert time.monotonic() - began_s < SOON_S
    assert not any(node.table.are_durable(keys[0]))
    for chain in keys:
        assert node.load(chain) == HIT, "from DRAM"
    node.answers_again()
    wait_until(lambda: node.hung.guard.takes_changes, "the volume accepts changes again")
    assert requeue_dram_only(node.table, node.hung) == 5 * CHAIN
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)
    assert all(all(node.table.are_durable(chain)) for chain in keys)
    evict_tier(node.table, Tier.DRAM)
    for chain in keys:
        assert node.load(chain) == HIT, "from the volume"
    node.table.node_volumes.append(node.good)


def test_commit_late_leaves_no_stale_catalog_entry(node: Node, tmp_path: Path) -> None:
    """The commit succeeds after its blocks were written to the other volume: they leave the catalog at once."""
    node.store_on(node.good, "ballast")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.COMMIT, times=1)
    node.start_write_back()
    keys = node.store_chain("new")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    assert all(node.block(key).nvme_volume is node.good for key in keys)
    node.answers_again()
    assert node.hung.volume.usage().blocks == 0
    node.store_chain("next")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    assert set(node.after_restart(0, tmp_path)) == set(node.keys("next", CHAIN))


def test_evict_volume_hung_fails_soon_and_settles_later(node: Node) -> None:
    hung = node.store_on(node.hung, "hung")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.COMMIT, times=1)
    began_s = time.monotonic()
    with pytest.raises(VolumeStalled):
        evict_tier(node.table, Tier.NVME)
    assert time.monotonic() - began_s < SOON_S
    assert all(node.block(key).evicting for key in hung), "a load could begin to read them"
    assert node.load(hung) == [Outcome.MISS] * CHAIN
    node.answers_again()
    assert node.table.snapshot() == [], "the commit has ended: the blocks are evicted"


def test_check_volume_hung_ends_as_failed(node: Node) -> None:
    node.store_on(node.hung, "hung")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    checks = VolumeChecks(node.table, node.counters, node.clock)
    check = checks.begin(node.hung, b"o" * 16, 1 << 40)
    wait_until(lambda: check.state is CheckState.FAILED, "the check fails")
    assert "did not answer in time" in check.why
    checks.close()


def test_locate_volume_hung_finds_no_block_on_it(node: Node) -> None:
    hung = node.store_on(node.hung, "hung")
    node.faults.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    assert node.load(hung) == GONE
    assert pin_stored(node.table, node.namespace, hung, [node.hung.volume_id]) == []


def test_volume_hangs_repeatedly_under_load_nothing_leaks(node: Node) -> None:
    """Several engines load and store while the disk hangs and recovers: no wrong byte, no leak, no late answer."""
    chains = [node.store_on(node.hung if number % 2 else node.good, f"chain{number}") for number in range(6)]
    node.start_write_back()
    stop = threading.Event()
    loads = 0

    def engine(number: int) -> None:
        nonlocal loads
        at = number
        while not stop.is_set():
            at += 1
            node.load(chains[at % len(chains)])
            evict_tier(node.table, Tier.DRAM)
            if at % 5 == 0:
                node.store_chain(f"new{number}-{at}")
            loads += 1

    with ThreadPoolExecutor(4) as engines:
        running = [engines.submit(engine, number) for number in range(4)]
        for _ in range(3):
            for operation in VolumeOperation:
                node.faults.add(VolumeFault.HANG, operation=operation)
            wait_until(lambda: node.hung.guard.stalled, "the volume is stalled")
            before = loads
            wait_until(lambda: loads >= before + 8, "loads continue")  # noqa: B023
            node.faults.clear()
            node.faults.release_hangs()
            wait_until(lambda: not node.hung.guard.stalled, "the volume answers again")
            node.faults.hold_hangs()
        stop.set()
        for one in running:
            one.result(WAIT_S)
    node.answers_again()
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)


def test_drain_with_hung_disk_completes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk answers no ``stat`` either: only the volume's own threads wait for it."""
    released = threading.Event()
    monkeypatch.setattr(node.hung.volume, "check_files", lambda: released.wait(WAIT_S))
    drainer = Drainer("n", node.gate, node.table, lambda: False, node.counters, node.clock, writes_back=True, patience_s=WAIT_S)
    drainer.apply(DrainOrder(operation_id=b"o" * 16))
    drainer.start()
    try:
        wait_until(lambda: (progress := drainer.progress()) is not None and progress.state == NODE_STATE_DRAINED)
    finally:
        released.set()
        drainer.stop(WAIT_S)


def test_drain_refused_by_metadata_server_names_the_error(node: Node) -> None:
    def refused(_blocks: object) -> None:
        raise PermissionDenied("its token has expired")

    drainer = Drainer("n", node.gate, node.table, lambda: False, node.counters, node.clock, writes_back=True, patience_s=WAIT_S)
    drainer.migrator = cast(
        "BlockMigrator",
        SimpleNamespace(round=refused, remaining=0, moved_blocks=0, moved_bytes=0, reset=bool, close=bool),
    )
    drainer.apply(DrainOrder(operation_id=b"o" * 16, move=True))
    drainer.start()
    try:
        wait_until(lambda: "failed: its token" in (progress.why if (progress := drainer.progress()) else ""))
    finally:
        drainer.stop(WAIT_S)


def test_fetch_with_late_bytes_keeps_its_slots(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes may still arrive in the slots of the failed read, so no other block gets them."""

    def read(*_: object, **__: object) -> None:
        raise LateBytes("bytes of an abandoned transfer may still arrive")

    keys = node.keys("elsewhere", CHAIN)
    source = SourceRange(0, CHAIN, PeerAddress(NodeId("other"), "", "127.0.0.1:1"), VolumeId("other/nvme0"))
    request = replace(node.request(keys, WAIT_S), sources=[source])
    with monkeypatch.context() as patch:
        patch.setattr(node.peers, "peer", lambda *_: SimpleNamespace(read=read))
        assert node.outcomes(node.loader.load(request), CHAIN) == GONE
    assert node.arena.usage().blocks == CHAIN
    assert node.counters.get("arena_slots_lost_total") == CHAIN
    assert not node.table.snapshot()
    node.lost_slots = CHAIN


def test_pull_with_late_bytes_frees_its_keys(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes may still arrive in the slots of the failed pull, but another store of the blocks gets other slots."""

    def read(*_: object, **__: object) -> None:
        raise LateBytes("bytes of an abandoned transfer may still arrive")

    unused: Any = None
    provider = NodeProvider(node.registry, node.table, node.gate, node.loader, unused, node.clock)
    puller = Puller(node.table, provider, node.peers, node.gate, node.counters)
    monkeypatch.setattr(node.peers, "peer", lambda *_: SimpleNamespace(read=read))
    run, source = node.run("elsewhere", 0, CHAIN), PeerAddress(NodeId("other"), "", "127.0.0.1:1")
    outcomes, why = puller.pull(node.namespace, [run], source, node.clock.now_s() + WAIT_S)
    node.lost_slots = CHAIN
    assert (outcomes, "may still arrive" in why) == ([StoreOutcome.LOST] * CHAIN, True)
    assert node.counters.get("arena_slots_lost_total") == CHAIN
    assert node.load(node.store_chain("elsewhere")) == HIT
