"""Chain conflicts: the first writer of a key decides its namespace, parent and depth; another claim is refused."""

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
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, StoreOutcome, Tier, VolumeId
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.eviction.execution import evict_tier, invalidate
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
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
EXISTS, STORED, SKIPPED = StoreOutcome.EXISTS, StoreOutcome.STORED, StoreOutcome.SKIPPED


class Node:
    """A table over a real arena and a real slab."""

    def __init__(self, path: Path) -> None:
        self.counters, self.clock = Counters(), ManualClock()
        log = ReplicaChangeLog([DRAM, NVME], self.counters, self.clock, keep=False)
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=4 * BLOCKS * SHAPE.block_bytes)
        self.slab = NvmeSlab.open(path, volume_id=NVME, capacity_bytes=1 << 20, io_threads=1)
        volume = NodeVolume(self.slab)
        residency = Residency(self.arena, make_policy("lru"), [volume], log, self.counters, self.clock)
        self.table = BlockTable(residency, writes_back=True)
        for slot, record in self.slab.recover():
            self.table.restore(volume, NAMESPACE, record, slot)
        self.target = LocalTarget(self.table, self.counters, self.clock)

    def begin(self, run: BlockRun, namespace: NodeNamespace = NAMESPACE) -> SlotGrant:
        return self.table.prepare(namespace, run, self.clock.now_s())

    def end(self, grant: SlotGrant) -> None:
        keys = list(grant.slots)
        for key, slot in grant.slots.items():
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload_of(key)
        self.table.complete(grant, keys, [layer_checksums(memoryview(payload_of(key)), SHAPE) for key in keys])

    def store(self, run: BlockRun) -> list[StoreOutcome]:
        grant = self.begin(run)
        self.end(grant)
        return grant.outcomes

    def write_back(self) -> None:
        while blocks := self.table.take_pending(8, 1 << 20, 0.0):
            self.target.persist(blocks, lambda: None)

    def evict_all(self) -> None:
        self.write_back()
        evict_tier(self.table, Tier.DRAM)
        evict_tier(self.table, Tier.NVME)

    def places(self) -> dict[BlockKey, tuple[BlockKey | None, int]]:
        return {block.key: (block.parent, block.depth) for block in self.table.snapshot()}

    def close(self) -> None:
        self.table.validate()
        self.table.close()
        self.slab.close()
        self.arena.close()


