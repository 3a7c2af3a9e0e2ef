"""A slab on a file system that is full or read-only: stores fail, reads continue, and writes resume when possible."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import CapacityExceeded, CorruptBlock, Unavailable
from kvstore.core.types import BlockKey, BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.volume_suite import Item, assert_reads_back, emptied, items_for
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.slab import NvmeSlab
from support.small_disk import fill_up, mounted

SHAPE = BlockShape(3, 20_000)
SMALL = BlockShape(512, 8)
CAPACITY = 8 << 20
Found = list[tuple[Slot, BlockRecord]]


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 24 MiB."""
    place = tmp_path / "disk"
    with mounted(place, "24m") as is_mounted:
        if not is_mounted:
            pytest.skip("a file system of its own takes root: what a full or read-only disk does was NOT tested")
        yield place


def open_slab(folder: Path, counters: Counters | None = None, capacity: int = CAPACITY) -> tuple[NvmeSlab, Found]:
    slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=capacity, counters=counters)
    return slab, list(slab.recover())


def stored(slab: NvmeSlab, count: int, shape: BlockShape = SHAPE, first: int = 0) -> list[Item]:
    items = items_for(slab.allocate(shape, count) or [], range(first, first + count), shape)
    assert slab.write(items) == [None] * count
    slab.commit([(slot, record) for slot, record, _ in items], [])
    return items


def keys_of(found: Found) -> set[BlockKey]:
    return {record.key for _, record in found}


def use_up_the_catalog(slab: NvmeSlab) -> None:
    """Commit until the catalog has neither disk space nor free pages."""
    for at in range(400):
        items = items_for(slab.allocate(SMALL, 4) or [], range(1000 + at * 4, 1004 + at * 4), SMALL)
        assert slab.write(items) == [None] * 4
        try:
            slab.commit([(slot, record) for slot, record, _ in items], [])
        except CapacityExceeded:
            slab.free([slot for slot, _, _ in items])
            return
        assert_reads_back(slab, items)
    raise AssertionError("the disk was not full")


def assert_takes_nothing(slab: NvmeSlab, kept: list[Item]) -> None:
    """Check the read-only state: stores fail, reads succeed."""
    assert slab.read_only is not None
    assert "read-only" in slab.io_engine
    assert slab.allocate(SHAPE, 1) is None
    assert slab.plan_eviction(SHAPE, 1, iter([(record.key, slot) for slot, record, _ in kept]), 100) is None
    with pytest.raises(Unavailable, match="read-only"):
        slab.commit([], [kept[0][1].key])
    assert all(isinstance(error, Unavailable) for error in slab.write(kept))
    assert slab.read(emptied(kept)) == [Outcome.HIT] * len(kept)
    assert_reads_back(slab, kept)


def test_full_file_system_fails_stores_and_keeps_reads(small_disk: Path) -> None:
    """The slab has its space already, so the full disk affects the catalog. Stores fail, reads continue, no block is lost."""
    with pytest.raises(CapacityExceeded):
        NvmeSlab.open(small_disk / "large", volume_id=VolumeId("v"), capacity_bytes=64 << 20)
    slab, _ = open_slab(small_disk / "volume", capacity=16 << 20)
    kept = stored(slab, 5)
    filler = fill_up(small_disk / "filler")
    use_up_the_catalog(slab)
    assert_reads_back(slab, kept)
    filler.unlink()
    stored(slab, 5, first=50)
    slab.close()
    again, found = open_slab(small_disk / "volume", capacity=16 << 20)
    assert keys_of([(slot, record) for slot, record, _ in kept]) <= keys_of(found)
    again.close()


@pytest.mark.parametrize("lock_file", ["kept", "lost"])
def test_full_disk_volume_opens_and_stores_after_space_is_freed(small_disk: Path, counters: Counters, lock_file: str) -> None:
    folder = small_disk / "volume"
    slab, _ = open_slab(folder)
    kept = stored(slab, 5)
    filler = fill_up(small_disk / "filler")
    use_up_the_catalog(slab)
    slab.close()
    if lock_file == "lost":  # LMDB would create it again, and its first access to memory without disk space would raise SIGBUS
        (folder / "catalog" / "lock.mdb").unlink()
        fill_up(small_disk / "more")

    full, found = open_slab(folder, counters)
    assert {record.key for _, record, _ in kept} <= keys_of(found)
    if full.read_only is None:  # a few free pages were left: the next epochs use them up
        for _ in range(50):
            full.close()
            full, found = open_slab(folder, counters)
            if full.read_only is not None:
                break
    assert "No space" in (full.read_only or "")
    assert counters.snapshot()["nvme_opened_read_only_total"] == 1
    assert_takes_nothing(full, kept)
    assert not full.resume()
    assert_takes_nothing(full, kept)

    filler.unlink()
    (small_disk / "more").unlink(missing_ok=True)
    assert full.resume()
    assert full.read_only is None
    assert "read-only" not in full.io_engine
    assert counters.snapshot()["nvme_resumed_total"] == 1
    fresh = stored(full, 5, first=50)
    assert min(slot.generation for slot, _, _ in fresh) > max(slot.generation for slot, _ in found)
    full.commit([], [kept[0][1].key])
    full.close()
    again, found = open_slab(folder)
    assert {record.key for _, record, _ in [*kept[1:], *fresh]} <= keys_of(found)
    assert kept[0][1].key not in keys_of(found)
    assert_reads_back(again, [*kept[1:], *fresh])
    again.close()


def test_read_only_file_system_volume_opens(small_disk: Path, counters: Counters) -> None:
    slab, _ = open_slab(small_disk / "volume")
    kept = stored(slab, 5)
    slab.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        frozen, found = open_slab(small_disk / "volume", counters)
        assert frozen.read_only == "Read-only file system"
        assert keys_of(found) == {record.key for _, record, _ in kept}
        assert_takes_nothing(frozen, kept)
        assert not frozen.resume()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert frozen.resume()
    stored(frozen, 5, first=50)
    frozen.close()
    again, found = open_slab(small_disk / "volume")
    assert len(found) == 10
    assert_reads_back(again, kept)
    again.close()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the catalog reject commits, as a full disk does."""

    def full(*_args: object) -> None:
        raise CapacityExceeded("no space for the catalog", reason=os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(Catalog, "commit", full)


def test_bad_entries_not_dropped_keep_their_slots(
    tmp_path: Path, counters: Counters, fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the bad entry could claim the slot of a later block at the next start."""
    slab, _ = open_slab(tmp_path / "v")
    kept = stored(slab, 3)
    slab.close()
    catalog = Catalog(tmp_path / "v" / "catalog", map_bytes=256 << 20)
    catalog.commit([(BlockKey(b"\xff" * 16), b"no header")], [])
    catalog.close()
    fail()
    full, found = open_slab(tmp_path / "v", counters)
    assert len(found) == 3
    assert_takes_nothing(full, kept)
    assert not full.resume(), "the bad entry is still there"
    monkeypatch.undo()
    assert full.resume()
    stored(full, 2, first=50)
    full.close()
    again, found = open_slab(tmp_path / "v", counters)
    assert len(found) == 5
    assert counters.snapshot()["nvme_recovery_dropped_total"] == 1
    again.close()


def test_damage_is_not_taken_for_full_disk(tmp_path: Path) -> None:
    slab, _ = open_slab(tmp_path / "v")
    slab.close()
    (tmp_path / "v" / "catalog" / "data.mdb").write_bytes(b"garbage" * 2000)
    with pytest.raises(CorruptBlock, match="kvstore volumes repair"):
        open_slab(tmp_path / "v")
