"""Conformance suite of volumes: the behaviour of every ``Volume``, and further suites for durable and mapped volumes.

Subclass the suite that fits, name the class ``Test…``, and give it a ``volume`` factory::

    class TestMySlab(DurableVolumeSuite):
        def open_volume(self, folder: Path, capacity_bytes: int) -> DurableVolume:
            return MySlab(folder / "volume", capacity_bytes)

Payloads are derived from the key, so that swapped blocks are detected.
"""

from __future__ import annotations

import mmap
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.core import checksum
from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome
from kvstore.tiers.contract import BlockRecord, DurableVolume, MappedVolume, Slot, Volume
from kvstore.tiers.nvme.slot_header import seal_of

NAMESPACE = NamespaceId(b"volume-suite-ns.")
SHAPES = (BlockShape(1, 4096), BlockShape(4, 1000), BlockShape(2, 65536), BlockShape(3, 40_961))

Item = tuple[Slot, BlockRecord, memoryview]


def block_key(number: int) -> BlockKey:
    """Key of test block ``number``."""
    return BlockKey(number.to_bytes(16, "big"))


def block_payload(number: int, shape: BlockShape) -> bytes:
    """Payload of test block ``number``."""
    return random.Random(number).randbytes(shape.block_bytes)  # noqa: S311


def block_record(number: int, shape: BlockShape, parent: int | None = None) -> BlockRecord:
    """Record of a test block."""
    checksums = checksum.layer_checksums(memoryview(block_payload(number, shape)), shape)
    return BlockRecord(
        NAMESPACE, block_key(number), None if parent is None else block_key(parent), number % 100, shape, checksums
    )


def sealed(record: BlockRecord) -> BlockRecord:
    """The same record, with only the seal of its checksums."""
    return replace(record, checksums=b"", seal=seal_of(record.checksums))


