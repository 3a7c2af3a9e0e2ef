"""The arena's own features: backing, prefault, memory after close; and injected faults."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import CapacityExceeded, InvalidArgument
from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.process.memory.shared_memory import COLLAPSE, HUGE_PAGE_BYTES, advise, map_shared
from kvstore.testing.faulty_volume import FaultPlan, FaultyMappedVolume, FaultyVolume, VolumeFault, VolumeOperation
from kvstore.testing.volume_suite import DurableVolumeSuite, MappedVolumeSuite, assert_reads_back, block_key, emptied, items_for
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import DurableVolume, MappedVolume
from kvstore.tiers.nvme.slab import NvmeSlab
from support.wait import wait_until

SHAPE = BlockShape(2, 5000)


class TestFaultyArenaWithoutFaults(MappedVolumeSuite):
    """The wrapper itself changes nothing."""

    def open_volume(self, folder: Path, capacity_bytes: int) -> MappedVolume:
        return FaultyMappedVolume(DramArena(VolumeId("arena"), capacity_bytes), FaultPlan())


class TestFaultySlabWithoutFaults(DurableVolumeSuite):
    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return FaultyVolume(NvmeSlab.open(folder / "volume", volume_id=VolumeId("v"), capacity_bytes=capacity_bytes), FaultPlan())


def test_arena_larger_than_memory_is_rejected() -> None:
    with pytest.raises(CapacityExceeded, match=r"node\.dram"):
        DramArena(VolumeId("a"), 1 << 50)


def test_reserved_huge_pages_are_used_or_counted() -> None:
    counters = Counters()
    arena = DramArena(VolumeId("a"), 4 << 20, huge_pages=True, counters=counters)
    assert ("reserved" not in arena.backing) == bool(counters.snapshot().get("arena_huge_pages_refused_total"))
    assert arena.mapped_bytes >= 4 << 20
    arena.close()


def test_prefault_makes_huge_pages_of_memory_in_use() -> None:
    """Blocks written before and during the exchange of pages keep their bytes, here and in another mapping."""
    counters = Counters()
    arena = DramArena(VolumeId("a"), 80 << 20, prefault=True, counters=counters)
    owner, other = map_shared(arena.fileno(), arena.mapped_bytes)
    items = items_for(arena.allocate(SHAPE, 400) or [], range(400), SHAPE)
    for item in items:
        arena.write([item])
    wait_until(lambda: "100 %" in arena.backing or counters.get("arena_huge_pages_refused_total") > 0)
    assert_reads_back(arena, items)
    for slot, _, payload in items:
        assert other[slot.offset : slot.offset + SHAPE.block_bytes] == payload
    other.release()
    owner.close()
    arena.close()


@pytest.mark.parametrize("pages", [1, 512, 513])
def test_shared_mapping_starts_at_a_huge_page(pages: int) -> None:
    size = pages * mmap.PAGESIZE
    descriptor = os.memfd_create("a")
    os.ftruncate(descriptor, size)
    owner, memory = map_shared(descriptor, size)
    assert memory.nbytes == size
    assert np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0
    memory[-1:] = b"x"
    assert os.pread(descriptor, 1, size - 1) == b"x"
    memory.release()
    owner.close()
    os.close(descriptor)


def test_file_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-2, mmap.PAGESIZE)
    descriptor = os.memfd_create("a")
    with pytest.raises(ValueError, match="smaller"):  # else the first access ends the process
        map_shared(descriptor, mmap.PAGESIZE)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("refused", "times", "share", "counted"),
    [
        pytest.param(errno.EINVAL, 1, "memfd", 1, id="this kernel exchanges none"),
        pytest.param(errno.EBUSY, 1, "memfd", 1, id="the memory limit"),
        pytest.param(errno.EAGAIN, 3, "memfd, 100 % transparent huge pages", 0, id="in use for a moment"),
        pytest.param(errno.ENOMEM, 3, "memfd, 100 % transparent huge pages", 0, id="none free for a moment"),
        pytest.param(errno.EAGAIN, 99, "memfd", 1, id="in use by a device"),
    ],
)
def test_refused_huge_pages_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, refused: int, times: int, share: str, counted: int
) -> None:
    calls: list[int] = []

    def answer(address: int, nbytes: int, advice: int) -> int:
        if advice != COLLAPSE:
            return advise(address, nbytes, advice)
        calls.append(address)
        return refused if len(calls) <= times else 0

    monkeypatch.setattr("kvstore.tiers.arena.advise", answer)
    monkeypatch.setattr("kvstore.tiers.arena._EXCHANGE_PAUSE_S", 0.01)
    counters = Counters()
    arena = DramArena(VolumeId("a"), 80 << 20, prefault=True, counters=counters)
    wait_until(lambda: arena.backing == share and counters.get("arena_huge_pages_refused_total") == counted)
    arena.close()


def test_prefault_touches_everything_and_changes_nothing() -> None:
    arena = DramArena(VolumeId("a"), 80 << 20, prefault=True)
    items = items_for(arena.allocate(SHAPE, 4) or [], range(4), SHAPE)
    arena.write(items)
    wait_until(lambda: os.fstat(arena.fileno()).st_blocks * 512 == 80 << 20)
    assert_reads_back(arena, items)
    arena.close()


def test_closing_does_not_wait_for_prefault_to_finish() -> None:
    DramArena(VolumeId("a"), 1 << 30, prefault=True).close()


def test_views_outlive_the_arena() -> None:
    """An open view keeps its memory allocated after the arena is closed."""
    counters = Counters()
    arena = DramArena(VolumeId("a"), 1 << 20, counters=counters)
    items = items_for(arena.allocate(SHAPE, 1) or [], [1], SHAPE)
    arena.write(items)
    view = arena.view(items[0][0], SHAPE.block_bytes)
    arena.close()
    assert view == items[0][2]
    assert counters.snapshot() == {"arena_closed_with_views_total": 1}


def test_killed_process_leaves_no_memory() -> None:
    """The kernel frees a memfd with the last process that has it open."""
    program = (
        "import os, signal; from kvstore.tiers.arena import DramArena\n"
        "arena = DramArena('leak-check', 8 << 20)\n"
        "print(os.readlink(f'/proc/self/fd/{arena.fileno()}'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "memfd:kvstore-leak-check (deleted)" in done.stdout


def test_arena_smaller_than_a_page_is_rejected() -> None:
    with pytest.raises(InvalidArgument):
        DramArena(VolumeId("a"), 100)


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan(seed=7)


@pytest.fixture
def faulty(tmp_path: Path, plan: FaultPlan) -> FaultyVolume:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=4 << 20)
    list(slab.recover())
    return FaultyVolume(slab, plan)


def test_faults_follow_the_plan(faulty: FaultyVolume, plan: FaultPlan) -> None:
    items = items_for(faulty.allocate(SHAPE, 6) or [], range(6), SHAPE)
    plan.add(VolumeFault.NO_SPACE, operation=VolumeOperation.WRITE, keys=[block_key(1)])
    plan.add(VolumeFault.TORN_WRITE, operation=VolumeOperation.WRITE, keys=[block_key(2)])
    plan.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.WRITE, keys=[block_key(3)])
    failures = faulty.write(items)
    assert [at for at, failure in enumerate(failures) if failure] == [1]
    assert isinstance(failures[1], OSError)
    assert failures[1].errno == errno.ENOSPC
    plan.clear()
    plan.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.READ, keys=[block_key(0)], times=1)
    plan.add(VolumeFault.SHORT_READ, operation=VolumeOperation.READ, keys=[block_key(4)])
    plan.add(VolumeFault.IO_ERROR, operation=VolumeOperation.READ, keys=[block_key(5)], skip=1)
    good, corrupt, unavailable = Outcome.HIT, Outcome.CORRUPT, Outcome.UNAVAILABLE
    assert faulty.read(emptied(items)) == [corrupt, corrupt, corrupt, corrupt, unavailable, good]
    assert faulty.read(emptied(items)) == [good, corrupt, corrupt, corrupt, unavailable, unavailable]
    plan.clear()
    plan.add(VolumeFault.IO_ERROR, operation=VolumeOperation.COMMIT, times=1)
    with pytest.raises(OSError, match="Input/output"):
        faulty.commit([(items[0][0], items[0][1])], [])
    faulty.commit([(items[0][0], items[0][1])], [])
    assert plan.happened[VolumeFault.IO_ERROR] == 2
    assert "with faults" in faulty.io_engine
    faulty.close()


def test_hangs_hold_until_they_are_released(faulty: FaultyVolume, plan: FaultPlan) -> None:
    items = items_for(faulty.allocate(SHAPE, 1) or [], [1], SHAPE)
    plan.add(VolumeFault.HANG, operation=VolumeOperation.WRITE, times=1)
    results: list[Exception | None] = []
    thread = threading.Thread(target=lambda: results.extend(faulty.write(items)))
    thread.start()
    assert plan.hanging.acquire(timeout=30)
    assert not results
    plan.release_hangs()
    thread.join(30)
    assert results == [None]
    faulty.close()


def test_delays_call_the_given_sleep(tmp_path: Path) -> None:
    waited: list[int] = []
    plan = FaultPlan(delay=lambda: waited.append(1))
    arena = FaultyMappedVolume(DramArena(VolumeId("a"), 1 << 20), plan)
    items = items_for(arena.allocate(SHAPE, 2) or [], [1, 2], SHAPE)
    plan.add(VolumeFault.DELAY, operation=VolumeOperation.WRITE)
    assert arena.write(items) == [None, None]
    assert len(waited) == 2
    assert_reads_back(arena, items)
    arena.close()


def test_same_seed_gives_same_faults(tmp_path: Path) -> None:
    def outcomes(seed: int) -> list[Outcome]:
        plan = FaultPlan(seed=seed)
        arena = FaultyMappedVolume(DramArena(VolumeId("a"), 1 << 20), plan)
        items = items_for(arena.allocate(SHAPE, 40) or [], range(40), SHAPE)
        arena.write(items)
        plan.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.READ, probability=0.5)
        found = arena.read(emptied(items))
        del items
        arena.close()
        return found

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert {*outcomes(1)} == {Outcome.HIT, Outcome.CORRUPT}
