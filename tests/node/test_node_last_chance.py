"""What a node does for its blocks at its end: the hottest of DRAM outlive it, whatever left the volumes before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_node_durable_room import SHAPE, Failing, Node, key_of
from test_node_tenants import Node as TenantsNode

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey, NamespaceId, VolumeId
from kvstore.node.durability import shutdown_flush as last_chance
from kvstore.node.durability.shutdown_flush import _hottest_first, make_durable
from kvstore.node.durability.shutdown_selection import what_stays
from kvstore.node.durability.writeback import Target, WriteBehind
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab

POLICIES = ("reuse-distance", "s3-fifo", "lru")
DEADLINE_S = 60.0


@contextmanager
def writing(table: BlockTable, target: Target) -> Iterator[None]:
    """The threads of write-behind, as a daemon has them."""
    writer = WriteBehind(table, target, Counters())
    writer.start()
    try:
        yield
    finally:
        writer.stop(10.0)


def never(_seconds: float) -> None:
    raise Internal("nothing fails: there is nothing to wait for")


def end(node: Node | TenantsNode, sleep: Callable[[float], None] = never) -> tuple[bool, int]:
    """The node's end: whether it was in time, and how many blocks were saved by it."""
    with writing(node.table, node.target):
        found = make_durable(node.table, node.clock, node.clock.now_s() + DEADLINE_S, sleep)
    node.table.check()
    return found


def use(node: Node, chain: int, length: int) -> int:
    """Loads what lies in DRAM of a chain; how many blocks."""
    found = node.table.pin_resident(node.namespace, [key_of(chain, depth) for depth in range(length)])
    node.table.unpin([block for block in found if block is not None])
    return sum(block is not None for block in found)


def recovered(folder: Path, sizes: tuple[int, ...]) -> set[BlockKey]:
    """What the next process finds."""
    found: set[BlockKey] = set()
    for number, size in enumerate(sizes):
        name = VolumeId(f"n/nvme{number}")
        slab = NvmeSlab.open(folder / name[2:], volume_id=name, capacity_bytes=size, io_threads=1)
        found |= {record.key for _, record in slab.recover()}
        slab.close()
    return found


def slots_of(folder: Path, size: int) -> int:
    """Blocks that a volume of a size holds."""
    slab = NvmeSlab.open(folder, volume_id=VolumeId("n/empty"), capacity_bytes=size, io_threads=1)
    assert list(slab.recover()) == []
    held = 0
    while slab.allocate(SHAPE, 1) is not None:
        held += 1
    slab.close()
    return held


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_used_in_dram_all_the_time_outlives_its_node(tmp_path: Path, policy: str) -> None:
    sizes = (1 << 20,)
    node = Node(tmp_path, policy, sizes)
    node.turn(0, 40)
    for chain in range(1, 8):
        node.turn(chain, 40)
        assert use(node, 0, 40) == 40
    assert sum(block.dram is not None for block in node.table.snapshot()) > slots_of(tmp_path / "empty", sizes[0])
    assert end(node)[0]
    node.close()
    assert {key_of(0, depth) for depth in range(40)} <= recovered(tmp_path, sizes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [(1 << 20,), (1 << 19, 1 << 18, 1 << 18), (1 << 21,)])
@pytest.mark.parametrize("seed", range(2))
def test_what_stays_out_is_the_coldest_of_dram(tmp_path: Path, policy: str, sizes: tuple[int, ...], seed: int) -> None:
    node = Node(tmp_path, policy, sizes)
    draw = random.Random(seed)
    for _ in range(100):
        node.turn(draw.randrange(24), draw.randrange(1, 8))
        use(node, chain := draw.randrange(6), node.lengths.get(chain, 0))
        node.clock.advance(1.0)
    before = {block.key: block for block in node.table.snapshot()}
    parents = {key: block.parent for key, block in before.items() if block.parent in before}
    in_dram = [block for block in before.values() if block.dram is not None]
    hottest = [block.key for block in _hottest_first(node.table, in_dram, node.clock, node.clock.now_s() + 1.0)]
    assert len(set(hottest)) == len(hottest) == len(in_dram)
    assert end(node)[0]
    node.close()
    after = recovered(tmp_path, sizes)
    assert [key for key in after if key in parents and parents[key] not in after] == [], "no child without its parent"
    room = sum(slots_of(tmp_path / f"empty{number}", size) for number, size in enumerate(sizes))
    needed: set[BlockKey] = set()
    for key in hottest:
        above: BlockKey | None = key
        while above is not None and above not in needed:
            needed.add(above)
            above = parents.get(above)
        if len(needed) > room:
            break
        assert key in after, (len(needed), room)


