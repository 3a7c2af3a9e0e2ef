"""One key, two claims of its place in a chain: whatever slips came first, a writer that is right is found in the end."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey, BlockRun, BlockShape, BootId, NamespaceId, NodeId, StoreOutcome, Tier, VolumeId
from kvstore.index.lmdb import LmdbIndex
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.state.chain_conflicts import PATIENCE
from kvstore.node.state.change_log import ReplicaChangeLog, runs_of
from kvstore.node.state.model import NodeVolume, StoreGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(1, 4096)
NAMESPACE = NodeNamespace(NamespaceId(b"n" * 16), SHAPE, None)
OTHER = NodeNamespace(NamespaceId(b"o" * 16), SHAPE, None)
DRAM, NVME = VolumeId("n/dram"), VolumeId("n/nvme0")
BLOCKS = 24
KEYS = tuple(BlockKey(hashlib.sha256(bytes([number])).digest()[:16]) for number in range(BLOCKS))
STRANGER = BlockKey(b"never stored....")


class Node:
    """A table over a real arena and slab, and a real index that is told what its publisher would tell it."""

    def __init__(self, path: Path, index: LmdbIndex, boot: int = 0) -> None:
        self.counters, self.clock, self.index = Counters(), ManualClock(), index
        self.log = ReplicaChangeLog([DRAM, NVME], self.counters, self.clock)
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=4 * BLOCKS * SHAPE.block_bytes)
        self.slab = NvmeSlab.open(path, volume_id=NVME, capacity_bytes=1 << 20, io_threads=1)
        node_volume = NodeVolume(self.slab)
        self.table = BlockTable(
            self.arena, make_policy("lru"), [node_volume], self.log, self.counters, self.clock, writes_behind=True
        )
        for slot, record in self.slab.recover():
            self.table.restore(node_volume, NAMESPACE, record, slot)
        self.target = LocalTarget(self.table, self.counters, self.clock)
        tiers = {DRAM: Tier.DRAM, NVME: Tier.NVME}
        self.volume_epochs = {
            volume: index.open_volume_epoch(volume, NodeId("n"), tier, BootId(bytes([boot]) * 16))
            for volume, tier in tiers.items()
        }

    def begin(self, run: BlockRun, namespace: NodeNamespace = NAMESPACE) -> StoreGrant:
        return self.table.prepare(namespace, run, self.clock.now_s())

    def end(self, prepared: StoreGrant) -> None:
        keys = list(prepared.slots)
        for key, slot in prepared.slots.items():
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload_of(key)
        self.table.complete(prepared, keys, [layer_checksums(memoryview(payload_of(key)), SHAPE) for key in keys])

    def store(self, run: BlockRun) -> list[StoreOutcome]:
        prepared = self.begin(run)
        self.end(prepared)
        return prepared.outcomes

    def write_behind(self) -> None:
        while blocks := self.table.take_pending(8, 1 << 20, 0.0):
            self.target.persist(blocks, lambda: None)

    def publish(self) -> None:
        for taken in self.log.take(1000):
            self.index.publish(self.volume_epochs[taken.volume], taken.stored, taken.removed)
            self.log.acknowledge(taken.volume, taken.events)

    def publish_all(self) -> None:
        while self.log.waiting():
            self.publish()

    def found(self) -> int:
        return self.index.lookup(NAMESPACE.namespace_id, b"".join(KEYS), set(self.volume_epochs.values())).blocks

    def inventory(self) -> None:
        """As after the loss of an index."""
        for volume, volume_epoch in self.volume_epochs.items():
            held = [block for block in self.table.snapshot() if (block.dram if volume == DRAM else block.nvme) is not None]
            self.index.publish(volume_epoch, runs_of(sorted(held, key=lambda block: block.depth)), [])

    def close(self) -> None:
        self.table.check()
        self.table.close()
        self.slab.close()
        self.arena.close()


def payload_of(key: BlockKey) -> bytes:
    return (hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32))[: SHAPE.block_bytes]


def right(first: int, count: int) -> BlockRun:
    return BlockRun(NAMESPACE.namespace_id, KEYS[first - 1] if first else None, first, KEYS[first : first + count])


def forgotten(first: int, count: int = BLOCKS) -> BlockRun:
    return BlockRun(NAMESPACE.namespace_id, None, 0, KEYS[first : first + count])


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    index = LmdbIndex.open(tmp_path / "index")
    yield index
    index.close()


@pytest.fixture
def node(tmp_path: Path, index: LmdbIndex) -> Iterator[Node]:
    node = Node(tmp_path / "slab", index)
    yield node
    node.close()


def test_heads_of_chains_take_their_places_together(node: Node) -> None:
    def begin(count: int) -> StoreGrant:
        return node.table.prepare(NAMESPACE, forgotten(0, count), node.clock.now_s(), heads=True)

    node.end(begin(3))
    prepared = begin(5)
    assert prepared.outcomes == [StoreOutcome.EXISTS] * 3 + [StoreOutcome.STORED] * 2
    node.end(prepared)
    node.write_behind()
    node.publish_all()
    volume_epochs = set(node.volume_epochs.values())
    assert [node.index.lookup(NAMESPACE.namespace_id, key, volume_epochs).blocks for key in KEYS[:6]] == [1, 1, 1, 1, 1, 0]
    assert {(block.parent, block.depth) for block in node.table.snapshot()} == {(None, 0)}
    assert node.store(right(0, 2)) == [StoreOutcome.EXISTS, StoreOutcome.STORED], "who knows the chain puts them into it"


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("in_dram", [False, True])
def test_a_forgotten_parent_is_mended_by_the_store_that_has_it(
    index: LmdbIndex, tmp_path: Path, *, durable: bool, in_dram: bool
) -> None:
    node = Node(tmp_path / "slab", index)
    assert node.store(right(0, 10)) == [StoreOutcome.STORED] * 10
    assert node.store(forgotten(10)) == [StoreOutcome.STORED] * 14
    if durable or not in_dram:
        node.write_behind()
    if not in_dram:
        node.table.evict_dram()
    node.publish_all()
    assert node.found() == 10
    if not durable and in_dram:  # its blocks are about to be written behind: in use, until that is done
        with pytest.raises(Conflict, match="in use"):
            node.begin(right(10, 14))
        node.write_behind()
    assert node.store(right(10, 14)) == [StoreOutcome.STORED] * 14
    node.write_behind()
    node.publish_all()
    assert node.found() == BLOCKS
    assert node.counters.get("store_displaced_blocks_total") == 14
    assert not node.table.node_volumes[0].outdated.slots()
    assert node.slab.usage().blocks == BLOCKS
    assert node.store(right(0, BLOCKS)) == [StoreOutcome.EXISTS] * BLOCKS
    node.close()
    again = LmdbIndex.open(tmp_path / "another index")
    restarted = Node(tmp_path / "slab", again, boot=1)
    restarted.inventory()
    assert restarted.found() == BLOCKS
    restarted.close()
    again.close()


def test_what_is_pinned_stays_and_the_writer_is_told(node: Node) -> None:
    node.store(forgotten(10))
    node.write_behind()
    node.store(right(0, 10))
    node.write_behind()
    (pinned,) = node.table.pin_resident(NAMESPACE, KEYS[12:13])
    assert pinned is not None
    assert node.store(right(8, 16))[:5] == [StoreOutcome.EXISTS] * 2 + [StoreOutcome.STORED] * 2 + [StoreOutcome.SKIPPED]
    with pytest.raises(Conflict, match="in use"):
        node.begin(right(12, 12))
    assert node.counters.get("store_conflicts_total") == 1
    node.table.unpin([pinned])
    assert node.store(right(12, 12)) == [StoreOutcome.STORED] * 12


def test_a_slip_harms_nothing_that_stands_behind_its_parent(node: Node) -> None:
    node.store(right(0, BLOCKS))
    node.write_behind()
    for _ in range(PATIENCE):
        with pytest.raises(Conflict, match="behind its parent"):
            node.begin(forgotten(10))
    node.publish_all()
    assert node.found() == BLOCKS
    # but what stands behind a parent may be the slip: in the end it gives way, and is mended again
    assert set(node.store(forgotten(10))) == {StoreOutcome.STORED}
    node.write_behind()
    assert set(node.store(right(10, 14))) == {StoreOutcome.STORED}
    node.publish_all()
    assert node.found() == BLOCKS


def test_a_key_being_written_elsewhere_is_not_taken_for_this_one(node: Node) -> None:
    slip = node.begin(forgotten(10))
    with pytest.raises(Conflict, match="being written"):
        node.begin(right(10, 14))
    assert node.begin(forgotten(10)).outcomes == [StoreOutcome.IN_PROGRESS] * 14
    node.table.abandon(slip)
    assert set(node.store(right(10, 14))) == {StoreOutcome.STORED}


def test_a_key_of_another_namespace_is_refused_by_name(node: Node) -> None:
    writing = node.begin(right(0, 4))
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(BlockRun(OTHER.namespace_id, None, 0, KEYS[:4]), OTHER)
    node.end(writing)
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(BlockRun(OTHER.namespace_id, None, 0, KEYS[:4]), OTHER)
    mixed = (BlockKey(b"its own key....."), *KEYS[:4])
    assert (
        node.begin(BlockRun(OTHER.namespace_id, None, 0, mixed), OTHER).outcomes
        == [StoreOutcome.STORED] + [StoreOutcome.SKIPPED] * 4
    )
    assert node.counters.get("store_conflicts_total") == 2


def test_slots_of_displaced_blocks_are_used_again_even_if_nothing_else_may_leave(tmp_path: Path, index: LmdbIndex) -> None:
    node = Node(tmp_path / "slab", index)
    node.store(forgotten(1))
    node.write_behind()
    abandoned = node.begin(right(1, BLOCKS - 1))
    node.table.abandon(abandoned)
    node_volume = node.table.node_volumes[0]
    assert len(node_volume.outdated.slots()) == BLOCKS - 1
    taken = []
    while slots := node.slab.allocate(SHAPE, 1):
        taken += slots
    node.store(right(0, 4))
    node.write_behind()
    assert node.counters.get("write_behind_dropped_blocks_total") == 0
    assert all(node.table.are_durable(KEYS[:4]))
    node.slab.free(taken)
    node.close()


places = st.one_of(
    st.tuples(st.just(None), st.just(0)),
    st.tuples(st.just(STRANGER), st.integers(1, 30)),
    st.tuples(st.sampled_from(KEYS), st.integers(1, 30)),
)
steps = st.one_of(
    st.tuples(st.just("slip"), st.integers(0, BLOCKS - 1), st.integers(1, 12), places),
    st.tuples(st.just("right"), st.integers(0, BLOCKS - 1), st.integers(1, 12), places),
    st.tuples(st.sampled_from(("write", "evict", "publish", "pin", "unpin", "abandon")), st.integers(0, BLOCKS - 1)),
)


@given(st.lists(steps, max_size=30))
def test_after_any_slips_a_writer_that_is_right_is_found(history: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = LmdbIndex.open(Path(folder) / "index")
        node = Node(Path(folder) / "slab", index)
        pinned = []
        for step in history:
            match step:
                case ("slip", int(first), int(count), (parent, depth)):
                    run = BlockRun(NAMESPACE.namespace_id, parent, depth, KEYS[first : first + count])  # type: ignore[arg-type]
                case ("right", int(first), int(count), _):
                    run = right(first, count)
                case ("abandon", int(first)):
                    run = right(first, 4)
                case ("write", _):
                    node.write_behind()
                    continue
                case ("evict", _):
                    node.table.evict_dram()
                    continue
                case ("publish", _):
                    node.publish()
                    continue
                case ("pin", int(first)):
                    pinned += [
                        block for block in node.table.pin_resident(NAMESPACE, KEYS[first : first + 3]) if block is not None
                    ]
                    continue
                case _:
                    node.table.unpin(pinned)
                    pinned = []
                    continue
            try:
                prepared = node.begin(run)
            except Conflict:
                continue
            if step[0] == "abandon":
                node.table.abandon(prepared)
            else:
                node.end(prepared)
            node.table.check()
        node.table.unpin(pinned)
        node.write_behind()
        for _ in range(PATIENCE + 1):  # as a writer does that comes again
            try:
                node.store(right(0, BLOCKS))
            except Conflict:
                continue
        node.write_behind()
        assert node.store(right(0, BLOCKS)) == [StoreOutcome.EXISTS] * BLOCKS
        blocks = {block.key: block for block in node.table.snapshot()}
        for depth, key in enumerate(KEYS):
            assert (blocks[key].depth, blocks[key].parent) == (depth, KEYS[depth - 1] if depth else None)
            assert blocks[key].durable
        node.publish_all()
        rebuilt = LmdbIndex.open(Path(folder) / "rebuilt")
        node.index = rebuilt
        node.volume_epochs = {
            volume: rebuilt.open_volume_epoch(volume, NodeId("n"), Tier.DRAM, BootId(b"r" * 16)) for volume in node.volume_epochs
        }
        node.inventory()
        assert node.found() == BLOCKS
        node.close()
        restarted = Node(Path(folder) / "slab", index, boot=2)
        restarted.inventory()
        assert restarted.found() == BLOCKS, "what is durable is durable at its place"
        restarted.close()
        index.close()
        rebuilt.close()
