"""The table of a node against a plain model: random stores, loads, evictions and write-back never break its invariants.

The model is independent of the table: for every key it remembers what was stored and whether it may still be held. After each
step ``BlockTable.check`` asserts the invariants, and the bytes of every block that can be pinned are those that were stored.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvstore.core.checksum import layer_checksums, verify
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape, StoreOutcome, Tier
from kvstore.node.eviction.allocation import PIECE_BLOCKS
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.state.grants import KeyWaiter, SlotGrant
from kvstore.node.state.model import Block
from kvstore.tiers.contract import Slot
from support.chains import key_of, payload_of
from support.node_harness import DRAM, MIB, NodeHarness, volume_id

SHAPES = (BlockShape(2, 2048), BlockShape(3, 4096))
ARENA_BYTES = 1 << 19  # space for 128 small blocks: everything competes
SLAB_BYTES = 1 << 20
NVME = volume_id(0)


class Node(NodeHarness):
    """A node with two namespaces of blocks of different size, and little space."""

    def __init__(self, folder: Path, policy: str = "lru", slab_bytes: int = SLAB_BYTES) -> None:
        super().__init__(folder, volumes=[slab_bytes], policy=policy, shapes=SHAPES, arena_bytes=ARENA_BYTES, publishes=True)
        (self.slab,) = self.slabs


@pytest.fixture(params=["lru", "s3-fifo"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "slab", request.param)
    yield made
    made.table.validate()
    made.close()


def test_pin_stored_block_returns_its_bytes(node: Node) -> None:
    assert node.store(1, 0, 3) == [StoreOutcome.STORED] * 3
    keys = [key_of(2, depth) for depth in range(3)]
    blocks = node.table.pin_resident(node.namespaces[0], keys)
    for key, block in zip(keys, blocks, strict=True):
        assert block is not None
        assert block.dram is not None
        assert bytes(node.arena.view(block.dram, SHAPES[0].block_bytes)) == payload_of(key, SHAPES[0])
    node.table.unpin(block for block in blocks if block is not None)


def test_prepare_that_fails_holds_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece of a store fails, after the first one has its slots and the parent is guarded."""
    node.store(1, 0, 1)
    parent, blocks, allocate = node.keys(1, 1), PIECE_BLOCKS + 4, node.arena.allocate
    used = node.arena.usage().used_bytes

    def failing(shape: BlockShape, count: int) -> list[Slot] | None:
        if count < PIECE_BLOCKS:
            raise InvalidArgument("told to")
        return allocate(shape, count)

    with monkeypatch.context() as patched:
        patched.setattr(node.arena, "allocate", failing)
        with pytest.raises(InvalidArgument):
            node.prepare(1, 1, blocks)
    assert (node.gate.stores_under_way(), node.namespaces[0].granted, node.arena.usage().used_bytes) == (0, 0, used)
    assert [node.block(key).pins for key in parent] == [0]
    assert node.store(1, 1, blocks) == [StoreOutcome.STORED] * blocks


def test_prepare_block_above_arena_leaves_keys_free() -> None:
    node = NodeHarness(shapes=(BlockShape(2, MIB),))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="does not fit"):
            node.prepare(1, 0, 4)
    claim = node.table.claim(node.namespace, node.keys(1, 4))
    assert (claim.busy, claim.claimed_absent) == ([], [0, 1, 2, 3])
    node.table.unclaim(node.keys(1, 4), ())
    node.close()


def test_store_not_completed_or_abandoned_is_invisible(node: Node) -> None:
    prepared = node.prepare(1, 0, 4)
    assert node.table.pin_resident(node.namespaces[0], [key_of(2, 0)]) == [None]
    assert node.prepare(1, 0, 4).outcomes == [StoreOutcome.IN_PROGRESS] * 4
    node.table.abandon(prepared)
    assert node.arena.usage().blocks == 0
    assert node.complete(prepared) == []  # no slot is left to complete


def test_complete_after_abandon_is_lost(node: Node) -> None:
    prepared = node.prepare(1, 0, 1)
    key = next(iter(prepared.slots))
    node.table.abandon(prepared)
    assert node.table.complete(prepared, [key], [bytes(16)]) == [StoreOutcome.LOST]


def test_pin_key_of_other_namespace_is_a_miss(node: Node) -> None:
    node.store(1, 0, 2)
    assert node.table.pin_resident(node.namespaces[1], [key_of(2, 0)]) == [None]
    claim = node.table.claim(node.namespaces[1], [key_of(2, 0)])
    assert claim.absent == [0]
    assert not claim.claimed_absent


