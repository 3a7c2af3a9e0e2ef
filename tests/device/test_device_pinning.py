"""Pinning in the background, with a fake in place of the driver alone: real memory, threads and forks."""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from caches import block_bytes, make_cache
from deferred import DeferredDevice, FakePinning, bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvclient.device.copier import DeviceCopier
from kvclient.device.driver import CudaDriver
from kvclient.device.pins import host_turns, pinned_range
from kvclient.device.pins.pinned_range import PinnedRange, cpus_near
from kvclient.memory.device_buffer import ArenaPin
from kvclient.memory.shared_mapping import MappingUse, map_file
from kvstore.core.errors import Internal, Unavailable
from kvstore.native import address_of
from kvstore.observe.counters import Counters
from support.wait import wait_until

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True, scope="module")
def _no_pauses() -> Iterator[None]:
    """A node without new pages is idle at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_range, "_IDLE_PAUSE_S", 0.0)
        patch.setattr(pinned_range, "_PAUSES_S", (0.005, 0.02))
        yield


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    fd = os.memfd_create("test-pinning")
    os.ftruncate(fd, 100 * PAGE)
    with mmap.mmap(fd, 100 * PAGE) as mapped:
        os.close(fd)
        yield mapped


def pin(memory: mmap.mmap, driver: FakePinning, counters: Counters | None = None, **options: object) -> PinnedRange:
    view = memoryview(memory)
    address = address_of(view)
    view.release()
    return PinnedRange(address, len(memory), driver, counters or Counters(), chunk_bytes=8 * PAGE, **options)  # type: ignore[arg-type]


def test_pinning_covers_all_chunks_and_changes_no_byte(memory: mmap.mmap) -> None:
    memory[:] = content = bytes(range(256)) * (100 * PAGE // 256)
    driver = FakePinning()
    pins = pin(memory, driver)
    assert pins.wait(10)
    base = pins.address
    assert driver.pinned == {base + at * PAGE: min(8, 100 - at) * PAGE for at in range(0, 100, 8)}
    report = pins.report()
    assert (report.bytes_total, report.bytes_pinned, report.done, report.refused) == (100 * PAGE, 100 * PAGE, True, "")
    assert memory[:] == content
    starts = base + np.array([0, 8 * PAGE - 1, 99 * PAGE], np.int64)
    first, pinned = pins.chunk_of(starts, PAGE)
    assert first.tolist() == [0, 0, 12]
    assert pinned.all()
    assert pins.close()
    assert driver.pinned == {}
    assert pins.close()


def test_pages_are_populated_before_the_driver_pins(memory: mmap.mmap) -> None:
    resident: list[int] = []

    def look(_: int) -> None:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        rss = [line for line in lines if line.startswith("Pss_Shmem:")]
        resident.append(int(rss[0].split()[1]))

    driver = FakePinning()
    before_kib = 0
    driver.before_pin = look
    look(0)
    before_kib = resident.pop()
    pins = pin(memory, driver, threads=1)
    assert pins.wait(10)
    chunk_kib = 8 * PAGE >> 10
    assert all(
        seen - before_kib >= min(number * chunk_kib, 100 * PAGE >> 10) - 4 for number, seen in enumerate(sorted(resident), 1)
    )
    pins.close()


def test_pin_refusal_leaves_rest_unpinned_and_is_logged(memory: mmap.mmap, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakePinning(refuse_from=3)
    with caplog.at_level(logging.WARNING):
        pins = pin(memory, driver)
        assert pins.wait(10)
    report = pins.report()
    assert report.done
    assert report.bytes_pinned == 24 * PAGE
    assert "out of memory" in report.refused
    _, pinned = pins.chunk_of(pins.address + np.arange(100, dtype=np.int64) * PAGE, PAGE)
    assert int(pinned.sum()) == 24, "what was pinned before the refusal serves"
    assert [record for record in caplog.records if "limit on locked memory" in record.getMessage()]
    assert len(caplog.records) == 1
    assert pins.close()
    assert driver.pinned == {}


def test_pin_during_graph_capture_is_retried(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakePinning()
    driver.captures = 7
    counters = Counters()
    pins = pin(memory, driver, counters)
    assert pins.wait(10)
    assert (pins.report().bytes_pinned, pins.report().refused) == (100 * PAGE, "")
    assert counters.snapshot() == {"device_pin_retries_total": 7}
    driver.captures = 3
    assert pins.close()
    assert driver.pinned == {}
    monkeypatch.setattr(pinned_range, "CAPTURE_S", 0.1)
    driver.captures = 10**6
    pins = pin(memory, driver)
    assert pins.wait(10), "one that has no end does"
    assert "capturing" in pins.report().refused
    assert pins.close()


def test_close_during_capture_does_not_wait(memory: mmap.mmap) -> None:
    driver = FakePinning()
    driver.captures = 10**6
    counters = Counters()
    threads_before = set(threading.enumerate())
    pins = pin(memory, driver, counters)
    while not counters.snapshot():
        pass
    assert pins.close()
    assert set(threading.enumerate()) <= threads_before, "threads of the range are alive"


def test_close_during_pinning_unpins_all_chunks(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakePinning()
    at_second, joining, go_on = threading.Event(), threading.Event(), threading.Event()
    join = threading.Thread.join

    def hold(call: int) -> None:
        if call >= 2:
            at_second.set()
            assert go_on.wait(10)

    def join_threads(thread: threading.Thread, timeout: float | None = None) -> None:
        joining.set()
        join(thread, timeout)

    driver.before_pin = hold
    pins = pin(memory, driver)
    assert at_second.wait(10)
    monkeypatch.setattr(threading.Thread, "join", join_threads)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(pins.close()))
    closer.start()
    assert joining.wait(10), "close waits for the threads, which pin no more chunks"
    go_on.set()
    closer.join(10)
    assert closed == [True]
    assert driver.pinned == {}
    assert driver.calls <= 4
    assert pins.report().done


def test_hung_pin_keeps_memory_mapped(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.device.pins.pinned_range._CLOSE_S", 0.05)
    driver = FakePinning()
    go_on, begun = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        assert go_on.wait(10)

    driver.before_pin = hold
    pins = pin(memory, driver)
    assert begun.wait(10)
    assert not pins.close()
    go_on.set()
    assert pins.wait(10)
    assert pins.close()
    assert driver.pinned == {}


def test_failed_unpin_keeps_memory_mapped(memory: mmap.mmap) -> None:
    driver = FakePinning()
    pins = pin(memory, driver)
    assert pins.wait(10)
    driver.refuse_unpin = True
    assert not pins.close()
    driver.refuse_unpin = False
    assert pins.close()


def test_forked_child_keeps_parent_pins(memory: mmap.mmap) -> None:
    driver = FakePinning()
    pins = pin(memory, driver)
    assert pins.wait(10)
    driver.refuse_unpin = True  # a call in the child would be seen as a failure to close
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        send.send(pins.close())
        os._exit(0)
    os.waitpid(child, 0)
    assert receive.poll(10)
    assert receive.recv() is True
    assert len(driver.pinned) == 13
    driver.refuse_unpin = False
    assert pins.close()


# ---- memory of a node ----
class NodeMemory:
    """A node's arena, of which the node has allocated some pages."""

    def __init__(self, pages: int) -> None:
        self.fd = os.memfd_create("test-node")
        os.ftruncate(self.fd, pages * PAGE)
        self.use = map_file(self.fd, pages * PAGE)
        self.pages = pages

    def allocate(self, pages: Iterable[int]) -> None:
        for page in pages:
            os.pwrite(self.fd, b"n" * PAGE, page * PAGE)

    @property
    def allocated(self) -> int:
        return os.fstat(self.fd).st_blocks * 512 // PAGE

    def pin(self, driver: FakePinning, counters: Counters | None = None) -> PinnedRange:
        return PinnedRange(
            address_of(self.use.view),
            self.pages * PAGE,
            driver,
            counters or Counters(),
            chunk_bytes=4 * PAGE,
            descriptor=self.use.descriptor,
        )

    def close(self) -> None:
        self.use.close()
        os.close(self.fd)


