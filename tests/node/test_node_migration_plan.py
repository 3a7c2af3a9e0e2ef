"""The plan of a migration, compared with its rules."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.control.migration_plan import MigrationBatches, free_space, plan_moves, slot_space

NAMESPACES = [NamespaceId(bytes([number]) * 16) for number in (1, 2)]


@dataclass(frozen=True)
class Held:
    """A block, as the plan sees it."""

    namespace_id: NamespaceId
    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int


def forest(paths: list[tuple[int, list[int]]], sizes: tuple[int, int]) -> dict[BlockKey, Held]:
    """Return the blocks of paths through a tree per namespace. Equal prefixes are equal blocks."""
    blocks: dict[BlockKey, Held] = {}
    for number, path in paths:
        parent: BlockKey | None = None
        for depth in range(len(path)):
            digest = hashlib.sha256(repr((number, path[: depth + 1])).encode()).digest()
            key = BlockKey(digest[:16])
            blocks.setdefault(key, Held(NAMESPACES[number], key, parent, depth, sizes[number]))
            parent = key
    return blocks


paths = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=12)


@given(
    paths=paths,
    sizes=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    picked=st.sets(st.integers(0, 80)),
    free=st.dictionaries(st.sampled_from("abc").map(NodeId), st.integers(0, 200_000), max_size=3),
    window=st.integers(1, 60_000),
    most=st.integers(1, 8),
    absent=st.sets(st.integers(0, 80)),
)
def test_plan_moves_each_block_once_within_free_space(
    paths: list[tuple[int, list[int]]],
    sizes: tuple[int, int],
    picked: set[int],
    free: dict[NodeId, int],
    window: int,
    most: int,
    absent: set[int],
) -> None:
    blocks_by_key = forest(paths, sizes)
    order = sorted(blocks_by_key)
    held = [blocks_by_key[key] for at, key in enumerate(order) if at not in absent]  # parents may be on other nodes
    safe = {key for at, key in enumerate(order) if at in picked}
    moves: MigrationBatches[Held] = plan_moves(held, safe, free, window, most)
    planned = [block for batch in moves.batches for block in batch.blocks]
    must = {block.key for block in held if block.key not in safe}
    # each block that must move is in one batch or unplaced, and no other block is
    assert sorted(block.key for block in (*planned, *moves.unplaced)) == sorted(must)
    # no node gets more than its free space
    for node_id in {batch.node_id for batch in moves.batches}:
        assert sum(slot_space(block.nbytes) for b in moves.batches if b.node_id == node_id for block in b.blocks) <= free[node_id]
    # a batch has one namespace and fits in the window, or is one larger block
    for batch in moves.batches:
        assert {block.namespace_id for block in batch.blocks} == {batch.namespace_id}
        assert 1 <= len(batch.blocks) <= most
        assert sum(block.nbytes for block in batch.blocks) <= window or len(batch.blocks) == 1
    # a parent moves before its child
    moved: set[BlockKey] = set()
    for block in planned:
        assert block.parent is None or block.parent not in must or block.parent in moved
        moved.add(block.key)
    # an unplaced block, or its parent, did not fit anywhere
    unplaced = {block.key for block in moves.unplaced}
    most_free = max((free[one] - _planned(moves, one) for one in free), default=0)
    for block in moves.unplaced:
        assert block.parent in unplaced or most_free < slot_space(block.nbytes)


def _planned(moves: MigrationBatches[Held], node_id: NodeId) -> int:
    return sum(slot_space(block.nbytes) for batch in moves.batches if batch.node_id == node_id for block in batch.blocks)


def test_plan_fills_the_emptiest_node_first() -> None:
    held = list(forest([(0, [0] * 6)], (4096, 1)).values())
    moves = plan_moves(held, set(), {NodeId("a"): 1 << 20, NodeId("b"): 2 << 20}, 1 << 20, 100)
    assert [(batch.node_id, [block.depth for block in batch.blocks]) for batch in moves.batches] == [("b", list(range(6)))]


def test_plan_without_targets_places_nothing() -> None:
    held = list(forest([(0, [0] * 6)], (4096, 1)).values())
    assert len(plan_moves(held, set(), {}, 1 << 20, 100).unplaced) == 6


def test_free_space_keeps_a_reserve() -> None:
    assert free_space(1600, 0) == 1500
    assert free_space(1600, 1490) == 10
    assert free_space(1600, 1600) == 0


def test_plan_with_parent_cycles_handles_every_block() -> None:
    """Keys are opaque: a client may send such parents."""
    sound = list(forest([(0, [0] * 3)], (4096, 1)).values())
    first, second, below = (BlockKey(bytes([number]) * 16) for number in (1, 2, 3))
    odd = [
        Held(NAMESPACES[0], first, second, 2, 4096),
        Held(NAMESPACES[0], second, first, 1, 4096),
        Held(NAMESPACES[0], below, second, 2, 4096),
    ]
    keys = {block.key for block in (*sound, *odd)}
    moves = plan_moves([*odd, *sound], set(), {NodeId("a"): 1 << 20}, 1 << 20, 100)
    assert {block.key for batch in moves.batches for block in batch.blocks} == keys
    assert {block.key for block in plan_moves([*odd, *sound], set(), {}, 1 << 20, 100).unplaced} == keys
