"""Several durable volumes of one node: chains leave from their ends wherever they lie, and one that fails holds up no other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, VolumeId
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.eviction.on_demand import evict_down_to
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(2, 2048)
BATCH = 8


class Failing(NvmeSlab):
    """A volume on a disk that takes no changes for a while."""

    fails = False

    def commit(self, added: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        if self.fails and (added or removed):
            raise OSError(5, "told to")
        super().commit(added, removed)


class Node:
    def __init__(
        self, folder: Path, policy: str = "reuse-distance", sizes: Sequence[int] = (1 << 20,) * 3, shape: BlockShape = SHAPE
    ) -> None:
        names = [VolumeId(f"n/nvme{number}") for number in range(len(sizes))]
        self.clock = ManualClock()
        self.counters = counters = Counters()
        log = ReplicaChangeLog([VolumeId("n/dram"), *names], counters, self.clock, keep=False)
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=1 << 20)
        self.slabs = [
            Failing.open(folder / name[2:], volume_id=name, capacity_bytes=size, io_threads=1)
            for name, size in zip(names, sizes, strict=True)
        ]
        for slab in self.slabs:
            assert list(slab.recover()) == []
        self.table = BlockTable(
            self.arena,
            make_policy(policy),
            [NodeVolume(slab) for slab in self.slabs],
            log,
            counters,
            self.clock,
            writes_behind=True,
            make_durable_policy=partial(make_policy, policy),
        )
        self.target = LocalTarget(self.table, counters, self.clock)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), shape)
        self.lengths: dict[int, int] = {}

    def close(self) -> None:
        self.table.check()
        self.table.close()
        for slab in self.slabs:
            slab.close()
        self.arena.close()

    def turn(self, chain: int, more: int) -> None:
        """A session goes on: what is no longer held of it is computed and stored again, and some blocks more."""
        shape = self.namespace.shape
        length = self.lengths[chain] = self.lengths.get(chain, 0) + more
        keys = tuple(key_of(chain, depth) for depth in range(length))
        known = {block.key for block in self.table.snapshot()}
        first = next((depth for depth, key in enumerate(keys) if key not in known), length)
        self.table.unpin(block for block in self.table.pin_resident(self.namespace, keys[:first]) if block is not None)
        for start in range(first, length, BATCH):
            run = BlockRun(self.namespace.namespace_id, keys[start - 1] if start else None, start, keys[start : start + BATCH])
            prepared = self.table.prepare(self.namespace, run, self.clock.now_s())
            sums = []
            for key, slot in prepared.slots.items():
                payload = hashlib.sha256(key).digest() * (shape.block_bytes // 32)
                self.arena.view(slot, shape.block_bytes)[:] = payload
                sums.append(layer_checksums(memoryview(payload), shape))
            self.table.complete(prepared, list(prepared.slots), sums)
            while blocks := self.table.take_pending(BATCH, 1 << 20, 0.0):
                self.target.persist(blocks, lambda: None)
        self.table.check()

    def durable(self) -> dict[BlockKey, Block]:
        return {block.key: block for block in self.table.snapshot() if block.nvme is not None}

    def unreachable(self) -> float:
        """Share of the durable blocks that no lookup finds, for an ancestor of theirs is nowhere."""
        durable, reached = self.durable(), set[BlockKey]()
        for block in sorted(self.table.snapshot(), key=lambda block: block.depth):
            if block.parent is None or block.parent in reached:
                reached.add(block.key)
        return 1 - len(durable.keys() & reached) / len(durable)

    def blocks_on(self) -> list[int]:
        return [slab.usage().blocks for slab in self.slabs]


def key_of(chain: int, depth: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{chain}/{depth}".encode()).digest()[:16])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_chains_leave_from_their_ends_over_all_volumes(node: Node) -> None:
    play(node, 120)
    assert min(node.blocks_on()) > 50, "all are in use"
    assert sum(node.lengths.values()) > 2 * sum(node.blocks_on()), "much has left"
    assert node.unreachable() < 0.12  # with an order for each volume by itself, 0.4 to 0.7


def play(node: Node, turns: int) -> None:
    """Sessions take turns."""
    draw = random.Random(7)
    for _ in range(turns):
        node.turn(draw.randrange(24), draw.randrange(1, 2 * BATCH))
        node.clock.advance(1.0)


@pytest.mark.parametrize("how", ["fails", "read-only"])
def test_a_volume_that_takes_no_changes_holds_up_no_other(node: Node, how: str) -> None:
    play(node, 80)
    bad = node.slabs[1]
    if how == "fails":
        bad.fails = True
    else:
        bad._read_only = "told to"
    held = node.blocks_on()[1]
    before = node.durable().keys()
    play(node, 80)
    assert node.blocks_on()[1] == held, "nothing came, nothing left"
    assert len(node.durable().keys() - before) > 50, "the others go on"
    node_volume = node.table.node_volumes[1]
    assert node_volume.aside, "what was met of it is out of the order"
    bad.fails, bad._read_only = False, None
    node.clock.advance(60.0)
    was_there = {block.key for block in node.table.snapshot() if block.nvme_volume is node_volume}
    play(node, 80)
    assert not node_volume.aside
    now = {block.key for block in node.table.snapshot() if block.nvme_volume is node_volume}
    assert was_there - now, "it takes part again"
    assert now - was_there


def test_one_volume_evicted_by_name_takes_nothing_from_the_others(node: Node) -> None:
    play(node, 80)
    before = node.blocks_on()
    capacity = node.slabs[0].usage().capacity_bytes
    done = evict_down_to(node.table, node.table.node_volumes[0], capacity // 4)
    assert node.slabs[0].usage().used_bytes <= capacity // 4
    assert node.blocks_on() == [before[0] - done.blocks, *before[1:]]
    node.table.check()


def test_blocks_go_to_the_volumes_that_can_hold_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path, sizes=(64 << 10, 1 << 20), shape=BlockShape(2, 64 << 10))
    for chain in range(20):  # more than the large one holds: once it has less room than the small one, it makes room
        node.turn(chain, 1)
        node.clock.advance(1.0)
        assert key_of(chain, 0) in node.durable()
    small, large = node.blocks_on()
    assert small == 0
    assert 0 < large < 20
    assert node.counters.get("write_behind_unfit_blocks_total") == node.counters.get("write_behind_errors_total") == 0
    node.close()
    assert not caplog.records


def test_blocks_that_no_volume_can_hold_are_given_up_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path, sizes=(64 << 10, 32 << 10), shape=BlockShape(2, 64 << 10))
    for chain in range(3):
        node.turn(chain, 1)
    assert not node.durable()
    assert node.table.counts() == (3, 0)
    assert node.counters.get("write_behind_unfit_blocks_total") == node.counters.get("write_behind_dropped_blocks_total") == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not any(node_volume.resting_until_s for node_volume in node.table.node_volumes)
    node.close()
