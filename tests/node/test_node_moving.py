"""What must leave a node that drains, and who takes it: held against the plain words of the rule."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.control.migration_plan import Moves, free_room, plan_moves, room_of

NAMESPACES = [NamespaceId(bytes([number]) * 16) for number in (1, 2)]


@dataclass(frozen=True)
class Held:
    """A block as the plan needs it."""

    namespace_id: NamespaceId
    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int


def forest(paths: list[tuple[int, list[int]]], sizes: tuple[int, int]) -> dict[BlockKey, Held]:
    """All blocks of some paths through a tree in each namespace; equal beginnings are equal blocks."""
    blocks: dict[BlockKey, Held] = {}
    for which, path in paths:
        parent: BlockKey | None = None
        for depth in range(len(path)):
            digest = hashlib.sha256(repr((which, path[: depth + 1])).encode()).digest()
            key = BlockKey(digest[:16])
            blocks.setdefault(key, Held(NAMESPACES[which], key, parent, depth, sizes[which]))
            parent = key
    return blocks


paths = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=12)


@given(
    paths=paths,
    sizes=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    picked=st.sets(st.integers(0, 80)),
    room=st.dictionaries(st.sampled_from("abc").map(NodeId), st.integers(0, 200_000), max_size=3),
    window=st.integers(1, 60_000),
    most=st.integers(1, 8),
    absent=st.sets(st.integers(0, 80)),
)
def test_all_that_lies_nowhere_else_goes_once_and_where_there_is_room(
    paths: list[tuple[int, list[int]]],
    sizes: tuple[int, int],
    picked: set[int],
    room: dict[NodeId, int],
    window: int,
    most: int,
    absent: set[int],
) -> None:
    everything = forest(paths, sizes)
    order = sorted(everything)
    held = [everything[key] for at, key in enumerate(order) if at not in absent]  # parents may lie elsewhere
    safe = {key for at, key in enumerate(order) if at in picked}
    moves: Moves[Held] = plan_moves(held, safe, room, window, most)
    planned = [block for batch in moves.batches for block in batch.blocks]
    must = {block.key for block in held if block.key not in safe}
    # each block that must go goes once or is said to be left; nothing else does
    assert sorted(block.key for block in (*planned, *moves.left)) == sorted(must)
    # nobody takes more than it has room for
    for node_id in {batch.node_id for batch in moves.batches}:
        assert sum(room_of(block.nbytes) for b in moves.batches if b.node_id == node_id for block in b.blocks) <= room[node_id]
    # batches are of one namespace and within the window; one that is larger is a block by itself
    for batch in moves.batches:
        assert {block.namespace_id for block in batch.blocks} == {batch.namespace_id}
        assert 1 <= len(batch.blocks) <= most
        assert sum(block.nbytes for block in batch.blocks) <= window or len(batch.blocks) == 1
    # a parent that must go has gone before its child
    gone: set[BlockKey] = set()
    for block in planned:
        assert block.parent is None or block.parent not in must or block.parent in gone
        gone.add(block.key)
    # what is left found no room when its turn came, or its parent did not
    left = {block.key for block in moves.left}
    roomiest = max((room[one] - _taken(moves, one) for one in room), default=0)
    for block in moves.left:
        assert block.parent in left or roomiest < room_of(block.nbytes)


def _taken(moves: Moves[Held], node_id: NodeId) -> int:
    return sum(room_of(block.nbytes) for batch in moves.batches if batch.node_id == node_id for block in batch.blocks)


def test_what_fits_into_one_batch_goes_to_the_roomiest_node_together() -> None:
    held = list(forest([(0, [0] * 6)], (4096, 1)).values())
    moves = plan_moves(held, set(), {NodeId("a"): 1 << 20, NodeId("b"): 2 << 20}, 1 << 20, 100)
    assert [(batch.node_id, [block.depth for block in batch.blocks]) for batch in moves.batches] == [("b", list(range(6)))]


def test_without_takers_all_is_left() -> None:
    held = list(forest([(0, [0] * 6)], (4096, 1)).values())
    assert len(plan_moves(held, set(), {}, 1 << 20, 100).left) == 6


def test_a_volume_is_not_filled_to_the_brim() -> None:
    assert free_room(1600, 0) == 1500
    assert free_room(1600, 1490) == 10
    assert free_room(1600, 1600) == 0


def test_blocks_that_are_each_others_parents_are_moved_or_left_like_any_other() -> None:
    """Keys are opaque: a client may say so."""
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
    assert {block.key for block in plan_moves([*odd, *sound], set(), {}, 1 << 20, 100).left} == keys