@settings(max_examples=20)
@given(allocated=st.sets(st.integers(0, 20)), later=st.sets(st.integers(0, 20)))
def test_pins_cover_only_pages_that_the_node_has(allocated: set[int], later: set[int]) -> None:
    """Model: a chunk is pinned once all its pages exist. Pinning never allocates a page of the node."""
    memory, driver = NodeMemory(21), FakePinning()
    memory.allocate(allocated)
    pins = memory.pin(driver)
    for some in (allocated, allocated | later):
        memory.allocate(some - allocated)
        whole = [chunk for chunk in range(6) if some.issuperset(range(4 * chunk, min(4 * chunk + 4, 21)))]
        wait_until(lambda whole=whole: pins.report().bytes_pinned >= sum(min(4, 21 - 4 * at) * PAGE for at in whole), "pins")
        assert pins.wait(10)
        assert sorted(driver.pinned) == [pins.address + 4 * chunk * PAGE for chunk in whole]
        assert memory.allocated == len(some)
    assert pins.close()
    assert driver.pinned == {}
    memory.close()


def test_pin_cost_on_the_device_is_reported(memory: mmap.mmap) -> None:
    driver = FakePinning()
    driver.cost_per_page = 8
    pins = pin(memory, driver)
    assert pins.wait(10)
    assert pins.report().device_bytes == 800
    assert pins.close()
    driver.free = None
    pins = pin(memory, driver)
    assert pins.wait(10)
    assert pins.report().device_bytes is None
    assert pins.close()