def test_a_volume_that_fails_for_a_moment_gets_all_once_it_does_not(tmp_path: Path) -> None:
    node = Node(tmp_path, sizes=(1 << 21,))
    node.slabs[0].fails = True
    node.turn(0, 40)
    assert node.durable() == {}
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        node.clock.advance(seconds)
        node.slabs[0].fails = waits < 12

    assert end(node, wait) == (True, 40)
    node.close()
    assert waits >= 12
    assert len(recovered(tmp_path, (1 << 21,))) == 40


def test_a_volume_that_fails_for_good_holds_up_until_the_deadline_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, sizes=(1 << 21,))
    node.slabs[0].fails = True
    node.turn(0, 40)
    began_s = node.clock.now_s()
    assert end(node, node.clock.advance) == (False, 0)
    assert node.clock.now_s() == began_s + DEADLINE_S
    node.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_keeps_to_its_share_with_its_hottest(tmp_path: Path, policy: str) -> None:
    node = TenantsNode(tmp_path / "slab", policy)
    node.told(("acme", None, 20))
    theirs = node.stored(9, 30, 1)
    old = node.stored(1, 15)
    node.retainer.round()
    for chain in (2, 3):
        node.store(chain, 0, 15)
    node.table.give_up_pending()
    hot = node.keys(2, 15)
    for used in (node.keys(3, 15), hot, hot, node.keys(3, 15), hot, hot):
        assert all(node.resident(used, 0))
    assert end(node)[0]
    durable = {block.key for block in node.table.snapshot() if block.durable}
    node.close()
    assert durable >= {*theirs, *hot}
    assert len(durable & {*old, *hot, *node.keys(3, 15)}) == 20


def chain_of(namespace: NodeNamespace, name: int, length: int) -> list[Block]:
    keys = [key_of(name, depth) for depth in range(length)]
    return [Block(namespace, key, keys[depth - 1] if depth else None, depth, b"") for depth, key in enumerate(keys)]


def test_pins_come_first_up_to_their_part_and_then_last() -> None:
    known = NamespaceRegistry()
    pinned, other = (known.of_shape(NamespaceId(bytes([number]) * 16), SHAPE) for number in range(2))
    pinned.pinned = True
    first, second = chain_of(pinned, 0, 8), chain_of(other, 1, 4)

    def stays(room: int) -> list[BlockKey]:
        parents = {block.key: block for block in (*first, *second)}
        return list(what_stays([*first, *second], lambda one: parents.get(one.parent or BlockKey(b"")), room, lambda _: 1))

    keys = [block.key for block in first]
    others = [block.key for block in second]
    assert stays(6) == [*keys[:3], *others[:3]]
    assert stays(10) == [*keys[:5], *others, keys[5]]
    assert stays(12) == [*keys[:6], *others, *keys[6:]]


def test_a_block_stays_with_all_above_it_or_not_at_all() -> None:
    namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
    long, short = chain_of(namespace, 0, 6), chain_of(namespace, 1, 2)
    parents = {block.key: block for block in (*long, *short)}
    kept = what_stays(
        [long[4], long[5], *short], lambda one: parents.get(one.parent or BlockKey(b"")), 4, lambda _: 1
    )  # the others lie on a volume
    assert list(kept) == [block.key for block in short]
    kept = what_stays([long[4], long[5], *short], lambda one: parents.get(one.parent or BlockKey(b"")), 6, lambda _: 1)
    assert list(kept) == [block.key for block in long]