def payload_of(key: BlockKey) -> bytes:
    return (hashlib.sha256(key).digest() * (SHAPE.block_bytes // 32))[: SHAPE.block_bytes]


def chained(first: int, count: int) -> BlockRun:
    return BlockRun(NAMESPACE.namespace_id, KEYS[first - 1] if first else None, first, KEYS[first : first + count])


def without_parent(first: int, count: int = BLOCKS) -> BlockRun:
    return BlockRun(NAMESPACE.namespace_id, None, 0, KEYS[first : first + count])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "slab")
    yield node
    node.close()


@pytest.mark.parametrize("first", [chained(10, 4), without_parent(10, 4)])
def test_store_other_parent_is_refused(node: Node, first: BlockRun) -> None:
    second = without_parent(10, 4) if first.depth else chained(10, 4)
    writing = node.begin(first)
    with pytest.raises(Conflict, match="another parent or depth"):
        node.begin(second)
    node.end(writing)
    for step in (lambda: None, node.write_back, lambda: evict_tier(node.table, Tier.DRAM)):
        step()
        with pytest.raises(Conflict, match="another parent or depth"):
            node.begin(second)
        assert node.begin(first).outcomes == [EXISTS] * 4
    assert node.counters.get("store_conflicts_total") == 4


def test_store_conflict_later_in_run_ends_the_run(node: Node) -> None:
    node.store(without_parent(12, 4))
    assert node.store(chained(8, 16)) == [STORED] * 4 + [SKIPPED] * 12
    assert node.counters.get("store_conflicts_total") == 0, "the writer asks for the rest, and is refused then"


def test_store_heads_have_no_parent(node: Node) -> None:
    def begin(count: int) -> SlotGrant:
        return node.table.prepare(NAMESPACE, without_parent(0, count), node.clock.now_s(), heads=True)

    node.end(begin(3))
    grant = begin(5)
    assert grant.outcomes == [EXISTS] * 3 + [STORED] * 2
    node.end(grant)
    assert set(node.places().values()) == {(None, 0)}


def test_store_key_of_other_namespace_is_refused(node: Node) -> None:
    theirs = BlockRun(OTHER.namespace_id, None, 0, KEYS[:4])
    writing = node.begin(chained(0, 4))
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(theirs, OTHER)
    node.end(writing)
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(theirs, OTHER)
    mixed = BlockRun(OTHER.namespace_id, None, 0, (BlockKey(b"its own key....."), *KEYS[:4]))
    assert node.begin(mixed, OTHER).outcomes == [STORED] + [SKIPPED] * 4


def test_store_evicted_key_is_claimed_by_the_next_writer(node: Node) -> None:
    node.store(without_parent(10, 4))
    node.evict_all()
    assert node.table.snapshot() == []
    assert node.store(chained(10, 4)) == [STORED] * 4


places = st.one_of(
    st.tuples(st.just(None), st.just(0)),
    st.tuples(st.just(STRANGER), st.integers(1, 30)),
    st.tuples(st.sampled_from(KEYS), st.integers(1, 30)),
)
steps = st.one_of(
    st.tuples(st.just("wrong"), st.integers(0, BLOCKS - 1), st.integers(1, 12), places),
    st.tuples(st.just("right"), st.integers(0, BLOCKS - 1), st.integers(1, 12), places),
    st.tuples(st.sampled_from(("write", "evict", "evict all", "pin", "unpin", "abandon")), st.integers(0, BLOCKS - 1)),
)


@given(st.lists(steps, max_size=30))
def test_store_any_claims_first_one_stays(history: list[tuple[object, ...]]) -> None:
    """After any claims, a key that is held keeps its place, every byte is the key's own, and all keys are free after eviction."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder) / "slab")
        pinned = []
        for step in history:
            before = node.places()
            match step:
                case ("write", _):
                    node.write_back()
                case ("evict", _):
                    evict_tier(node.table, Tier.DRAM)
                case ("evict all", _):
                    node.evict_all()
                case ("pin", int(first)):
                    pinned += [each for each in node.table.pin_resident(NAMESPACE, KEYS[first : first + 3]) if each is not None]
                case ("unpin", _):
                    node.table.unpin(pinned)
                    pinned = []
                case ("abandon", int(first)):
                    attempt(node, chained(first, 4), abandon=True)
                case ("right", int(first), int(count), _):
                    attempt(node, chained(first, count))
                case ("wrong", int(first), int(count), (parent, depth)):
                    run = BlockRun(NAMESPACE.namespace_id, parent, depth, KEYS[first : first + count])  # type: ignore[arg-type]
                    attempt(node, run)
            after = node.places()
            assert all(after[key] == place for key, place in before.items() if key in after)
            node.table.validate()
            check_bytes(node)
        node.table.unpin(pinned)
        node.write_back()
        invalidate(node.table, NAMESPACE, node.clock.now_s())
        assert node.store(chained(0, BLOCKS)) == [STORED] * BLOCKS
        node.write_back()
        node.close()
        restarted = Node(Path(folder) / "slab")
        assert restarted.places() == {key: (KEYS[depth - 1] if depth else None, depth) for depth, key in enumerate(KEYS)}
        restarted.close()


def attempt(node: Node, run: BlockRun, *, abandon: bool = False) -> None:
    try:
        grant = node.begin(run)
    except Conflict:
        return
    if abandon:
        node.table.abandon(grant)
    else:
        node.end(grant)


def check_bytes(node: Node) -> None:
    for block in node.table.snapshot():
        if block.dram is not None:
            assert bytes(node.arena.view(block.dram, SHAPE.block_bytes)) == payload_of(block.key)
