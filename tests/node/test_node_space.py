"""Space on volumes full of blocks of another size: one span is emptied, and descendants of its blocks are evicted first."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, StoreOutcome, VolumeId
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.eviction.allocation import allocate_nvme
from kvstore.node.eviction.space import OTHERS_LIMIT, SpaceReclaimer
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.eviction.policy import POLICY_NAMES, make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from support.chains import key_of

SMALL, LARGE = BlockShape(1, 4096), BlockShape(1, 1 << 20)
SIZES = (SMALL, BlockShape(1, 5 * 4096), BlockShape(1, 16 * 4096))


def closure(blocks: Mapping[BlockKey, Block], chosen: Iterable[BlockKey]) -> set[BlockKey]:
    """Return blocks and all their descendants."""
    found = set(chosen)
    while below := {key for key, block in blocks.items() if block.parent in found} - found:
        found |= below
    return found


@settings(max_examples=60)
@given(st.sampled_from(POLICY_NAMES), st.integers(0, 1 << 30), st.sampled_from(SIZES), st.sampled_from([0.0, 0.01, 0.1]))
def test_victims_are_one_span_with_descendants_or_the_coldest(
    policy_name: str, seed: int, shape: BlockShape, pinned: float
) -> None:
    draw = random.Random(seed)
    policy = make_policy(policy_name)
    namespaces = [NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), each) for each in SIZES]
    blocks: dict[BlockKey, Block] = {}
    with closing(DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=1 << 20)) as arena:
        space = SpaceReclaimer(arena, blocks, policy)
        chains: list[Block | None] = [None] * 12
        odds = [draw.random() ** 3 for _ in SIZES]
        while True:
            chain = draw.randrange(len(chains))
            above, namespace = chains[chain], draw.choices(namespaces, odds)[0]
            slots = arena.allocate(namespace.shape, 1)
            if slots is None:
                break
            block = Block(namespace, key_of(len(blocks)), above.key if above else None, 0, b"")
            block.dram, block.pins = slots[0], int(draw.random() < pinned)
            blocks[block.key] = block
            space.insert(block, slots[0])
            policy.insert(block.key, block.parent)
            chains[chain] = block if draw.random() < 0.9 else None

        def may_leave(key: BlockKey) -> bool:
            return not blocks[key].pins

        if arena.allocate(shape, 1) is not None:
            return  # the volume was full for another size only
        order = [blocks[key] for key in policy.coldest(may_leave)]
        spans = {
            frozenset(closure(blocks, (held.key for slot in slots if (held := space.by_slot.get(slot)))))
            for slots in arena.coldest_spans(shape, [])
        }
        leaving = space.victims(shape, (4, 1), iter(order), lambda block: block.dram, may_leave)
        keys = [block.key for block in leaving]
        assert not any(block.pins for block in leaving)
        if not leaving:
            assert not any(all(map(may_leave, each)) for each in spans), "a span could have been emptied"
            return
        assert leaving == order[: len(leaving)] or frozenset(keys) in spans
        for key in keys:
            parent = blocks[key].parent
            assert parent not in keys or keys.index(key) < keys.index(parent), "a parent leaves before its child"
        assert closure(blocks, keys) == set(keys), "a child is left behind"
        arena.free([slot for block in leaving if (slot := block.dram) is not None])
        assert arena.allocate(shape, 1) is not None


class Full:
    """A node whose volumes are full of small blocks of interleaved sessions, so that chains are mixed."""

    def __init__(self, folder: Path, volumes: int, small_blocks: int, dram: int = 40 << 20) -> None:
        names = [VolumeId(f"n/nvme{number}") for number in range(volumes)]
        self.clock, self.counters = ManualClock(), Counters()
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=dram)
        capacity = small_blocks * 8192 // volumes
        self.slabs = [NvmeSlab.open(folder / name[2:], volume_id=name, capacity_bytes=capacity, io_threads=1) for name in names]
        for slab in self.slabs:
            assert list(slab.recover()) == []
        log = ReplicaChangeLog([VolumeId("n/dram"), *names], self.counters, self.clock, keep=False)
        node_volumes = [NodeVolume(slab) for slab in self.slabs]
        residency = Residency(
            self.arena,
            make_policy("reuse-distance"),
            node_volumes,
            log,
            self.counters,
            self.clock,
            make_durable_policy=partial(make_policy, "reuse-distance"),
        )
        self.table = BlockTable(residency, writes_back=True)
        self.target = LocalTarget(self.table, self.counters, self.clock)
        namespaces = NamespaceRegistry()
        self.small = namespaces.of_shape(NamespaceId(b"s" * 16), SMALL)
        self.large = namespaces.of_shape(NamespaceId(b"l" * 16), LARGE)
        self._fill(node_volumes)

    def _fill(self, node_volumes: list[NodeVolume]) -> None:
        draw = random.Random(5)
        lengths = [0] * 60
        full: set[int] = set()
        turn = 0
        while len(full) < len(node_volumes):
            turn += 1
            at, session = turn % len(node_volumes), draw.randrange(len(lengths))
            slots = node_volumes[at].volume.allocate(SMALL, 8)
            if slots is None:
                full.add(at)
                continue
            for slot in slots:
                depth = lengths[session]
                above = key_of(session, depth - 1) if depth else None
                record = BlockRecord(self.small.namespace_id, key_of(session, depth), above, depth, SMALL, bytes(8))
                assert self.table.restore(node_volumes[at], self.small, record, slot)
                lengths[session] += 1

    def store(self, name: str, count: int) -> int:
        """Store a chain of large blocks. Return how many of them became durable."""
        run = BlockRun(self.large.namespace_id, None, 0, tuple(key_of(name, depth) for depth in range(count)))
        prepared = self.table.prepare(self.large, run, self.clock.now_s())
        assert prepared.outcomes == [StoreOutcome.STORED] * count
        self.table.complete(prepared, list(prepared.slots), [self._sum(slot) for slot in prepared.slots.values()])
        blocks = self.table.take_pending(count, 1 << 30, 0.0)
        self.target.persist(blocks, lambda: None)
        self.table.validate()
        return sum(block.nvme is not None for block in blocks)

    def _sum(self, slot: Slot) -> bytes:
        self.arena.view(slot, LARGE.block_bytes)[:] = bytes(LARGE.block_bytes)
        return bytes(8)

    def durable(self, namespace: NodeNamespace) -> dict[BlockKey, tuple[Block, NodeVolume]]:
        found = (block for block in self.table.snapshot() if block.namespace is namespace)
        return {block.key: (block, block.nvme_volume) for block in found if block.nvme_volume is not None}

    def members(self) -> int:
        """Return the maximum number of small blocks that occupy the space of one large block, approximately."""
        chunk = self.slabs[0].slot_pool.chunk_bytes
        chunks = -(-(LARGE.block_bytes + 4096) // chunk)
        return chunks * chunk // 8192

    def close(self) -> None:
        self.table.validate()
        self.table.close()
        for slab in self.slabs:
            slab.close()
        self.arena.close()


@pytest.fixture
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Full]:
    made = Full(tmp_path, request.param, 3 * OTHERS_LIMIT)
    yield made
    made.close()


@pytest.mark.parametrize("full", [1, 3], indirect=True)
def test_large_blocks_beyond_search_limit_become_durable(full: Full) -> None:
    before = full.durable(full.small)
    assert len(before) > 2 * OTHERS_LIMIT
    searches = 0
    find_victims = full.table.residency.volume_evictor.victims

    def counted(*arguments: object) -> list[Block]:
        nonlocal searches
        searches += 1
        return find_victims(*arguments)  # type: ignore[arg-type]

    full.table.residency.volume_evictor.victims = counted  # type: ignore[method-assign]
    for count in (1, 4, 8):
        assert full.store(f"L{count}", count) == count
    assert searches <= 13, "one for each block at most"
    gone = len(before) - len(full.durable(full.small))
    assert gone <= 13 * 3 * full.members()


@pytest.mark.parametrize("full", [1, 3], indirect=True)
def test_large_block_evicts_one_span_with_descendants(full: Full) -> None:
    before = full.durable(full.small)
    assert full.store("L", 1) == 1
    node_volume = full.table.node_volumes[next(at for at, slab in enumerate(full.slabs) if any(
        block.nvme_volume is full.table.node_volumes[at] for block, _ in full.durable(full.large).values()))]  # fmt: skip
    gone = before.keys() - full.durable(full.small).keys()
    assert 0 < len(gone) <= 3 * full.members()
    here = {key for key in gone if before[key][1] is node_volume}
    blocks = {key: block for key, (block, _) in before.items()}
    assert gone == closure(blocks, here), "others lose descendants alone, and all of them"


@pytest.mark.parametrize("full", [1], indirect=True)
def test_span_with_block_in_use_is_skipped(full: Full) -> None:
    """If one block of the chosen span is pinned, another span is emptied; if all are pinned, none."""
    table, node_volume = full.table, full.table.node_volumes[0]
    _, first = allocate_nvme(table.residency, node_volume, LARGE, 1, ahead=1)
    table.residency.cancel_eviction(first)
    first[-1].pins = 1
    _, second = allocate_nvme(table.residency, node_volume, LARGE, 1, ahead=1)
    assert second
    assert first[-1] not in second
    table.residency.cancel_eviction(second)
    for block in table.snapshot():
        block.pins = 1
    assert allocate_nvme(table.residency, node_volume, LARGE, 1, ahead=1) == (None, [])
    for block in table.snapshot():
        block.pins = 0


def test_span_beyond_many_with_kept_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that is rejected at its first block costs one visit, however many slots it has."""
    monkeypatch.setattr("kvstore.node.eviction.space.PLAN_LIMIT", 200)
    shape, policy = BlockShape(1, 8 * 4096), make_policy("lru")
    blocks: dict[BlockKey, Block] = {}
    namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), SMALL)
    with closing(DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=1 << 20)) as arena:
        space = SpaceReclaimer(arena, blocks, policy)
        for slot in arena.allocate(SMALL, (1 << 20) // 4096) or ():
            block = Block(namespace, key_of(len(blocks)), None, 0, b"")
            block.dram = slot
            blocks[block.key] = block
            space.insert(block, slot)
            policy.insert(block.key, None)
        *others, last = arena.coldest_spans(shape, [])
        kept = {slot for slots in others for slot in slots[:1]} - {*last}
        assert len(others) + len(last) < 200 < sum(map(len, others))
        found = space.coldest_span(shape, lambda key: blocks[key].dram not in kept)
        assert {block.dram for block in found} == {*last}


def test_arena_full_of_small_blocks_makes_space_for_larger(tmp_path: Path) -> None:
    blocks = 3 * OTHERS_LIMIT
    full = Full(tmp_path, 1, 64, dram=blocks * 4096)
    draw = random.Random(5)
    depths = [0] * 40
    while full.arena.usage().blocks < blocks:
        session = draw.randrange(len(depths))
        first = depths[session]
        keys = tuple(key_of("a", session, depth) for depth in range(first, first + 16))
        run = BlockRun(full.small.namespace_id, key_of("a", session, first - 1) if first else None, first, keys)
        prepared = full.table.prepare(full.small, run, full.clock.now_s())
        full.table.complete(prepared, list(prepared.slots), [bytes(8)] * len(prepared.slots))
        full.table.give_up_pending()
        depths[session] += 16
    chunk = full.arena.slot_pool.chunk_bytes
    members = -(-LARGE.block_bytes // chunk) * chunk // 4096
    for number in range(3):
        before = full.arena.usage().blocks
        slots = full.table.reserve(LARGE, 1, full.clock.now_s())
        assert slots is not None, number
        assert before - full.arena.usage().blocks < 3 * members
        full.table.validate()
    full.close()
