"""Conformance suite of mounted volumes: readers of a volume that another process owns.

Subclass it, name the class ``Test…``, and give it both ends::

    class TestMyMount(MountSuite):
        def open_owner(self, folder: Path, capacity_bytes: int) -> DurableVolume: ...
        def mount(self, folder: Path) -> MountedSlab: ...

The main rule: a HIT always returns the block's own bytes, even during changes by the owner.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.types import BlockShape, NamespaceId, Outcome
from kvstore.testing.volume_suite import NAMESPACE, SHAPES, block_key, block_payload, empty_memory, items_for
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.nvme.mounted import MountedSlab

Held = dict[int, tuple[Slot, BlockRecord]]


def put(owner: DurableVolume, numbers: Sequence[int], shape: BlockShape) -> Held:
    """Store test blocks durably."""
    slots = owner.allocate(shape, len(numbers))
    assert slots is not None
    items = items_for(slots, numbers, shape)
    assert owner.write(items) == [None] * len(items)
    owner.commit([(slot, record) for slot, record, _ in items], [])
    return {number: (slot, record) for number, (slot, record, _) in zip(numbers, items, strict=True)}


def drop(owner: DurableVolume, held: Held) -> None:
    """Evict blocks: remove them from the catalog, then free their slots."""
    owner.commit([], [record.key for _, record in held.values()])
    owner.free([slot for slot, _ in held.values()])


def known(mount: MountedSlab, numbers: Sequence[int], shape: BlockShape) -> list[int]:
    """Blocks that the mount would read."""
    slots = mount.find([block_key(number) for number in numbers], shape)
    return [number for number, slot in zip(numbers, slots, strict=True) if slot is not None]


def fetch(
    mount: MountedSlab, numbers: Sequence[int], shape: BlockShape, *, namespace: NamespaceId = NAMESPACE, aligned: bool = True
) -> list[int]:
    """Read blocks that the mount knows. Returns the hits, each compared byte for byte."""
    keys = [block_key(number) for number in numbers]
    found = [(number, slot) for number, slot in zip(numbers, mount.find(keys, shape), strict=True) if slot is not None]
    views = empty_memory(len(found), shape, aligned=aligned) if found else []
    items = [(block_key(number), slot, view) for (number, slot), view in zip(found, views, strict=True)]
    hits = []
    for (number, _), view, (outcome, _) in zip(found, views, mount.read(namespace, shape, items), strict=True):
        if outcome is Outcome.HIT:
            assert bytes(view) == block_payload(number, shape), "WRONG BYTES"
            hits.append(number)
    return hits


class MountSuite(ABC):
    """Behaviour that every reader of a shared volume must have."""

    CAPACITY = 4 << 20

    @abstractmethod
    def open_owner(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        """Open or create the volume of a folder as its owner, recovered."""

    @abstractmethod
    def mount(self, folder: Path) -> MountedSlab:
        """Mount the same volume."""

    @pytest.fixture
    def owner(self, tmp_path: Path) -> Iterator[DurableVolume]:
        """Owner of a volume of ``CAPACITY`` bytes."""
        owner = self.open_owner(tmp_path, self.CAPACITY)
        yield owner
        owner.close()

    @pytest.fixture
    def mounted(self, owner: DurableVolume, tmp_path: Path) -> Iterator[MountedSlab]:  # noqa: ARG002
        """A reader of the volume."""
        mounted = self.mount(tmp_path)
        yield mounted
        mounted.close()

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
    def test_mount_reads_blocks_of_the_owner(
        self, owner: DurableVolume, mounted: MountedSlab, shape: BlockShape, aligned: bool
    ) -> None:
        numbers = range(11)
        held = put(owner, numbers, shape)
        assert known(mounted, numbers, shape) == []
        mounted.catch_up()
        assert fetch(mounted, [*numbers, 99], shape, aligned=aligned) == [*numbers]
        slot, record = held[3]
        [view] = empty_memory(1, shape, aligned=aligned)
        assert mounted.read(NAMESPACE, shape, [(record.key, slot, view)]) == [(Outcome.HIT, record)]

    def test_mount_evicted_block_is_a_miss(self, owner: DurableVolume, mounted: MountedSlab) -> None:
        shape = SHAPES[2]
        held = put(owner, range(6), shape)
        while owner.allocate(shape, 1):
            pass  # only the slots that these blocks free are available
        mounted.catch_up()
        drop(owner, {number: held[number] for number in (1, 4)})
        put(owner, [7, 8], shape)
        assert fetch(mounted, range(9), shape) == [0, 2, 3, 5]
        assert known(mounted, range(9), shape) == [0, 2, 3, 5]
        mounted.catch_up()
        assert fetch(mounted, range(9), shape) == [0, 2, 3, 5, 7, 8]

    def test_mount_block_moved_by_owner_is_found(self, owner: DurableVolume, mounted: MountedSlab) -> None:
        shape = SHAPES[0]
        held = put(owner, range(4), shape)
        drop(owner, held)
        put(owner, [9, *range(3, -1, -1)], shape)
        mounted.catch_up()
        assert fetch(mounted, range(10), shape) == [0, 1, 2, 3, 9]

    def test_mount_other_generation_is_a_miss(self, owner: DurableVolume, mounted: MountedSlab) -> None:
        shape = SHAPES[0]
        held = put(owner, [1], shape)
        mounted.catch_up()
        drop(owner, held)
        again = put(owner, [1], shape)
        assert again[1][0].offset == held[1][0].offset
        assert fetch(mounted, [1], shape) == []
        mounted.catch_up()
        assert fetch(mounted, [1], shape) == [1]

    def test_mount_other_namespace_or_shape_is_a_miss(self, owner: DurableVolume, mounted: MountedSlab) -> None:
        put(owner, range(3), SHAPES[0])
        mounted.catch_up()
        assert known(mounted, range(3), SHAPES[2]) == []
        assert fetch(mounted, range(3), SHAPES[0], namespace=NamespaceId(bytes(16))) == []

    def test_mount_owner_stopped_or_restarted_is_read(self, tmp_path: Path) -> None:
        shape = SHAPES[1]
        owner = self.open_owner(tmp_path, self.CAPACITY)
        put(owner, range(20), shape)
        owner.close()
        mounted = self.mount(tmp_path)
        assert fetch(mounted, range(20), shape) == [*range(20)]
        owner = self.open_owner(tmp_path, 2 * self.CAPACITY)
        held = put(owner, [20], shape)
        mounted.catch_up()
        assert fetch(mounted, range(21), shape) == [*range(21)]
        drop(owner, held)
        owner.close()
        mounted.catch_up()
        assert known(mounted, range(21), shape) == [*range(20)]
        mounted.close()

    def test_mount_twice_reads_the_same(self, owner: DurableVolume, mounted: MountedSlab, tmp_path: Path) -> None:
        put(owner, range(5), SHAPES[3])
        mounted.catch_up()
        second = self.mount(tmp_path)
        assert fetch(mounted, range(5), SHAPES[3]) == fetch(second, range(5), SHAPES[3]) == [*range(5)]
        second.close()

    def test_mount_slots_rewritten_returns_no_wrong_byte(self, owner: DurableVolume, mounted: MountedSlab) -> None:
        shape = SHAPES[2]
        seen = set()
        done = threading.Event()
        held = put(owner, range(8), shape)
        mounted.catch_up()

        def rewrite() -> None:
            nonlocal held
            try:
                for turn in range(1, 40):
                    drop(owner, held)
                    held = put(owner, [(turn * 5 + at) % 24 for at in range(8)], shape)
            finally:
                done.set()

        writer = threading.Thread(target=rewrite)
        writer.start()
        while not done.is_set():
            seen.update(fetch(mounted, range(24), shape))
            mounted.catch_up()
        writer.join()
        mounted.catch_up()
        assert sorted(fetch(mounted, range(24), shape)) == sorted(held)
        assert seen
