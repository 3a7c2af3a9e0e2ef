"""A slab read by other processes than its owner: the suite, both kinds of I/O, and faults of its files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Conflict, CorruptBlock
from kvstore.core.types import BlockKey, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.mount_suite import MountSuite, drop, fetch, known, put
from kvstore.testing.volume_suite import SHAPES, block_key
from kvstore.tiers.contract import DurableVolume, Slot
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.ownership import MANIFEST_FILE
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slot_manifest import HEAD_BYTES, SlotManifestReader, SlotManifestWriter
from kvstore.tiers.nvme.superblock import Superblock

NAME = VolumeId("owner/nvme0")
SHAPE = SHAPES[0]


def open_owner(folder: Path, capacity_bytes: int = 4 << 20, *, direct: bool = True, counters: Counters | None = None) -> NvmeSlab:
    slab = NvmeSlab.open(folder / "v", volume_id=NAME, capacity_bytes=capacity_bytes, direct=direct, counters=counters)
    list(slab.recover())
    return slab


def descriptor_of(path: Path) -> int:
    """Return the descriptor with which this process has a file open."""
    [found] = [int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path.resolve())]
    return found


class TestMountedSlab(MountSuite):
    def open_owner(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return open_owner(folder, capacity_bytes)

    def mount(self, folder: Path) -> MountedSlab:
        return MountedSlab(folder / "v", NAME)


class TestBufferedMountedSlab(MountSuite):
    def open_owner(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return open_owner(folder, capacity_bytes, direct=False)

    def mount(self, folder: Path) -> MountedSlab:
        return MountedSlab(folder / "v", NAME, direct=False, io_threads=2)


def test_mount_other_or_replaced_volume_is_detected(tmp_path: Path) -> None:
    owner = open_owner(tmp_path)
    with pytest.raises(Conflict):
        MountedSlab(tmp_path / "v", VolumeId("other/nvme0"))
    with pytest.raises(OSError, match=r"slab\.kv"):
        MountedSlab(tmp_path, NAME)
    mounted = MountedSlab(tmp_path / "v", NAME)
    owner.close()
    (tmp_path / "v").rename(tmp_path / "old")
    open_owner(tmp_path).close()
    with pytest.raises(Conflict):
        mounted.catch_up()
    mounted.close()


def test_unwritable_manifest_recovers_without_failures(tmp_path: Path) -> None:
    counters = Counters()
    owner = open_owner(tmp_path, counters=counters)
    mounted = MountedSlab(tmp_path / "v", NAME)
    obstacle = tmp_path / "v" / f"{MANIFEST_FILE}.new"
    obstacle.mkdir()  # a new edition cannot be begun
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), descriptor_of(tmp_path / "v" / MANIFEST_FILE))  # nor the old one go on
    put(owner, [1], SHAPE)
    assert counters.snapshot()["slot_manifest_errors_total"] == 1
    put(owner, [2], SHAPE)
    obstacle.rmdir()
    put(owner, [3], SHAPE)
    mounted.catch_up()
    assert fetch(mounted, range(5), SHAPE) == [1, 2, 3]
    mounted.close()
    owner.close()


def test_damaged_or_foreign_manifest_is_rejected(tmp_path: Path) -> None:
    owner = open_owner(tmp_path)
    put(owner, range(3), SHAPE)
    owner.close()
    path = tmp_path / "v" / MANIFEST_FILE
    good = path.read_bytes()
    for bad in (b"", good[:100], b"x" + good[1:], good[:2000] + b"\xff" + good[2001:]):
        path.write_bytes(bad)
        with pytest.raises(CorruptBlock):
            MountedSlab(tmp_path / "v", NAME)


@given(data=st.data())
def test_torn_manifest_shows_earlier_state_and_recovers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With a truncated or garbled tail, the reader has the state after an earlier commit, and catches up later."""
    folder = tmp_path_factory.mktemp("manifest")
    superblock = Superblock(bytes(16), NAME, 1 << 30, 4096, 1)
    model: dict[BlockKey, Slot] = {}
    writer = SlotManifestWriter(folder, superblock, lambda: [list(model.items())], Counters())
    writer.begin()
    states = [dict(model)]
    steps = st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=8)
    for turn, (stored, removed) in enumerate(data.draw(steps)):
        for number in removed:
            model.pop(block_key(number), None)
        entries = [(block_key(number), Slot(4096 * number, 8192, turn + 1)) for number in sorted(stored)]
        model.update(entries)
        writer.append(entries, [block_key(number) for number in removed])
        states.append(dict(model))
    writer.close()
    path = folder / MANIFEST_FILE
    whole = path.read_bytes()
    cut = data.draw(st.integers(HEAD_BYTES, len(whole)))
    noise = data.draw(st.binary(max_size=40))
    path.write_bytes(whole[:cut] + noise)
    reader = SlotManifestReader(folder)
    reader.catch_up()
    assert reader.slots in states
    path.write_bytes(whole)
    reader.catch_up()
    assert reader.slots == model


