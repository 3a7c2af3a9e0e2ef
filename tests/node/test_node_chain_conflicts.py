"""Chain conflicts: the first writer of a key decides its namespace, parent and depth; another claim is refused."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Conflict
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, StoreOutcome, Tier
from kvstore.node.eviction.operator_requests import evict_tier, invalidate
from kvstore.node.state.grants import SlotGrant
from support.node_harness import MIB, NodeHarness

SHAPE = BlockShape(1, 4096)
BLOCKS = 24
KEYS = tuple(BlockKey(hashlib.sha256(bytes([number])).digest()[:16]) for number in range(BLOCKS))
NAMESPACE, OTHER = NamespaceId(bytes([0]) * 16), NamespaceId(bytes([1]) * 16)
STRANGER = BlockKey(b"never stored....")
EXISTS, STORED, SKIPPED = StoreOutcome.EXISTS, StoreOutcome.STORED, StoreOutcome.SKIPPED


class Node(NodeHarness):
    """A node with one volume and two namespaces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, volumes=[MIB], shapes=[SHAPE, SHAPE], arena_bytes=4 * BLOCKS * SHAPE.block_bytes)

    def begin(self, run: BlockRun) -> SlotGrant:
        (namespace,) = (one for one in self.namespaces if one.namespace_id == run.namespace)
        return self.table.prepare(namespace, run, self.clock.now_s())

    def end(self, grant: SlotGrant) -> None:
        self.write(grant)
        self.complete(grant)

    def store_run(self, run: BlockRun) -> list[StoreOutcome]:
        grant = self.begin(run)
        self.end(grant)
        return grant.outcomes

    def evict_all(self) -> None:
        self.write_back()
        evict_tier(self.table, Tier.DRAM)
        evict_tier(self.table, Tier.NVME)

    def positions(self) -> dict[BlockKey, tuple[BlockKey | None, int]]:
        """Return parent and depth of each block."""
        return {block.key: (block.parent, block.depth) for block in self.table.snapshot()}


def chained(first: int, count: int) -> BlockRun:
    return BlockRun(NAMESPACE, KEYS[first - 1] if first else None, first, KEYS[first : first + count])


def without_parent(first: int, count: int = BLOCKS) -> BlockRun:
    return BlockRun(NAMESPACE, None, 0, KEYS[first : first + count])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
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
    node.store_run(without_parent(12, 4))
    assert node.store_run(chained(8, 16)) == [STORED] * 4 + [SKIPPED] * 12
    assert node.counters.get("store_conflicts_total") == 0, "the writer asks for the rest, and is refused then"


def test_store_heads_have_no_parent(node: Node) -> None:
    def begin(count: int) -> SlotGrant:
        return node.table.prepare(node.namespace, without_parent(0, count), node.clock.now_s(), heads=True)

    node.end(begin(3))
    grant = begin(5)
    assert grant.outcomes == [EXISTS] * 3 + [STORED] * 2
    node.end(grant)
    assert set(node.positions().values()) == {(None, 0)}


def test_store_key_of_other_namespace_is_refused(node: Node) -> None:
    theirs = BlockRun(OTHER, None, 0, KEYS[:4])
    writing = node.begin(chained(0, 4))
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(theirs)
    node.end(writing)
    with pytest.raises(Conflict, match="another namespace"):
        node.begin(theirs)
    mixed = BlockRun(OTHER, None, 0, (BlockKey(b"its own key....."), *KEYS[:4]))
    assert node.begin(mixed).outcomes == [STORED] + [SKIPPED] * 4


def test_store_evicted_key_is_claimed_by_the_next_writer(node: Node) -> None:
    node.store_run(without_parent(10, 4))
    node.evict_all()
    assert node.table.snapshot() == []
    assert node.store_run(chained(10, 4)) == [STORED] * 4


positions = st.one_of(
    st.tuples(st.just(None), st.just(0)),
    st.tuples(st.just(STRANGER), st.integers(1, 30)),
    st.tuples(st.sampled_from(KEYS), st.integers(1, 30)),
)
steps = st.one_of(
    st.tuples(st.just("wrong"), st.integers(0, BLOCKS - 1), st.integers(1, 12), positions),
    st.tuples(st.just("right"), st.integers(0, BLOCKS - 1), st.integers(1, 12), positions),
    st.tuples(st.sampled_from(("write", "evict", "evict all", "pin", "unpin", "abandon")), st.integers(0, BLOCKS - 1)),
)


@given(st.lists(steps, max_size=30))
def test_store_any_claims_first_one_stays(history: list[tuple[object, ...]]) -> None:
    """A held key keeps its parent and depth after any claims, every byte is the key's own, and eviction frees all keys."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        pinned = []
        for step in history:
            before = node.positions()
            match step:
                case ("write", _):
                    node.write_back()
                case ("evict", _):
                    evict_tier(node.table, Tier.DRAM)
                case ("evict all", _):
                    node.evict_all()
                case ("pin", int(first)):
                    pinned += [
                        each for each in node.table.pin_resident(node.namespace, KEYS[first : first + 3]) if each is not None
                    ]
                case ("unpin", _):
                    node.table.unpin(pinned)
                    pinned = []
                case ("abandon", int(first)):
                    attempt(node, chained(first, 4), abandon=True)
                case ("right", int(first), int(count), _):
                    attempt(node, chained(first, count))
                case ("wrong", int(first), int(count), (parent, depth)):
                    run = BlockRun(NAMESPACE, parent, depth, KEYS[first : first + count])  # type: ignore[arg-type]
                    attempt(node, run)
            after = node.positions()
            assert all(after[key] == position for key, position in before.items() if key in after)
            node.table.validate()
            check_bytes(node)
        node.table.unpin(pinned)
        node.write_back()
        invalidate(node.table, node.namespace, node.clock.now_s())
        assert node.store_run(chained(0, BLOCKS)) == [STORED] * BLOCKS
        node.write_back()
        node.close()
        restarted = Node(Path(folder))
        assert restarted.positions() == {key: (KEYS[depth - 1] if depth else None, depth) for depth, key in enumerate(KEYS)}
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
    assert all(node.is_right(block) for block in node.table.snapshot() if block.dram is not None)