def hold_turn(descriptor: int, pipe: Connection) -> None:
    """Another process: it ends its turn after a message."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    pipe.send(None)
    pipe.recv()
    os._exit(0)


@pytest.mark.parametrize("ends", [True, False])
def test_pins_of_processes_are_made_in_turns(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_turns, "TURN_S", 60.0 if ends else 0.05)
    memory, driver, counters = NodeMemory(8), FakePinning(), Counters()
    memory.allocate(range(8))
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=hold_turn, args=(memory.fd, theirs))
    other.start()
    ours.recv()
    pins = memory.pin(driver, counters)
    if ends:
        assert not pins.wait(0.2)
        assert driver.calls == 0
        ours.send(None)
        assert pins.wait(10), "after its turn it is ours"
        assert counters.snapshot() == {}
    else:
        assert pins.wait(10), "a process that does not end its turn is not waited for"
        assert counters.snapshot() == {"device_pin_turns_missed_total": 2}
        ours.send(None)
    assert len(driver.pinned) == 2
    assert pins.close()
    other.join(10)
    memory.close()


def test_pin_followed_by_a_driver_error_is_released(memory: mmap.mmap) -> None:
    driver = FakePinning()
    free = driver.free_bytes

    def fails() -> int | None:
        if driver.pinned:
            raise Internal("the CUDA driver cannot enter the device's context")
        return free()

    driver.free_bytes = fails  # type: ignore[method-assign]
    pins = pin(memory, driver)
    assert pins.wait(10)
    assert len(driver.pinned) == 1
    assert pins.close()
    assert driver.pinned == {}


def test_refused_populate_is_counted_and_arena_pinned(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.14: the driver finds the pages itself."""
    monkeypatch.setattr(pinned_range, "populate", lambda *_: False)
    driver, counters = FakePinning(), Counters()
    pins = pin(memory, driver, counters)
    assert pins.wait(10)
    assert (pins.report().bytes_pinned, pins.report().refused) == (100 * PAGE, "")
    assert counters.snapshot() == {"device_populate_refused_total": 1}
    assert pins.close()


@pytest.mark.parametrize(("refused", "pages"), [("kvclient-populate-1", 100), ("kvclient-populate", 0), ("kvclient-pin", 0)])
def test_pinning_without_a_thread_is_reported(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, refused: str, pages: int
) -> None:
    """A missing helper costs time. Without one of the two main threads, copies are unpinned."""
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    driver, counters = FakePinning(), Counters()
    pins = pin(memory, driver, counters, threads=4)
    assert pins.wait(10)
    assert pins.report().bytes_pinned == sum(driver.pinned.values()) == pages * PAGE
    assert counters.snapshot() == ({} if pages else {"device_pin_refused_total": 1})
    assert pins.report().refused == ("" if pages else "can't start new thread")
    assert pins.close()
    assert driver.pinned == {}


def test_pins_of_a_serving_engine_are_completed(memory: mmap.mmap) -> None:
    driver = FakePinning()
    pins = pin(memory, driver)
    pins.serve()
    assert pins.wait(10)
    assert len(driver.pinned) == 13
    assert pins.close()