@given(commits=st.lists(st.tuples(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30))), max_size=30), step=st.integers(1, 6))
def test_edition_is_written_during_commits(
    tmp_path_factory: pytest.TempPathFactory, commits: list[tuple[set[int], set[int]]], step: int
) -> None:
    """Each commit copies a few entries to the next edition. Readers have the state of the catalog at any time."""
    folder = tmp_path_factory.mktemp("manifest")
    model = {block_key(number): Slot(4096 * number, 8192, 0) for number in range(0, 30, 2)}
    copied: list[int] = []

    def pages() -> Iterator[list[tuple[BlockKey, Slot]]]:
        after = b""
        while page := sorted(entry for entry in model.items() if entry[0] > after)[:2]:
            copied.append(len(page))
            yield page
            after = page[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.tiers.nvme.slot_manifest._HISTORY_BYTES", -HEAD_BYTES)
        patch.setattr("kvstore.tiers.nvme.slot_manifest.STEP_ENTRIES", step)
        writer = SlotManifestWriter(folder, Superblock(bytes(16), NAME, 1 << 30, 4096, 1), pages, Counters())
        writer.begin()
        reader = SlotManifestReader(folder)
        for turn, (stored, removed) in enumerate(commits):
            for number in removed:
                model.pop(block_key(number), None)
            entries = [(block_key(number), Slot(4096 * number, 8192, turn + 1)) for number in sorted(stored)]
            model.update(entries)
            copied.clear()
            writer.append(entries, [block_key(number) for number in removed])
            assert sum(copied) <= step + 1
            reader.catch_up()
            assert reader.slots == model
        writer.close()


def test_invalid_slots_are_left_out(tmp_path: Path) -> None:
    entries = [
        (block_key(1), Slot(0, 8192, 1)),
        (block_key(2), Slot(1 << 20, 8192, 1)),
        (block_key(3), Slot((1 << 64) - 4096, 8192, 1)),
        (block_key(4), Slot(1, 8192, 1)),
        (block_key(5), Slot(0, 0, 1)),
        (block_key(6), Slot(0, (1 << 64) - 4096, 1)),
    ]
    writer = SlotManifestWriter(tmp_path, Superblock(bytes(16), NAME, 1 << 20, 4096, 1), lambda: [entries], Counters())
    writer.begin()
    writer.close()
    reader = SlotManifestReader(tmp_path)
    reader.catch_up()
    assert set(reader.slots) == {block_key(1)}


def test_manifest_history_is_dropped_regularly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.nvme.slot_manifest._HISTORY_BYTES", 4096)
    owner = open_owner(tmp_path)
    mounted = MountedSlab(tmp_path / "v", NAME)
    chance = random.Random(5)
    held = put(owner, range(8), SHAPE)
    for turn in range(1, 300):
        drop(owner, {number: held.pop(number) for number in chance.sample(sorted(held), 4)})
        held |= put(owner, range(8 * turn, 8 * turn + 4), SHAPE)
        if turn % 20 == 0:
            mounted.catch_up()
            assert known(mounted, sorted(held), SHAPE) == sorted(held) == fetch(mounted, range(8 * turn + 4), SHAPE)
    assert (tmp_path / "v" / MANIFEST_FILE).stat().st_size < 40_000
    mounted.close()
    owner.close()