def test_pinned_blocks_are_not_evicted(node: Node) -> None:
    node.store(1, 0, 8)
    node.write_back()
    keys = [key_of(2, depth) for depth in range(8)]
    pinned = [block for block in node.table.pin_resident(node.namespaces[0], keys) if block is not None]
    for chain in range(2, 60):
        node.store(chain, 0, 8)
        node.write_back()
    again = node.table.pin_resident(node.namespaces[0], keys)
    assert again == pinned
    node.table.unpin([*pinned, *pinned])


def test_pinned_block_found_corrupt_is_not_served(node: Node) -> None:
    node.store(1, 0, 1)
    keys = [key_of(2, 0)]
    [block] = node.table.pin_resident(node.namespaces[0], keys)
    assert block is not None
    node.table.writeback_failed(*node.table.take_pending(1, 1 << 20, 0.0), corrupt=True)
    assert node.table.pin_resident(node.namespaces[0], keys) == [None]
    assert node.arena.usage().blocks == 1, "its reader still has the slot"
    assert node.store(1, 0, 1) == [StoreOutcome.STORED]
    node.table.validate()
    node.table.unpin([block])
    assert node.arena.usage().blocks == 1
    [again] = node.table.pin_resident(node.namespaces[0], keys)
    assert again is not None
    node.table.unpin([again])


def test_writeback_pending_stays_and_full_queue_skips_stores(node: Node) -> None:
    outcomes = [outcome for chain in range(40) for outcome in node.store(chain, 0, 8)]
    stored = outcomes.count(StoreOutcome.STORED)
    assert StoreOutcome.SKIPPED in outcomes
    assert node.table.counts() == (stored, stored)
    assert node.counters.snapshot()["store_skipped_no_space_blocks_total"] == outcomes.count(StoreOutcome.SKIPPED)


def test_grants_are_prefix_first(node: Node) -> None:
    outcomes = node.store(1, 0, 300)
    first_skip = outcomes.index(StoreOutcome.SKIPPED)
    assert first_skip > 0
    assert set(outcomes[first_skip:]) == {StoreOutcome.SKIPPED}


def test_evict_dram_keeps_durable_blocks_readable(node: Node) -> None:
    node.store(1, 0, 8)
    node.write_back()
    assert evict_tier(node.table, Tier.DRAM) == 8
    claim = node.table.claim(node.namespaces[0], [key_of(2, depth) for depth in range(8)])
    assert sorted(claim.durable) == list(range(8))
    node.table.unclaim((block.key for block in claim.durable.values()), claim.durable.values())


def test_events_are_logged_in_order_and_joined_to_runs(node: Node) -> None:
    node.store(1, 0, 5)
    (taken,) = node.log.take(1000)
    assert taken.volume == DRAM
    assert [len(run.keys) for run in taken.stored] == [5]
    assert (taken.removed, taken.events) == ([], 5)
    node.write_back()
    evict_tier(node.table, Tier.DRAM)
    written, taken = node.log.take(1000)
    assert (written.volume, taken.volume) == (NVME, DRAM), "shown in the one volume before it is gone from the other"
    assert taken.stored == []
    assert len(taken.removed) == 5
    assert taken.removed.index(key_of(2, 4)) < taken.removed.index(key_of(2, 0)), "leaves leave first"
    assert sum(len(run.keys) for run in written.stored) == 5


def test_block_without_nvme_replica_is_rewritten_before_eviction(tmp_path: Path) -> None:
    node = Node(tmp_path / "slab", slab_bytes=8 * SLAB_BYTES)
    node.store(1, 0, 8)
    node.write_back()
    assert evict_tier(node.table, Tier.NVME) == 8
    assert evict_tier(node.table, Tier.DRAM) == 0, "nowhere else: must not be dropped"
    for chain in range(2, 40):
        node.store(chain, 0, 8)
        node.write_back()
    assert node.counters.snapshot()["cascaded_blocks_total"] >= 8
    assert all(node.table.are_durable([key_of(2, depth) for depth in range(8)]))
    node.close()


@pytest.mark.parametrize("corrupt", [False, True])
def test_durable_child_outlives_parent_that_was_in_dram_only(node: Node, corrupt: bool) -> None:
    node.store(1, 0, 2)
    parent, child = node.table.take_pending(2, 1 << 30, 0.0)
    node.table.writeback_failed(parent, denied=True)
    node.target.persist([child], lambda: None)
    if corrupt:
        node.table.residency.condemn(parent)
    assert evict_tier(node.table, Tier.DRAM) == 2 - corrupt
    assert [block.key for block in node.table.snapshot()] == [child.key]
    assert evict_tier(node.table, Tier.NVME) == 1
    assert not list(node.table.snapshot())
    node.store(1, 0, 2)
    node.write_back()
    assert all(node.table.are_durable([parent.key, child.key]))
    assert evict_tier(node.table, Tier.NVME) == 2