def whose(*chains: list[Block]) -> Callable[[Block], Block | None]:
    """The parents among some blocks."""
    blocks = {block.key: block for chain in chains for block in chain}
    return lambda one: None if one.parent is None else blocks.get(one.parent)


def test_blocks_that_are_each_others_parents_hold_nothing_up_and_come_last() -> None:
    namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
    own, first, second, sound = (chain_of(namespace, name, 2) for name in range(4))
    own[0].parent = own[0].key
    first[0].parent, second[0].parent = second[0].key, first[0].key
    wrong = [*own, *first, *second]
    for order in ([*wrong, *sound], [*wrong[::-1], *sound]):
        parents = whose(own, first, second, sound)
        assert [*what_stays(order, parents, 2, lambda _: 1)] == [block.key for block in sound]
        assert what_stays(order, parents, 8, lambda _: 1).keys() == {block.key for block in order}


def test_what_no_lookup_can_find_takes_no_room_before_what_one_can() -> None:
    namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
    headless, whole = chain_of(namespace, 0, 4)[1:], chain_of(namespace, 1, 3)
    hottest = [*headless, *whole]
    keys = [block.key for block in whole]
    assert [*what_stays(hottest, whose(headless, whole), 4, lambda _: 1)] == [*keys, headless[0].key]
    elsewhere = what_stays(hottest, whose(headless, whole), 4, lambda _: 1, may_lie_elsewhere=True)
    assert [*elsewhere] == [*(block.key for block in headless), keys[0]]


@pytest.mark.parametrize("kind", ["no room", "pinned", "headless", "share"])
def test_each_block_is_climbed_from_about_once(kind: str) -> None:
    """Siblings far down, whose chains lie on a volume alone, and chains that are met from their ends."""
    namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SHAPE)
    namespace.pinned = kind == "pinned"
    trunk = chain_of(namespace, 0, 500)
    if kind == "headless":
        trunk[0].parent = key_of(9, 9)
    twigs = [Block(namespace, key_of(1, number), trunk[-1].key, 500, b"") for number in range(500)]
    other = chain_of(namespace, 2, 500)
    parents, climbs = whose(trunk, twigs, other), 0

    def above(block: Block) -> Block | None:
        nonlocal climbs
        climbs += 1
        return parents(block)

    for room in (250, 500, 1_000):
        climbs = 0
        share = 500 * SHAPE.block_bytes if kind == "share" else None
        what_stays([*twigs, *other[::-1]], above, room, lambda _: 1, lambda _, share=share: share)  # type: ignore[misc]
        assert climbs < 10 * 1_500, room


def test_the_order_is_taken_without_holding_up_whoever_uses_the_table(tmp_path: Path) -> None:
    """No step under the lock looks at more than some blocks, and the policy's own order is not drained."""
    node = Node(tmp_path, sizes=(1 << 20,))
    node.turn(0, 40)
    for chain in range(1, 8):
        node.turn(chain, 40)

    def never_all(_evictable: object) -> Iterator[BlockKey]:
        raise Internal("the whole order, under the lock")

    node.table._dram_policy.coldest = never_all  # type: ignore[method-assign]
    assert end(node)[0]
    node.close()


