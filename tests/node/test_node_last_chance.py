"""What a node does for its blocks at its end: the hottest of DRAM outlive it, whatever left the volumes before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_node_durable_room import SHAPE, Node, key_of
from test_node_tenants import Node as TenantsNode

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey, NamespaceId, VolumeId
from kvstore.node.block import Block
from kvstore.node.domain import Domain, Domains
from kvstore.node.last_chance import make_durable, what_stays
from kvstore.node.table import BlockTable
from kvstore.node.writebehind import LocalTarget, WriteBehind
from kvstore.observe.counters import Counters
from kvstore.tiers.slab import NvmeSlab

POLICIES = ("gap", "s3-fifo", "lru")
DEADLINE_S = 60.0


@contextmanager
def writing(table: BlockTable, target: LocalTarget) -> Iterator[None]:
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
    found = node.table.pin_resident(node.domain, [key_of(chain, depth) for depth in range(length)])
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
    hottest = [block.key for block in node.table.hottest()]
    assert len(set(hottest)) == len(hottest) == sum(block.dram is not None for block in before.values())
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


def chain_of(domain: Domain, name: int, length: int) -> list[Block]:
    keys = [key_of(name, depth) for depth in range(length)]
    return [Block(domain, key, keys[depth - 1] if depth else None, depth, b"") for depth, key in enumerate(keys)]


def test_pins_come_first_up_to_their_part_and_then_last() -> None:
    known = Domains()
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
    domain = Domains().of_shape(NamespaceId(b"n" * 16), SHAPE)
    long, short = chain_of(domain, 0, 6), chain_of(domain, 1, 2)
    parents = {block.key: block for block in (*long, *short)}
    kept = what_stays(
        [long[4], long[5], *short], lambda one: parents.get(one.parent or BlockKey(b"")), 4, lambda _: 1
    )  # the others lie on a volume
    assert list(kept) == [block.key for block in short]
    kept = what_stays([long[4], long[5], *short], lambda one: parents.get(one.parent or BlockKey(b"")), 6, lambda _: 1)
    assert list(kept) == [block.key for block in long]
