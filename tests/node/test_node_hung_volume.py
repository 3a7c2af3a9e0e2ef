"""A node with a volume that stops answering: other volumes, DRAM and stores are served, and nothing leaks."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, NodeId, Outcome, VolumeId
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.durability.requeue import requeue_dram_only
from kvstore.node.durability.scrub import CheckState, VolumeChecks
from kvstore.node.durability.writeback import LocalTarget, WriteBehind
from kvstore.node.eviction.on_demand import evict_all_nvme
from kvstore.node.loads.loader import Loader, Part
from kvstore.node.loads.locate import pin_stored
from kvstore.node.loads.mounts import make_mounts
from kvstore.node.loads.peers import Peers
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.faulty_volume import FaultPlan, FaultyVolume, VolumeFault, VolumeOperation
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.transport.tcp.peer import TcpPeer
from support.wait import wait_until

SHAPE = BlockShape(2, 2048)
CHAIN = 8
ARENA, SLAB = 1 << 20, 1 << 20
STALL_S = 0.2
WAIT_S = 30.0
"""Deadline of every load and flush. A request that waits for it fails the test."""
SOON_S = 10.0
"""A generous bound for requests that must not wait for their deadline."""


def payload_of(key: BlockKey) -> bytes:
    return hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32)


class Node:
    """Arena, two volumes (the first can hang), loader and write-behind."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.counters, self.plan = MonotonicClock(), Counters(), FaultPlan()
        slabs = [
            NvmeSlab.open(folder / name, volume_id=VolumeId(f"n/{name}"), capacity_bytes=SLAB, io_threads=1)
            for name in ("nvme0", "nvme1")
        ]
        for slab in slabs:
            assert list(slab.recover()) == []
        self.hung, self.good = NodeVolume(FaultyVolume(slabs[0], self.plan)), NodeVolume(slabs[1])
        for node_volume in (self.hung, self.good):
            node_volume.set_guard(self.counters, stall_s=STALL_S, readers=2)
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=ARENA)
        log = ReplicaChangeLog([self.arena.volume_id, *(slab.volume_id for slab in slabs)], self.counters, self.clock, keep=False)
        node_volumes = [self.hung, self.good]
        self.table = BlockTable(self.arena, make_policy("lru"), node_volumes, log, self.counters, self.clock, writes_behind=True)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
        self.target = LocalTarget(self.table, self.counters, self.clock)
        mounts = make_mounts((), io_threads=1, counters=self.counters, clock=self.clock)
        peers = Peers(lambda address, _: TcpPeer(address.data_address))
        self.loader = Loader(NodeId("n"), self.table, peers, mounts, self.counters, self.clock, window_bytes=ARENA, threads=2)
        self.behind: WriteBehind | None = None

    def keys(self, chain: str, blocks: int = CHAIN) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(hashlib.sha256(f"{chain}{depth}".encode()).digest()[:16]) for depth in range(blocks))

    def store(self, chain: str) -> tuple[BlockKey, ...]:
        """Store a chain in DRAM, to be written behind."""
        keys = self.keys(chain)
        prepared = self.table.prepare(self.namespace, BlockRun(self.namespace.namespace_id, None, 0, keys), self.clock.now_s())
        sums = []
        for key, slot in prepared.slots.items():
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload_of(key)
            sums.append(layer_checksums(memoryview(payload_of(key)), SHAPE))
        self.table.complete(prepared, list(prepared.slots), sums)
        return keys

    def store_on(self, node_volume: NodeVolume, chain: str) -> tuple[BlockKey, ...]:
        """Store a chain on one volume and evict it from DRAM."""
        keys = self.store(chain)
        other = self.good if node_volume is self.hung else self.hung
        other.resting_until_s = self.clock.now_s() + WAIT_S
        self.target.persist(self.table.take_pending(CHAIN, ARENA, 0.0), lambda: None)
        other.resting_until_s = 0.0
        assert all(self.block(key).nvme_volume is node_volume for key in keys)
        self.table.evict_dram()
        return keys

    def block(self, key: BlockKey) -> Block:
        return next(block for block in self.table.snapshot() if block.key == key)

    def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Load, compare every byte of hits, and unpin."""
        outcomes = [Outcome.MISS] * len(keys)
        began_s = time.monotonic()
        for part in self.loader.load(self.namespace, keys, self.clock.now_s() + WAIT_S):
            self._check(part, keys)
            outcomes[part.first : part.first + len(part.outcomes)] = part.outcomes
            self.table.unpin(part.pinned())
        assert time.monotonic() - began_s < SOON_S
        return outcomes

    def _check(self, part: Part, keys: Sequence[BlockKey]) -> None:
        for at, block in enumerate(part.blocks):
            if block is not None:
                assert block.dram is not None
                assert bytes(self.arena.view(block.dram, SHAPE.block_bytes)) == payload_of(keys[part.first + at])

    def start_write_behind(self) -> None:
        self.behind = WriteBehind(self.table, self.target, self.counters)
        self.behind.start()

    def answers_again(self) -> None:
        """Release the disk and wait until all outstanding I/O has ended and cleaned up."""
        self.plan.clear()
        self.plan.release_hangs()
        wait_until(self._all_came_back, "all came back")
        assert not self.hung.guard.stalled

    def _all_came_back(self) -> bool:
        guards = [node_volume.guard for node_volume in self.table.node_volumes]
        return not any(guard.outstanding or guard.left or guard.windows for guard in guards)

    def check_nothing_leaked(self) -> None:
        """Every used slot of arena and volumes belongs to a block, or to an outdated entry of a catalog."""
        self.table.validate()
        assert not self.table.residency.loading
        blocks = self.table.snapshot()
        assert all(block.pins == 0 and not block.writing and not block.evicting for block in blocks)
        assert self.arena.usage().blocks == sum(block.dram is not None for block in blocks)
        for node_volume in self.table.node_volumes:
            mine = sum(block.nvme_volume is node_volume for block in blocks)
            assert node_volume.volume.usage().blocks == mine

    def close(self) -> None:
        self.plan.clear()
        self.plan.release_hangs()
        if self.behind is not None:
            self.behind.stop(WAIT_S)
        self.table.give_up_pending()
        self.loader.close()
        wait_until(self._all_came_back, "all came back")
        self.check_nothing_leaked()
        self.table.close()
        for node_volume in self.table.node_volumes:
            node_volume.guard.close()
            node_volume.volume.close()
        self.arena.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


HIT, GONE = [Outcome.HIT] * CHAIN, [Outcome.UNAVAILABLE] * CHAIN


def test_load_volume_hung_others_go_on(node: Node) -> None:
    hung, good = node.store_on(node.hung, "hung"), node.store_on(node.good, "good")
    dram = node.store("dram")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    with ThreadPoolExecutor(8) as engines:  # more than the loader has threads
        waiting = [engines.submit(node.load, hung) for _ in range(6)]
        assert node.plan.hanging.acquire(timeout=WAIT_S)
        assert node.load(dram) == HIT
        assert node.load(good) == HIT
        assert [one.result(WAIT_S) for one in waiting] == [GONE] * 6
    assert node.hung.guard.stalled
    outstanding = node.hung.guard.outstanding
    assert node.load((*good, *hung, *dram)) == [*HIT, *GONE, *HIT]
    assert node.hung.guard.outstanding == outstanding <= 2, "nothing piles up on it"
    assert node.counters.get("volume_stall_refused_blocks_total") >= 7 * CHAIN
    node.answers_again()
    assert node.load(hung) == HIT


def test_load_stuck_read_keeps_its_arena_slots(node: Node) -> None:
    """The kernel may write into them at any time, so they must not be given to another block."""
    hung = node.store_on(node.hung, "hung")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    assert node.load(hung) == GONE
    stuck = node.arena.usage().blocks
    assert 0 < stuck <= CHAIN
    filled = 0
    while node.table.prepare(
        node.namespace, BlockRun(node.namespace.namespace_id, None, 0, (node.keys(f"fill{filled}", 1)[0],)), node.clock.now_s()
    ).slots:
        filled += 1
    assert node.arena.usage().blocks == stuck + filled, "what hangs was not given away"
    for prepared in {id(one): one for one in node.table.residency.preparing.values()}.values():
        node.table.abandon(prepared)
    assert node.arena.usage().blocks == stuck
    node.answers_again()
    assert node.load(hung) == HIT


def test_load_waiting_for_stuck_load_is_answered(node: Node) -> None:
    """The second load finds the blocks claimed by the first, whose read hangs."""
    hung = node.store_on(node.hung, "hung")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    with ThreadPoolExecutor(2) as engines:
        first = engines.submit(node.load, hung)
        assert node.plan.hanging.acquire(timeout=WAIT_S)
        second = engines.submit(node.load, hung)
        assert first.result(WAIT_S) == second.result(WAIT_S) == GONE


def test_store_volume_hung_other_volume_takes_blocks(node: Node) -> None:
    node.store_on(node.good, "ballast")  # so that the hung one has more room and is tried first
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.WRITE)
    node.start_write_behind()
    keys = node.store("new")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    assert node.table.are_durable(keys) == [True] * CHAIN
    assert all(node.block(key).nvme_volume is node.good for key in keys)
    assert node.hung.volume.usage().blocks == CHAIN, "slots of a write that hangs rest"
    node.answers_again()
    assert node.hung.volume.usage().blocks == 0


@pytest.mark.parametrize("operation", [VolumeOperation.WRITE, VolumeOperation.COMMIT])
def test_flush_all_volumes_hung_says_not_durable_soon(node: Node, operation: VolumeOperation) -> None:
    node.table.node_volumes.remove(node.good)
    node.plan.add(VolumeFault.HANG, operation=operation)
    node.start_write_behind()
    began_s = time.monotonic()
    keys = [node.store(f"chain{number}") for number in range(5)]
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)
    assert time.monotonic() - began_s < SOON_S
    assert not any(node.table.are_durable(keys[0]))
    for chain in keys:
        assert node.load(chain) == HIT, "from DRAM"
    node.answers_again()
    wait_until(lambda: node.hung.guard.takes_changes, "it takes changes again")
    assert requeue_dram_only(node.table) == 5 * CHAIN
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)
    assert all(all(node.table.are_durable(chain)) for chain in keys)
    node.table.evict_dram()
    for chain in keys:
        assert node.load(chain) == HIT, "from the volume"
    node.table.node_volumes.append(node.good)


def test_commit_that_comes_late_leaves_no_stale_entry(node: Node, tmp_path: Path) -> None:
    """The commit succeeds after its blocks went to the other volume: they leave the catalog at once."""
    node.store_on(node.good, "ballast")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.COMMIT, times=1)
    node.start_write_behind()
    keys = node.store("new")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    assert all(node.block(key).nvme_volume is node.good for key in keys)
    node.answers_again()
    assert node.hung.volume.usage().blocks == 0
    node.store("next")
    assert node.table.wait_written(node.clock.now_s() + SOON_S)
    named = {key for key, _ in node.hung.volume._inner._listed()}  # type: ignore[attr-defined]
    assert named == set(node.keys("next"))


def test_evict_volume_hung_fails_soon_and_settles_later(node: Node) -> None:
    hung = node.store_on(node.hung, "hung")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.COMMIT, times=1)
    began_s = time.monotonic()
    with pytest.raises(VolumeStalled):
        evict_all_nvme(node.table)
    assert time.monotonic() - began_s < SOON_S
    assert all(node.block(key).evicting for key in hung), "nobody may begin to read them"
    assert node.load(hung) == [Outcome.MISS] * CHAIN
    node.answers_again()
    assert node.table.snapshot() == [], "the commit came, and they left"


def test_check_volume_hung_ends_as_failed(node: Node) -> None:
    node.store_on(node.hung, "hung")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    checks = VolumeChecks(node.table, node.counters, node.clock)
    check = checks.begin(node.hung, b"o" * 16, 1 << 40)
    wait_until(lambda: check.state is CheckState.FAILED, "it ends")
    assert "did not answer in time" in check.why
    checks.close()


def test_locate_volume_hung_names_no_place_on_it(node: Node) -> None:
    hung = node.store_on(node.hung, "hung")
    node.plan.add(VolumeFault.HANG, operation=VolumeOperation.READ)
    assert node.load(hung) == GONE
    assert pin_stored(node.table, node.namespace, hung) == []


def test_volume_hangs_repeatedly_under_load_nothing_leaks(node: Node) -> None:
    """Several engines load and store while the disk hangs and recovers: no wrong byte, no leak, no late answer."""
    chains = [node.store_on(node.hung if number % 2 else node.good, f"chain{number}") for number in range(6)]
    node.start_write_behind()
    over = threading.Event()
    loads = 0

    def engine(number: int) -> None:
        nonlocal loads
        at = number
        while not over.is_set():
            at += 1
            node.load(chains[at % len(chains)])
            node.table.evict_dram()
            if at % 5 == 0:
                node.store(f"new{number}-{at}")
            loads += 1

    with ThreadPoolExecutor(4) as engines:
        running = [engines.submit(engine, number) for number in range(4)]
        for _ in range(3):
            for operation in VolumeOperation:
                node.plan.add(VolumeFault.HANG, operation=operation)
            wait_until(lambda: node.hung.guard.stalled, "it hangs")
            before = loads
            wait_until(lambda: loads >= before + 8, "loads go on")  # noqa: B023
            node.plan.clear()
            node.plan.release_hangs()
            wait_until(lambda: not node.hung.guard.stalled, "it answers again")
            node.plan.hold_hangs()
        over.set()
        for one in running:
            one.result(WAIT_S)
    node.answers_again()
    assert node.table.wait_written(node.clock.now_s() + WAIT_S)