class Slow:
    """A clock on which each look at it takes a while."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.s = 0.0

    def now_s(self) -> float:
        self.s += self.step_s
        return self.s


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.2, 0.5])
def test_planning_takes_a_part_of_the_time_and_what_is_not_planned_is_sent_all_the_same(
    tmp_path: Path, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_chance, "LOOK", 4)
    node = Node(tmp_path, sizes=(1 << 21,))
    node.slabs[0].fails = True
    for chain in range(4):
        node.turn(chain, 10)
    node.slabs[0].fails = False
    node.clock.advance(10.0)
    clock = Slow(step_s)
    blocks = last_chance._what_stays(node.table, node.table.node_volumes, clock, 2.0)
    assert clock.s < 2.0 + 3 * step_s, "no look later"
    assert len(blocks) == 40
    assert end(node)[1] == 40
    node.close()


def test_a_storage_node_gets_the_hottest_last_and_no_child_before_its_parent(tmp_path: Path) -> None:
    node = Node(tmp_path, sizes=())
    for chain in range(6):
        node.turn(chain, 10)
    for chain in (3, 1, 4):
        assert use(node, chain, 10) == use(node, chain, 10) == 10
    sent: list[BlockKey] = []

    class Storage:
        def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
            turn()
            sent.extend(block.key for block in blocks)
            for block in blocks:
                node.table.persisted(block, None, None)

    with writing(node.table, Storage()):
        assert make_durable(node.table, node.clock, node.clock.now_s() + DEADLINE_S, never) == (True, 60)
    node.close()
    order = {key_of(chain, 0): chain for chain in range(6)}
    chains = [order[key] for key in sent[::10]]
    assert sent == [key_of(chain, depth) for chain in chains for depth in range(10)]
    assert chains[3:] == [3, 1, 4]


def test_who_runs_out_of_time_between_two_tries_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path, sizes=(1 << 21,))
    node.slabs[0].fails = True
    node.turn(0, 40)
    waited = node.table.wait_written

    def wait_written(deadline_s: float) -> bool:
        """As ever, but the clock goes on after it."""
        found = waited(deadline_s)
        node.clock.advance(DEADLINE_S / 2)
        return found

    node.table.wait_written = wait_written  # type: ignore[method-assign]
    assert end(node, lambda _seconds: None) == (False, 0)
    node.close()


class ReadOnly(Failing):
    """A volume on a disk that takes no changes from some commit on, for good or until it is mended."""

    commits_left: int | None = None

    @property
    def read_only(self) -> str | None:
        return "told to be" if self.commits_left == 0 else super().read_only

    def commit(self, added: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        if self.commits_left == 0 and (added or removed):
            raise OSError(30, "told to")
        if self.commits_left:
            self.commits_left -= 1
        super().commit(added, removed)


def test_a_volume_that_goes_read_only_leaves_the_others_to_the_hottest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_node_durable_room.Failing", ReadOnly)
    monkeypatch.setattr(last_chance, "BATCH_BLOCKS", 8)
    sizes = (1 << 19, 1 << 19)
    node = Node(tmp_path, "lru", sizes)
    for slab in node.slabs:
        slab.fails = True
    for chain in range(6):
        node.turn(chain, 20)
    for slab in node.slabs:
        slab.fails = False
    node.clock.advance(10.0)
    node.slabs[1].commits_left = 2  # type: ignore[attr-defined]
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        node.clock.advance(seconds)

    assert end(node, wait)[0]
    assert waits < 3, "nobody waits for what is read-only"
    node.close()
    held = recovered(tmp_path, sizes)
    room = slots_of(tmp_path / "empty", sizes[0])
    assert len(held) > room, "some were on the other before"
    assert {key_of(chain, depth) for chain in (5, 4) for depth in range(20)} <= held


def test_what_the_others_have_no_room_for_waits_for_the_one_that_fails(tmp_path: Path) -> None:
    sizes = (1 << 19, 1 << 19)
    node = Node(tmp_path, "lru", sizes)
    for slab in node.slabs:
        slab.fails = True
    for chain in range(6):
        node.turn(chain, 20)
    node.slabs[0].fails = False
    node.clock.advance(10.0)
    before = node.clock.now_s()
    at_first: set[BlockKey] = set()

    def wait(seconds: float) -> None:
        at_first.update(node.durable() if not at_first else ())
        node.clock.advance(seconds)
        node.slabs[1].fails = node.clock.now_s() < before + 10.0

    end(node, wait)
    node.close()
    assert at_first >= {key_of(chain, depth) for chain in (5, 4) for depth in range(20)}, "the hottest need not wait"
    assert len(at_first) == slots_of(tmp_path / "empty", sizes[0])
    assert len(recovered(tmp_path, sizes)) == 120