def test_staging_dram_durable_unused_blocks_leave(tmp_path: Path) -> None:
    node = Node(tmp_path / "slab")
    node.table.cache_loads = False
    node.store(1, 0, 3)
    used, *others = node.table.pin_resident(node.namespaces[0], [key_of(2, depth) for depth in range(3)])
    node.table.unpin(block for block in others if block is not None)
    assert node.arena.usage().blocks == 3, "not durable yet"
    assert node.write_back() == 3
    assert node.arena.usage().blocks == 1, "in use"
    assert used is not None
    node.table.unpin([used])
    assert node.arena.usage().blocks == 0
    assert all(node.table.are_durable([key_of(2, depth) for depth in range(3)]))
    node.store(2, 0, 1)
    node.table.writeback_failed(node.table.take_pending(1, 1 << 20, 0.0)[0])
    assert node.arena.usage().blocks == 1, "what could not be written stays"
    node.close()


class TableMachine(RuleBasedStateMachine):
    """Random operations on a node. Bytes of every block that can be pinned must be those that were stored."""

    stores = Bundle("stores")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.node = Node(Path(self.folder.name) / "slab")
        self.pinned: list[list[Block]] = []
        self.arriving: list[Block] = []
        self.halves: list[Block] = []
        self.vigils: list[KeyWaiter] = []
        self.revoked: list[SlotGrant] = []

    def teardown(self) -> None:
        self.node.close()
        self.folder.cleanup()

    @rule(target=stores, chain=st.integers(0, 5), first=st.integers(0, 12), count=st.integers(1, 20), namespace=st.integers(0, 1))
    def prepare(self, chain: int, first: int, count: int, namespace: int) -> SlotGrant:
        return self.node.prepare(chain, first, count, namespace)

    @rule(store=stores)
    def complete(self, store: SlotGrant) -> None:
        granted = len(store.slots)
        self.node.write(store)
        assert self.node.complete(store) == [StoreOutcome.STORED] * granted

    @rule(store=stores)
    def abandon(self, store: SlotGrant) -> None:
        self.node.table.abandon(store)

    @rule(store=stores)
    def revoke(self, store: SlotGrant) -> None:
        self.node.table.revoke(store)
        self.revoked.append(store)

    @rule()
    def write_back(self) -> None:
        self.node.write_back()

    @rule(count=st.integers(1, 8))
    def find_corrupt(self, count: int) -> None:
        for block in self.node.table.take_pending(count, 1 << 30, 0.0):
            self.node.table.writeback_failed(block, corrupt=True)
            assert self.node.table.pin_resident(block.namespace, [block.key]) == [None]

    @rule(count=st.integers(1, 8), denied=st.booleans())
    def write_back_fails(self, count: int, denied: bool) -> None:
        """Blocks that stay in DRAM only: their children may become durable, and outlive them."""
        for block in self.node.table.take_pending(count, 1 << 30, 0.0):
            self.node.table.writeback_failed(block, denied=denied)

    @rule(tier=st.sampled_from([Tier.DRAM, Tier.NVME]))
    def evict(self, tier: Tier) -> None:
        evict_tier(self.node.table, tier)

    @rule(chain=st.integers(0, 5), count=st.integers(1, 20), namespace=st.integers(0, 1))
    def pin(self, chain: int, count: int, namespace: int) -> None:
        keys = [key_of(chain * 2 + namespace, depth) for depth in range(count)]
        blocks = self.node.table.pin_resident(self.node.namespaces[namespace], keys)
        self.pinned.append([block for block in blocks if block is not None])

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.node.table.unpin(self.pinned.pop(0))

    @rule(chain=st.integers(0, 5), count=st.integers(1, 20), namespace=st.integers(0, 1))
    def promote(self, chain: int, count: int, namespace: int) -> None:
        node = self.node
        keys = [key_of(chain * 2 + namespace, depth) for depth in range(count)]
        claim = node.table.claim(node.namespaces[namespace], keys)
        shape = node.namespaces[namespace].shape
        slots = node.table.reserve(shape, len(claim.durable), node.clock.now_s())
        done = list(claim.resident.values())
        for slot, block in zip(slots or (), claim.durable.values(), strict=False):
            assert block.nvme is not None
            view = node.arena.view(slot, shape.block_bytes)
            [(outcome, checksums)] = node.slab.read_with_checksums([(block.nvme, block.record(), view)])
            assert outcome.name == "HIT"
            node.table.finish_promotion(block, slot, checksums)
            done.append(block)
        if slots is None:
            node.table.unclaim((block.key for block in claim.durable.values()), claim.durable.values())
        node.table.unclaim([keys[position] for position in claim.claimed_absent], [])
        self.pinned.append(done)

    # ---- blocks that arrive layer by layer ----
    @rule(keep=st.booleans())
    def cache_loads(self, keep: bool) -> None:
        self.node.table.cache_loads = keep

    @rule(chain=st.integers(0, 5), count=st.integers(1, 12), namespace=st.integers(0, 1))
    def begin_to_arrive(self, chain: int, count: int, namespace: int) -> None:
        node = self.node
        where = node.namespaces[namespace]
        keys = [key_of(chain * 2 + namespace, depth) for depth in range(count)]
        claim = node.table.claim(where, keys)
        node.table.unclaim([block.key for block in claim.durable.values()], claim.durable.values())
        node.table.unpin(claim.resident.values())
        mine = claim.claimed_absent
        slots = node.table.reserve(where.shape, len(mine), node.clock.now_s()) if mine else []
        if slots is None:
            node.table.unclaim([keys[position] for position in mine], [])
            return
        for position, slot in zip(mine, slots, strict=True):
            parent = keys[position - 1] if position else None
            block = node.table.begin_fill(Block(where, keys[position], parent, position, b""), slot)
            assert node.table.pin_resident(where, [block.key]) == [None], "half a block is found by its key"
            self.arriving.append(block)

    @rule(pins=st.integers(0, 2))
    def lease_one_that_arrives(self, pins: int) -> None:
        for block in self.arriving[:1]:
            for _ in range(pins):
                assert self.node.table.pin_again([block])
                self.pinned.append([block])
                self.halves.append(block)

    @rule(whole=st.booleans())
    def end_of_arrival(self, whole: bool) -> None:
        if not self.arriving:
            return
        block = self.arriving.pop(0)
        assert block.dram is not None
        if whole:
            shape = block.namespace.shape
            payload = payload_of(block.key, shape)
            self.node.arena.view(block.dram, shape.block_bytes)[:] = payload
            block.checksums = layer_checksums(memoryview(payload), shape)
            self.node.table.finish_fill(block)
            self.halves = [half for half in self.halves if half is not block]
        else:
            self.node.table.unclaim([block.key], [])
        last = block.pins == 1
        self.node.table.unpin([block])
        if last and not whole:
            assert block.dram is None, "nobody can use it: its slot is given back"
            assert not self.node.table.pin_again([block])

    @rule(chain=st.integers(0, 5), count=st.integers(1, 12), namespace=st.integers(0, 1))
    def watch(self, chain: int, count: int, namespace: int) -> None:
        keys = [key_of(chain * 2 + namespace, depth) for depth in range(count)]
        self.vigils.append(self.node.table.subscribe(self.node.namespaces[namespace], keys))

    @rule(take=st.booleans())
    def unwatch(self, take: bool) -> None:
        if self.vigils:
            vigil = self.vigils.pop(0)
            if take:
                self.pinned.append([block for _, block in self.node.table.next_arrivals(vigil, self.node.clock.now_s())])
            self.node.table.unsubscribe(vigil)

    @invariant()
    def no_slot_leaks(self) -> None:
        table = self.node.table
        resident = sum(block.dram is not None for block in table.snapshot())
        stores = {id(one): one for one in table.residency.preparing.values()}.values()
        halves = {id(block) for block in [*self.arriving, *(one for one in self.halves if one.filling and one.pins)]}
        readers = [*self.pinned, *([block for _, block in vigil.arrivals] for vigil in self.vigils)]
        parents = [one.guarded for one in stores if one.guarded is not None]
        condemned = {id(block) for blocks in (*readers, parents) for block in blocks if block.condemned}
        reserved = {slot for store in self.revoked for slot in store.revoked}
        held = resident + len(halves) + len(condemned) + len(reserved)
        assert self.node.arena.usage().blocks == held + sum(len(one.slots) for one in stores)

    @invariant()
    def holds(self) -> None:
        assert self.node.counters.get("eviction_bugs_total") == 0
        self.node.table.validate()
        for vigil in self.vigils:
            for _, block in vigil.arrivals:
                assert block.pins > 0
                assert block.dram is not None
        for blocks in self.pinned:
            for block in blocks:
                shape = block.namespace.shape
                assert block.dram is not None
                if block.filling:
                    continue  # the load knows which of its layers are ready
                view = self.node.arena.view(block.dram, shape.block_bytes)
                assert bytes(view) == payload_of(block.key, shape)
                assert verify(view, shape, block.checksums)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