# ---- one pin per process ----
class SharedUses(RuleBasedStateMachine):
    """Sessions of several copiers on several arenas, in any order: one mapping and one pin per arena with a session."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakePinning()
        self.copiers = [
            DeviceCopier(make_cache("mla"), pin_chunk_bytes=4 * PAGE, device=DeferredDevice(seed, self.driver)) for seed in (1, 2)
        ]
        self.files = [os.memfd_create(f"test-shared-{number}") for number in range(2)]
        for fd in self.files:
            os.ftruncate(fd, 8 * PAGE)
            os.pwrite(fd, bytes(8 * PAGE), 0)
        self.open: list[tuple[int, MappingUse, ArenaPin]] = []

    @rule(copier=st.integers(0, 1), file=st.integers(0, 1))
    def begin(self, copier: int, file: int) -> None:
        use = map_file(self.files[file], 8 * PAGE)
        self.open.append((file, use, self.copiers[copier].mapped(use.view, use.descriptor)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, use, guard = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert guard.close()
        assert guard.close(), "idempotent"
        use.close()

    @invariant()
    def each_arena_is_mapped_and_pinned_once(self) -> None:
        assert all(copier.wait_pinned(10) for copier in self.copiers)
        used = {file for file, _, _ in self.open}
        maps = Path("/proc/self/maps").read_text(encoding="ascii")
        assert [maps.count(f"memfd:test-shared-{number}") for number in range(2)] == [number in used for number in range(2)]
        bases = {address_of(use.view) for _, use, _ in self.open}
        assert len(bases) == len(used)
        assert sorted(self.driver.pinned) == sorted(base + at * PAGE for base in bases for at in (0, 4))

    def teardown(self) -> None:
        while self.open:
            _, use, guard = self.open.pop()
            assert guard.close()
            use.close()
        for fd in self.files:
            os.close(fd)


TestSharedUses = SharedUses.TestCase
TestSharedUses.settings = settings(max_examples=10, stateful_step_count=8, deadline=None)


def test_pins_requested_during_release_are_made_after_it() -> None:
    """A session that opens while the last one of its arena closes must neither pin twice nor stay unpinned."""
    memory, driver = NodeMemory(8), FakePinning()
    memory.allocate(range(8))
    copier = DeviceCopier(make_cache("mla"), pin_chunk_bytes=4 * PAGE, device=DeferredDevice(1, driver))
    first = copier.mapped(memory.use.view, memory.use.descriptor)
    assert copier.wait_pinned(10)
    unpinning, go_on = threading.Event(), threading.Event()
    unpin = driver.unpin

    def hold(address: int) -> None:
        unpinning.set()
        assert go_on.wait(10)
        unpin(address)

    driver.unpin = hold  # type: ignore[method-assign]
    closer = threading.Thread(target=first.close)
    closer.start()
    assert unpinning.wait(10)
    second = copier.mapped(memory.use.view, memory.use.descriptor)
    go_on.set()
    closer.join(10)
    assert copier.wait_pinned(10)
    assert len(driver.pinned) == 2
    assert [report.bytes_pinned for report in copier.pin_reports()] == [8 * PAGE]
    assert second.close()
    assert driver.pinned == {}
    memory.close()


def test_blocks_longer_than_chunks_are_copied() -> None:
    """Chunks have one size per process: the blocks of some cache may be longer."""
    for seed, way in itertools.product(range(4), ("staged", "batched")):
        driver = FakePinning()
        device = DeferredDevice(seed, driver)
        cache = make_cache("flash_nhd", layers=2, tokens=16, heads=4, dim=64, seed=seed)
        copier = DeviceCopier(cache, strategy=way, pin_chunk_bytes=PAGE, device=device)  # type: ignore[arg-type]
        size = copier.shape.block_bytes
        assert size > 3 * PAGE
        fd = os.memfd_create("test-long")
        os.ftruncate(fd, 5 * size)
        os.pwrite(fd, bytes_of(5 * size, seed).tobytes(), 0)
        use = map_file(fd, 5 * size)
        guard = copier.mapped(use.view, use.descriptor)
        assert copier.wait_pinned(10)
        offsets = np.array([3, 1, 2]) * size
        expected = np.stack([np.frombuffer(os.pread(fd, size, at), np.uint8) for at in offsets.tolist()])
        blocks = copier.blocks([0, 4, 2])
        blocks.read_arena(use.view, offsets, 0, 0, 2)
        blocks.drain()
        assert np.array_equal(block_bytes(cache, [0, 4, 2]), expected)
        blocks = copier.blocks([2, 4, 0])
        blocks.write_arena(use.view, offsets)
        blocks.drain()
        stored = np.stack([np.frombuffer(os.pread(fd, size, at), np.uint8) for at in offsets.tolist()])
        assert np.array_equal(stored, expected[::-1])
        assert copier.stats().get("device_unpinned_bytes_total", 0) == 0
        assert guard.close()
        use.close()
        os.close(fd)


def test_cpus_near_returns_processors_of_the_device() -> None:
    assert cpus_near("") is None
    assert cpus_near("ffff:ff:1f.7") is None


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_missing_driver_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"libcuda\.so"):
        CudaDriver(0)