def empty_memory(count: int, shape: BlockShape, *, aligned: bool) -> list[memoryview]:
    """Writable memory for blocks: page-aligned, or all unaligned."""
    stride = -(-shape.block_bytes // 4096) * 4096 if aligned else shape.block_bytes
    shift = 0 if aligned else 8
    memory = memoryview(mmap.mmap(-1, stride * count + shift))
    return [memory[shift + at * stride : shift + at * stride + shape.block_bytes] for at in range(count)]


def items_for(slots: Sequence[Slot], numbers: Sequence[int], shape: BlockShape, *, aligned: bool = True) -> list[Item]:
    """Items for ``write``: blocks and their slots."""
    items: list[Item] = []
    for slot, number, memory in zip(slots, numbers, empty_memory(len(slots), shape, aligned=aligned), strict=True):
        memory[:] = block_payload(number, shape)
        items.append((slot, block_record(number, shape), memory))
    return items


def emptied(items: Sequence[Item], *, aligned: bool = True) -> list[Item]:
    """The same items with empty memory, for ``read``."""
    if not items:
        return []
    memory = empty_memory(len(items), items[0][1].shape, aligned=aligned)
    return [(slot, record, view) for (slot, record, _), view in zip(items, memory, strict=True)]


def assert_reads_back(volume: Volume, items: Sequence[Item], *, aligned: bool = True) -> None:
    """Assert that every block is a hit, byte for byte."""
    again = emptied(items, aligned=aligned)
    assert volume.read(again) == [Outcome.HIT] * len(items)
    assert [bytes(view) for _, _, view in again] == [bytes(view) for _, _, view in items]


class VolumeSuite(ABC):
    """Behaviour that every volume must have."""

    CAPACITY = 8 << 20

    @abstractmethod
    def open_volume(self, folder: Path, capacity_bytes: int) -> Volume:
        """Open or create the volume of a folder, ready for use."""

    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[Volume]:
        """A volume of ``CAPACITY`` bytes."""
        volume = self.open_volume(tmp_path, self.CAPACITY)
        yield volume
        volume.close()

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
    def test_volume_written_block_is_read(self, volume: Volume, shape: BlockShape, aligned: bool) -> None:
        slots = volume.allocate(shape, 17)
        assert slots is not None
        items = items_for(slots, range(17), shape, aligned=aligned)
        shuffled = random.Random(1).sample(items, len(items))  # noqa: S311
        assert volume.write(shuffled) == [None] * 17
        assert_reads_back(volume, items, aligned=aligned)
        assert_reads_back(volume, items[3:11:2], aligned=not aligned)
        volume.free(slots)
        assert volume.usage().used_bytes == 0

    def test_slots_are_disjoint_and_inside_the_volume(self, volume: Volume) -> None:
        held: list[Slot] = []
        for shape in SHAPES:
            held += volume.allocate(shape, 9) or []
        assert len(held) == 9 * len(SHAPES)
        end = 0
        for slot in sorted(held):
            assert slot.offset >= end
            end = slot.offset + slot.size
        assert end <= self.CAPACITY
        usage = volume.usage()
        assert (usage.blocks, usage.used_bytes) == (len(held), sum(slot.size for slot in held))

    def test_allocate_is_all_or_nothing(self, volume: Volume) -> None:
        shape = SHAPES[2]
        before = volume.usage()
        assert volume.allocate(shape, self.CAPACITY // shape.block_bytes + 1) is None
        assert volume.usage() == before
        assert volume.allocate(shape, 0) == []

    def test_allocate_full_volume_returns_none_until_freed(self, volume: Volume) -> None:
        shape = SHAPES[2]
        held: list[Slot] = []
        while slots := volume.allocate(shape, 1):
            held += slots
        assert len(held) > 0.9 * self.CAPACITY / held[0].size
        volume.free(held[5:7])
        again = volume.allocate(shape, 2)
        assert again is not None
        assert {slot.offset for slot in again} == {slot.offset for slot in held[5:7]}
        assert volume.allocate(shape, 1) is None

    def test_allocate_contiguous_if_space_allows(self, volume: Volume) -> None:
        slots = volume.allocate(SHAPES[0], 8)
        assert slots is not None
        assert [slot.offset for slot in slots] == [slots[0].offset + at * slots[0].size for at in range(8)]

    def test_free_twice_raises(self, volume: Volume) -> None:
        slots = volume.allocate(SHAPES[0], 3) or []
        volume.free(slots[:1])
        with pytest.raises(Internal):
            volume.free(slots)  # the first is free already
        with pytest.raises(Internal):
            volume.free([slots[1], slots[1]])
        assert volume.usage().blocks == 2  # all or none
        volume.free(slots[1:])

    def test_slot_generations_only_grow(self, volume: Volume) -> None:
        seen: dict[int, int] = {}
        for _ in range(20):
            slots = volume.allocate(SHAPES[0], 5) or []
            for slot in slots:
                assert slot.generation > seen.get(slot.offset, 0)
                seen[slot.offset] = slot.generation
            volume.free(slots)

    def test_read_old_generation_is_not_a_hit(self, volume: Volume) -> None:
        shape = SHAPES[1]
        old = items_for(volume.allocate(shape, 1) or [], [1], shape)
        volume.write(old)
        volume.free([old[0][0]])
        fresh = items_for(volume.allocate(shape, 1) or [], [2], shape)
        assert volume.write(fresh) == [None]
        assert volume.read(emptied(old)) == [Outcome.CORRUPT]
        assert volume.read(emptied(old), verify=False) == [Outcome.CORRUPT]
        assert isinstance(volume.write(old)[0], Internal)
        assert_reads_back(volume, fresh)

    def test_read_other_checksums_is_corrupt(self, volume: Volume) -> None:
        shape = SHAPES[2]
        items = items_for(volume.allocate(shape, 2) or [], [1, 2], shape)
        volume.write(items)
        swapped = [(items[0][0], items[1][1], items[0][2]), items[1]]
        assert volume.read(emptied(swapped)) == [Outcome.CORRUPT, Outcome.HIT]

    def test_write_payload_of_other_size_is_rejected(self, volume: Volume) -> None:
        shape = SHAPES[1]
        slots = volume.allocate(shape, 2) or []
        good, other = items_for(slots, [1, 2], shape)
        results = volume.write([good, (other[0], other[1], other[2][:-1])])
        assert results[0] is None
        assert isinstance(results[1], InvalidArgument)
        with pytest.raises(InvalidArgument):
            volume.read([(good[0], good[1], good[2][:-1])])

    @pytest.mark.parametrize(
        "shape", [BlockShape(0, 10), BlockShape(1, 0), BlockShape(1 << 30, 1), BlockShape(1, 1 << 40)], ids=str
    )
    def test_allocate_invalid_shape_is_rejected(self, volume: Volume, shape: BlockShape) -> None:
        with pytest.raises(InvalidArgument):
            volume.allocate(shape, 1)
        with pytest.raises(InvalidArgument):
            volume.plan_eviction(shape, 1, iter(()), 1)

    def test_plan_eviction_makes_space(self, volume: Volume) -> None:
        """The plan is sufficient and necessary, and planning changes nothing."""
        small, large = SHAPES[0], SHAPES[2]
        held: dict[BlockKey, Slot] = {}
        while slots := volume.allocate(small, 1):
            held[block_key(len(held))] = slots[0]
        for shape in (small, large):
            before = volume.usage()
            plan = volume.plan_eviction(shape, 4, iter(list(held.items())), len(held))
            assert plan is not None
            assert plan == list(held)[: len(plan)]
            assert volume.usage() == before
            assert volume.allocate(shape, 4) is None
            volume.free([held.pop(key) for key in plan])
            assert volume.plan_eviction(shape, 4, iter(()), 0) == []
            assert volume.allocate(shape, 4) is not None

    def test_plan_eviction_keeps_to_its_limit(self, volume: Volume) -> None:
        shape = SHAPES[0]
        held: list[Slot] = []
        while slots := volume.allocate(shape, 1):
            held += slots
        coldest = [(block_key(at), slot) for at, slot in enumerate(held)]
        assert volume.plan_eviction(shape, 5, iter(coldest), 4) is None
        assert volume.plan_eviction(shape, 5, iter(coldest), 5) == [block_key(at) for at in range(5)]
        assert volume.plan_eviction(shape, 5, iter(coldest[:4]), 100) is None

    def test_evicted_span_is_reused_for_other_size(self, volume: Volume) -> None:
        small, large = SHAPES[0], SHAPES[2]
        held: list[Slot] = []
        while slots := volume.allocate(small, 1):
            held += slots
        assert list(volume.coldest_spans(small, held[:9])) == [], "slots of its own leave one by one"
        before = volume.usage()
        leaving = next(volume.coldest_spans(large, held[:9]))
        assert held[0] in leaving
        assert set(leaving) <= set(held)
        assert volume.usage() == before
        assert volume.allocate(large, 1) is None
        volume.free(leaving)
        assert volume.allocate(large, 1) is not None

    def test_volume_many_threads_stays_consistent(self, volume: Volume) -> None:
        shape = SHAPES[1]
        failures: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for turn in range(8):
                    slots = volume.allocate(shape, 6)
                    assert slots is not None
                    items = items_for(slots, range(first + turn * 6, first + turn * 6 + 6), shape)
                    assert volume.write(items) == [None] * 6
                    assert_reads_back(volume, items)
                    volume.free(slots)
            except BaseException as error:  # noqa: BLE001 -- told by the thread that joins
                failures.append(error)

        threads = [threading.Thread(target=work, args=(at * 1000,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert volume.usage().blocks == 0

    def test_volume_close_twice_is_harmless(self, tmp_path: Path) -> None:
        volume = self.open_volume(tmp_path / "twice", self.CAPACITY)
        volume.close()
        volume.close()


class MappedVolumeSuite(VolumeSuite):
    """Further behaviour of volumes in memory."""

    @abstractmethod
    def open_volume(self, folder: Path, capacity_bytes: int) -> MappedVolume: ...

    def test_view_and_descriptor_show_the_same_bytes(self, volume: MappedVolume) -> None:
        shape = SHAPES[1]
        items = items_for(volume.allocate(shape, 3) or [], [1, 2, 3], shape)
        volume.write(items)
        slot, record, payload = items[1]
        assert volume.view(slot, shape.block_bytes) == payload
        with mmap.mmap(volume.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as other:
            assert other[slot.offset : slot.offset + shape.block_bytes] == payload
        volume.view(slot, 1)[0] ^= 1
        assert volume.read(emptied([items[1]])) == [Outcome.CORRUPT]
        assert volume.read(emptied([(slot, record, payload)]), verify=False) == [Outcome.HIT]

    def test_view_is_limited_to_its_slot(self, volume: MappedVolume) -> None:
        slots = volume.allocate(SHAPES[0], 1) or []
        with pytest.raises(InvalidArgument):
            volume.view(slots[0], slots[0].size + 1)


class DurableVolumeSuite(VolumeSuite):
    """Further behaviour of volumes that outlive the process. ``open_volume`` recovers the volume; ``open_raw`` does not."""

    @abstractmethod
    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        """Open the volume without recovery."""

    def open_volume(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        """Open and recover the volume."""
        volume = self.open_raw(folder, capacity_bytes)
        for _ in volume.recover():
            pass
        return volume

    def test_sealed_block_reads_back_with_checksums(self, volume: DurableVolume) -> None:
        shape = SHAPES[2]
        items = items_for(volume.allocate(shape, 3) or [], [1, 2, 3], shape)
        assert volume.write(items) == [None] * 3
        again = emptied([(slot, sealed(record), view) for slot, record, view in items])
        assert volume.read_with_checksums(again) == [(Outcome.HIT, record.checksums) for _, record, _ in items]
        assert [bytes(view) for _, _, view in again] == [bytes(view) for _, _, view in items]
        assert volume.read_with_checksums(emptied(items)) == [(Outcome.HIT, record.checksums) for _, record, _ in items]
        assert volume.read(again) == [Outcome.HIT] * 3

    def test_sealed_block_of_another_record_is_corrupt(self, volume: DurableVolume) -> None:
        shape = SHAPES[2]
        [(slot, record, view)] = items_for(volume.allocate(shape, 1) or [], [1], shape)
        assert volume.write([(slot, record, view)]) == [None]
        known = sealed(record)
        assert known.seal is not None
        for other in (
            replace(known, seal=known.seal ^ 1),
            replace(known, key=block_key(2)),
            replace(known, namespace=NamespaceId(bytes(16))),
            replace(known, parent=block_key(2)),
            replace(known, depth=known.depth + 1),
        ):
            for verify in (True, False):
                assert volume.read(emptied([(slot, other, view)]), verify=verify) == [Outcome.CORRUPT], other
        assert isinstance(volume.write([(slot, known, view)])[0], Internal)
        assert volume.read(emptied([(slot, known, view)])) == [Outcome.HIT]

    def test_volume_reports_shapes_that_fit(self, volume: DurableVolume) -> None:
        assert all(volume.fits(shape) for shape in SHAPES)
        largest = max(size for size in range(4096, self.CAPACITY + 4096, 4096) if volume.fits(BlockShape(1, size)))
        assert len(volume.allocate(BlockShape(1, largest), 1) or []) == 1
        with pytest.raises(InvalidArgument):
            volume.allocate(BlockShape(1, largest + 4096), 1)

    def test_volume_reopened_has_committed_blocks(self, tmp_path: Path) -> None:
        volume = self.open_volume(tmp_path, self.CAPACITY)
        kept: list[Item] = []
        for at, shape in enumerate(SHAPES):
            numbers = range(at * 10, at * 10 + 6)
            items = items_for(volume.allocate(shape, 6) or [], numbers, shape)
            assert volume.write(items) == [None] * 6
            volume.commit([(slot, record) for slot, record, _ in items[:5]], [])  # the sixth is written but not committed
            volume.commit([], [items[0][1].key])
            kept += items[1:5]
        volume.commit([], [block_key(999_999)])  # unknown keys are no error
        volume.close()

        again = self.open_raw(tmp_path, self.CAPACITY)
        with pytest.raises(Internal):
            again.allocate(SHAPES[0], 1)  # not before recovery
        found = sorted(again.recover(), key=lambda entry: entry[1].key)
        assert found == [(slot, record) for slot, record, _ in kept]
        assert again.usage().blocks == len(kept)
        for at in range(0, len(kept), 4):
            assert_reads_back(again, kept[at : at + 4])
        highest = max(slot.generation for slot, _, _ in kept)
        fresh = again.allocate(SHAPES[0], 3) or []
        assert all(slot.generation > highest for slot in fresh)
        assert not {slot.offset for slot in fresh} & {slot.offset for slot, _, _ in kept}
        again.close()

    def test_commit_of_known_key_replaces_its_slot(self, tmp_path: Path) -> None:
        """A commit removes before it stores: one commit can move a block to another slot."""
        shape = SHAPES[0]
        volume = self.open_volume(tmp_path, self.CAPACITY)
        old = items_for(volume.allocate(shape, 1) or [], [7], shape)
        volume.write(old)
        volume.commit([(old[0][0], old[0][1])], [])
        fresh = items_for(volume.allocate(shape, 1) or [], [7], shape)
        volume.write(fresh)
        volume.commit([(fresh[0][0], fresh[0][1])], [block_key(7)])
        volume.close()
        again = self.open_raw(tmp_path, self.CAPACITY)
        assert list(again.recover()) == [(fresh[0][0], fresh[0][1])]
        again.close()

    def test_commit_of_free_slot_is_rejected(self, volume: DurableVolume) -> None:
        items = items_for(volume.allocate(SHAPES[0], 1) or [], [1], SHAPES[0])
        volume.write(items)
        volume.free([items[0][0]])
        with pytest.raises(Internal):
            volume.commit([(items[0][0], items[0][1])], [])

    def test_volume_opened_twice_is_rejected(self, tmp_path: Path) -> None:
        volume = self.open_volume(tmp_path, self.CAPACITY)
        with pytest.raises(Exception, match="open"):
            self.open_raw(tmp_path, self.CAPACITY)
        volume.close()
        self.open_raw(tmp_path, self.CAPACITY).close()

    def test_volume_reports_its_io_engine(self, volume: DurableVolume) -> None:
        assert volume.io_engine
