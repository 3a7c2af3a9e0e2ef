"""Pinning in the background, with a fake in place of the driver alone: real memory, threads and forks."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deferred import FakePinning

from kvclient.device import pinned_range
from kvclient.device.driver import CudaDriver
from kvclient.device.pinned_range import PinnedRange, cpus_near
from kvstore.core.errors import Unavailable
from kvstore.native import address_of
from kvstore.observe.counters import Counters

PAGE = mmap.PAGESIZE


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
    monkeypatch.setattr("kvclient.device.pinned_range._CLOSE_S", 0.05)
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


def test_cpus_near_returns_processors_of_the_device() -> None:
    assert cpus_near("") is None
    assert cpus_near("ffff:ff:1f.7") is None


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_missing_driver_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"libcuda\.so"):
        CudaDriver(0)
