"""Loads from this node's own disks: what has come is not kept for what has not."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, NodeId, Outcome, VolumeId
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.loads.loader import Loader, Part
from kvstore.node.loads.mounts import make_mounts
from kvstore.node.loads.peers import Peers
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.transport.tcp.peer import TcpPeer

SHAPE = BlockShape(2, 2048)
BLOCKS = 32
"""Eight windows: 1/16 of the read-ahead, which is 1/4 of the arena, each."""
ARENA = 1 << 20
WAIT_S = 20.0
DRAM, NVME = VolumeId("n/dram"), VolumeId("n/nvme0")
KEYS = tuple(BlockKey(hashlib.sha256(bytes((depth,))).digest()[:16]) for depth in range(BLOCKS))


class Slow(NvmeSlab):
    """A disk on which some blocks take their time."""

    slow: frozenset[BlockKey] = frozenset()
    gate: threading.Event

    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        if any(record.key in self.slow for _, record, _ in items):
            self.gate.wait(WAIT_S)
        return super().read_with_checksums(items)


class Node:
    """Table, arena, disk and loader; the blocks of one chain are on the disk alone."""

    def __init__(self, folder: Path) -> None:
        self.clock, counters = MonotonicClock(), Counters()
        self.slab = Slow.open(folder / "nvme0", volume_id=NVME, capacity_bytes=ARENA, io_threads=1)
        assert list(self.slab.recover()) == []
        self.slab.gate = threading.Event()
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=ARENA)
        log = ReplicaChangeLog([DRAM, NVME], counters, self.clock, keep=False)
        node_volume = NodeVolume(self.slab)
        self.table = BlockTable(self.arena, make_policy("gap"), [node_volume], log, counters, self.clock, writes_behind=True)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
        prepared = self.table.prepare(self.namespace, BlockRun(self.namespace.namespace_id, None, 0, KEYS), self.clock.now_s())
        sums = []
        for key, slot in prepared.slots.items():
            payload = hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32)
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload
            sums.append(layer_checksums(memoryview(payload), SHAPE))
        self.table.complete(prepared, KEYS, sums)
        LocalTarget(self.table, counters, self.clock).persist(self.table.take_pending(BLOCKS, ARENA, 0.0), lambda: None)
        assert self.table.evict_dram() == BLOCKS
        self.peers = Peers(lambda address, _: TcpPeer(address.data_address))
        mounts = make_mounts((), io_threads=1, counters=counters, clock=self.clock)
        self.loader = Loader(NodeId("n"), self.table, self.peers, mounts, counters, self.clock, window_bytes=ARENA, threads=4)

    def close(self) -> None:
        self.slab.gate.set()
        self.loader.close()
        self.table.validate()
        self.table.close()
        self.slab.close()
        self.arena.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("slow", [0, 9, BLOCKS - 1])
def test_what_has_come_is_not_kept_for_what_takes_its_time(node: Node, slow: int) -> None:
    node.slab.slow = frozenset((KEYS[slow],))
    parts = node.loader.load(node.namespace, KEYS, node.clock.now_s() + WAIT_S)
    window = range(slow // 4 * 4, slow // 4 * 4 + 4)
    came: set[int] = set()
    while len(came) < BLOCKS - len(window):
        part = next(parts)
        positions = range(part.first, part.first + len(part.blocks))
        assert came.isdisjoint(positions)
        assert not set(positions) & set(window)
        came.update(positions)
        node.table.unpin(part.pinned())
    assert not any(block.pins for block in node.table.snapshot() if block.key != KEYS[slow] and block.dram is not None)
    node.slab.gate.set()
    (last,) = parts
    assert range(last.first, last.first + len(last.blocks)) == window
    assert last.outcomes == [Outcome.HIT] * len(window)
    node.table.unpin(last.pinned())


def test_a_block_that_is_never_written_stops_only_who_asks_for_it(node: Node) -> None:
    """As a writer that never ends, and more loads of its block than the loader has threads."""
    key = BlockKey(b"k" * 16)
    writer = node.table.prepare(node.namespace, BlockRun(node.namespace.namespace_id, None, 0, (key,)), node.clock.now_s())
    found: list[list[Outcome]] = []

    def wait() -> None:
        for part in node.loader.load(node.namespace, [key, KEYS[0]], node.clock.now_s() + WAIT_S):
            found.append(part.outcomes)
            node.table.unpin(part.pinned())

    waiting = [threading.Thread(target=wait) for _ in range(12)]
    for thread in waiting:
        thread.start()
    came: set[int] = set()
    for part in node.loader.load(node.namespace, KEYS, node.clock.now_s() + WAIT_S):
        assert part.outcomes == [Outcome.HIT] * len(part.blocks)
        came.update(range(part.first, part.first + len(part.blocks)))
        node.table.unpin(part.pinned())
    assert came == set(range(BLOCKS))
    assert all(thread.is_alive() for thread in waiting)
    for slot in writer.slots.values():
        node.arena.view(slot, SHAPE.block_bytes)[:] = bytes(SHAPE.block_bytes)
    node.table.complete(writer, [key], [layer_checksums(memoryview(bytes(SHAPE.block_bytes)), SHAPE)])
    for thread in waiting:
        thread.join(WAIT_S)
    assert [outcome for outcomes in found for outcome in outcomes] == [Outcome.HIT] * 24


def test_a_block_that_its_writer_gives_up_is_ours_to_bring(node: Node) -> None:
    """Whichever thread waits for it: those of the loader, or, where they may wait no more, the caller's."""
    for waiters in (2, 0):
        claim = node.table.claim(node.namespace, KEYS[:8])
        node.loader._waiters = threading.Semaphore(waiters)
        parts: list[Part] = []
        load = threading.Thread(target=load_into, args=(node, parts))
        load.start()
        while len(node.table.residency.changed._waiters) == 0:
            pass
        node.table.unclaim(KEYS[:8], claim.durable.values())
        load.join(WAIT_S)
        assert sorted(at for part in parts for at in range(part.first, part.first + len(part.blocks))) == list(range(8))
        assert {outcome for part in parts for outcome in part.outcomes} == {Outcome.HIT}
        for part in parts:
            node.table.unpin(part.pinned())
        node.table.evict_dram()


def load_into(node: Node, parts: list[Part]) -> None:
    parts += node.loader.load(node.namespace, KEYS[:8], node.clock.now_s() + WAIT_S)
