"""The allocator against a plain model: a list of held slots that must not overlap, and counts that must agree.

Beyond safety: all-or-nothing calls, generations that are never reused, freed space that serves other sizes, sufficient plans,
and recovery of any state from (slot, span) alone.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.tiers.allocator import ALIGNMENT, MAX_CANDIDATES, SlotAllocator, chunk_bytes_for
from kvstore.tiers.contract import Slot

CAPACITY = 256 * ALIGNMENT
SIZES = (1, 4096, 4097, 3 * 4096, 20_000, 9 * 4096, 100_000)


def key_of(slot: Slot) -> BlockKey:
    return BlockKey(slot.generation.to_bytes(16, "big"))


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(CAPACITY)
        self.held: list[Slot] = []
        self.last_generation = 0

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 30))
    def allocate(self, size: int, count: int) -> None:
        before = (self.allocator.used_bytes, self.allocator.slots_used)
        slots = self.allocator.allocate(size, count)
        if slots is None:
            assert (self.allocator.used_bytes, self.allocator.slots_used) == before
            return
        assert len(slots) == count
        for slot in slots:
            assert slot.size == -(-size // ALIGNMENT) * ALIGNMENT
            assert slot.generation > self.last_generation
            self.last_generation = slot.generation
        self.held += slots

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), unique=True, max_size=12))
        self.allocator.free(chosen)
        self.held = [slot for slot in self.held if slot not in chosen]
        for slot in chosen:
            assert not self.allocator.holds(slot)
            with pytest.raises(Internal):
                self.allocator.free([slot])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_wrongly(self, data: st.DataObject) -> None:
        """One bad slot in a batch: no slot of it is freed."""
        chosen = data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1, max_size=5))
        slot = chosen[0]
        wrong = data.draw(
            st.sampled_from(
                [slot, slot._replace(generation=slot.generation + 1), slot._replace(offset=slot.offset + 4096, size=1)]
            )
        )
        with pytest.raises(Internal):
            self.allocator.free([*chosen, wrong])
        assert all(self.allocator.holds(slot) for slot in chosen)

    @precondition(lambda self: self.held)
    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 20), seed=st.integers(0, 1000))
    def plan(self, size: int, count: int, seed: int) -> None:
        order = random.Random(seed).sample(self.held, len(self.held))
        limit = len(order) * 3 // 4
        plan = self.allocator.plan_eviction(size, count, ((key_of(slot), slot) for slot in order), limit)
        if plan is None:
            assert self.allocator.allocate(size, count) is None
            return
        assert plan == [key_of(slot) for slot in order[: len(plan)]]
        if plan:  # needed: one less is not enough
            self.allocator.free(order[: len(plan) - 1])
            assert self.allocator.allocate(size, count) is None
            self.allocator.free([order[len(plan) - 1]])
        self.held = order[len(plan) :]
        self.allocate(size, count)
        assert self.allocator.slots_used == len(order) - len(plan) + count

    @precondition(lambda self: self.held)
    @rule(size=st.sampled_from(SIZES), data=st.data())
    def empty_span(self, size: int, data: st.DataObject) -> None:
        """Every span consists of held slots of other sizes, the coldest come first, and freeing one makes space."""
        cold = data.draw(st.lists(st.sampled_from(self.held), unique=True, max_size=12))
        spans = list(self.allocator.coldest_spans(size, cold))
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        if not spans:  # a long enough run of chunks is free, or has slots of this class
            assert self.allocator.allocate(size, 1) or any(slot.size == rounded for slot in self.held)
            self.allocator = self._anew()
            return
        for slots in spans:
            assert slots
            assert set(slots) <= set(self.held)
            assert all(slot.size != rounded for slot in slots)
        coldness = [sum(slot.size for slot in slots if slot in cold) / sum(slot.size for slot in slots) for slots in spans]
        assert coldness == sorted(coldness, reverse=True)
        leaving = data.draw(st.sampled_from(spans))
        self.allocator.free(leaving)
        self.held = [slot for slot in self.held if slot not in leaving]
        came = self.allocator.allocate(size, 1)
        assert came is not None
        self.last_generation = came[0].generation
        self.held += came

    def _anew(self) -> SlotAllocator:
        """A new allocator with the same held slots."""
        again = SlotAllocator(CAPACITY, chunk_bytes=self.allocator.chunk_bytes, first_generation=self.last_generation + 1)
        for slot in self.held:
            assert again.take(slot, *self.allocator.span_at(slot.offset))
        return again

    @rule()
    def recover(self) -> None:
        """A new allocator takes the same slots, in any order, and continues from there."""
        fresh = SlotAllocator(CAPACITY * 2, chunk_bytes=self.allocator.chunk_bytes)  # a volume that has grown, too
        for slot in random.Random(1).sample(self.held, len(self.held)):
            assert fresh.take(slot, *self.allocator.span_at(slot.offset))
            assert not fresh.take(slot, *self.allocator.span_at(slot.offset))
        assert (fresh.used_bytes, fresh.slots_used) == (self.allocator.used_bytes, self.allocator.slots_used)
        self.allocator = self._anew()

    @invariant()
    def sane(self) -> None:
        end = 0
        for slot in sorted(self.held):
            assert slot.offset >= end
            assert slot.offset % ALIGNMENT == 0
            end = slot.offset + slot.size
            assert self.allocator.holds(slot)
        assert end <= CAPACITY
        assert self.allocator.used_bytes == sum(slot.size for slot in self.held)
        assert self.allocator.slots_used == len(self.held)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("size", [4096, 8192, 69_632, 1 << 20, (1 << 20) + 4096, (4 << 20) + 4096, 33 << 20])
@pytest.mark.parametrize("capacity", [256 << 20, 1 << 30])
def test_allocate_one_size_wastes_little_space(size: int, capacity: int) -> None:
    allocator = SlotAllocator(capacity)
    for count in (1000, 10, 1):
        while allocator.allocate(size, count):
            pass
    assert allocator.used_bytes > 0.88 * capacity


def test_freed_space_serves_other_sizes() -> None:
    allocator = SlotAllocator(64 << 20)
    small = allocator.allocate(4096, (64 << 20) // 4096)
    assert small is not None
    assert allocator.allocate(1 << 20, 1) is None
    allocator.free(small)
    large = allocator.allocate(1 << 20, 64)
    assert large is not None
    assert allocator.allocate(4096, 1) is None
    allocator.free(large[10:11])
    assert allocator.allocate(1 << 20, 1) is not None


def test_plan_eviction_starved_class_empties_spans() -> None:
    """The plan evicts others' blocks until their spans are empty, however they were ordered, and no longer."""
    allocator = SlotAllocator(64 << 20)
    small = allocator.allocate(4096, (64 << 20) // 4096) or []
    coldest = [(key_of(slot), slot) for slot in small]
    plan = allocator.plan_eviction(1 << 20, 2, iter(coldest), len(coldest))
    assert plan is not None
    assert len(plan) == 2 * (1 << 20) // 4096
    assert allocator.plan_eviction(1 << 20, 2, iter(coldest), len(plan) - 1) is None


def test_coldest_spans_large_volume_yields_few() -> None:
    """The search examines the cold slots and a bounded number of spans. The cold span is first, then the newest."""
    allocator = SlotAllocator(4096 * 4096, chunk_bytes=4096)
    held = allocator.allocate(4096, 4096) or []
    spans = list(allocator.coldest_spans(8192, held[3000:3002]))
    assert len(spans) <= MAX_CANDIDATES + 2
    assert spans[0] == held[3000:3002]
    assert spans[-1] == held[:2]
    assert all(len(slots) == 2 for slots in spans)


def test_allocate_batch_is_contiguous() -> None:
    allocator = SlotAllocator(64 << 20)
    first = allocator.allocate(4096, 10) or []
    second = allocator.allocate(4096, 20) or []
    allocator.free(first[::2])  # holes of one
    allocator.free(second[4:12])  # a hole of eight
    batch = allocator.allocate(4096, 8) or []
    assert [slot.offset for slot in batch] == [batch[0].offset + 4096 * at for at in range(8)]


@pytest.mark.parametrize(
    ("slot", "first_chunk", "chunks"),
    [
        (Slot(0, 4096, 0), 0, 1),  # no generation
        (Slot(0, 100, 1), 0, 1),  # no whole pages
        (Slot(-4096, 4096, 1), 0, 1),
        (Slot(CAPACITY, 4096, 1), 0, 1),
        (Slot(100, 4096, 1), 0, 1),  # not the start of a slot
        (Slot(0, 4096, 1), 5, 1),  # in another span
        (Slot(0, 4096, 1), 0, 1 << 40),
        (Slot(0, 4096, 1), -1, 2),
        (Slot(0, 1 << 50, 1), 0, 1),
        (Slot(0, 4096, 1 << 70), 0, 1),
    ],
)
def test_take_invalid_slot_returns_false(slot: Slot, first_chunk: int, chunks: int) -> None:
    allocator = SlotAllocator(CAPACITY)
    assert not allocator.take(slot, first_chunk, chunks)
    assert allocator.slots_used == 0
    assert allocator.allocate(4096, CAPACITY // 4096) is not None


def test_take_overlapping_span_returns_false() -> None:
    allocator = SlotAllocator(CAPACITY)
    assert allocator.take(Slot(0, 4096, 5), 0, 2)
    assert not allocator.take(Slot(8192, 8192, 6), 1, 2)
    assert not allocator.take(Slot(0, 8192, 6), 0, 2)
    assert not allocator.take(Slot(4096, 4096, 6), 0, 3)
    assert allocator.take(Slot(4096, 4096, 6), 0, 2)
    taken = allocator.allocate(4096, 1) or []
    assert taken[0].generation == 7


def test_absurd_sizes_are_rejected() -> None:
    with pytest.raises(InvalidArgument):
        SlotAllocator(100)
    with pytest.raises(InvalidArgument):
        SlotAllocator(CAPACITY, chunk_bytes=5000)
    allocator = SlotAllocator(CAPACITY)
    for size in (0, -1, CAPACITY + 1):
        with pytest.raises(InvalidArgument):
            allocator.allocate(size, 1)
    with pytest.raises(InvalidArgument):
        allocator.allocate(4096, -1)
    assert allocator.allocate(4096, 1 << 60) is None
    assert chunk_bytes_for(ALIGNMENT) == ALIGNMENT
