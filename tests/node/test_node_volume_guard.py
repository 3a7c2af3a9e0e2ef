"""Guarded I/O: callers leave a volume that does not answer, and memory of the I/O is released exactly once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.node.base.volume_guard import CHANGERS, VolumeGuard, VolumeStalled, ignore
from kvstore.observe.counters import Counters
from support.wait import wait_until

STALL_S = 0.1
READERS = 2
LONG_S = 30.0


class Disk:
    """I/O that hangs until it is released, and its result."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = threading.Semaphore(0)
        self.late: list[BaseException | None] = []
        self.back = threading.Semaphore(0)
        self.answered_s = -math.inf
        self.counters = Counters()
        self.guard = VolumeGuard("n/nvme0", self.counters, answered_s=lambda: self.answered_s, stall_s=STALL_S, readers=READERS)

    def hang(self) -> str:
        self.begun.release()
        assert self.release.wait(LONG_S)
        return "came"

    def note(self, error: BaseException | None) -> None:
        self.late.append(error)
        self.back.release()


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.release.set()
    made.guard.close()


def test_guard_volume_that_answers_passes_results_and_errors(disk: Disk) -> None:
    assert disk.guard.read(lambda: 7, disk.note) == 7
    assert disk.guard.change(lambda: 8, disk.note) == 8
    with pytest.raises(OSError, match="bad sector"):
        disk.guard.read(lambda: (_ for _ in ()).throw(OSError("bad sector")), disk.note)
    with pytest.raises(TimeoutError, match="of the I/O itself"):
        disk.guard.read(lambda: (_ for _ in ()).throw(TimeoutError("of the I/O itself")), disk.note)
    assert disk.late == [], "nobody left"
    assert disk.counters.get("volume_stalls_total") == 0


def test_guard_hung_volume_refuses_until_it_answers(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(VolumeStalled):
        disk.guard.read(disk.hang, disk.note)
    assert disk.guard.stalled
    assert disk.late == []
    began = disk.guard.outstanding
    for work in (disk.guard.read, disk.guard.change):
        with pytest.raises(VolumeStalled):
            work(disk.hang, disk.note)  # type: ignore[operator]
    assert disk.guard.outstanding == began == 1, "nothing else is sent to it"
    assert [type(error) for error in disk.late] == [VolumeStalled] * 2, "what was refused holds nothing"
    assert "has not answered I/O for" in disk.guard.why()
    disk.release.set()
    wait_until(lambda: len(disk.late) == 3)
    assert disk.late[-1] is None, "the read came, too late"
    wait_until(lambda: not disk.guard.abandoned)
    assert not disk.guard.stalled
    assert disk.guard.why() == ""
    assert disk.guard.read(lambda: 7, ignore) == 7
    assert disk.counters.get("volume_stalls_total") == 1
    assert "volume stalled: n/nvme0" in caplog.text
    assert "volume answers again: n/nvme0" in caplog.text


def test_guard_more_reads_than_threads_all_leave_and_settle(disk: Disk) -> None:
    with ThreadPoolExecutor(9) as callers:
        reads = [callers.submit(disk.guard.read, disk.hang, disk.note) for _ in range(9)]
        assert all(isinstance(read.exception(LONG_S), VolumeStalled) for read in reads)
    threads = READERS + CHANGERS
    assert disk.guard.outstanding == threads, "as many threads hang as the volume has"
    wait_until(lambda: len(disk.late) == 9 - threads)  # I/O that had not begun is settled at once
    disk.release.set()
    wait_until(lambda: len(disk.late) == 9)
    wait_until(lambda: disk.guard.abandoned == 0)


def test_guard_device_that_answers_parts_is_waited_for(disk: Disk) -> None:
    """One large write of which a request is answered now and then."""
    parts = 0

    def slow() -> str:
        nonlocal parts
        while not disk.release.wait(STALL_S / 4):
            disk.answered_s = MonotonicClock().now_s()
            parts += 1
        return "came"

    with ThreadPoolExecutor(1) as callers:
        write = callers.submit(disk.guard.change, slow, disk.note)
        wait_until(lambda: parts > 12)
        assert not disk.guard.stalled
        disk.release.set()
        assert write.result(LONG_S) == "came"
    assert disk.late == []


def test_guard_changes_wait_for_every_abandoned_change(disk: Disk) -> None:
    settled = threading.Event()
    with pytest.raises(VolumeStalled):
        disk.guard.change(disk.hang, lambda _: settled.wait(LONG_S) and None)
    disk.release.set()
    wait_until(lambda: not disk.guard.stalled)
    assert disk.guard.read(lambda: 7, ignore) == 7, "reads go on at once"
    assert not disk.guard.takes_changes
    with pytest.raises(VolumeStalled):
        disk.guard.change(lambda: 8, ignore)
    settled.set()
    wait_until(lambda: disk.guard.takes_changes)
    assert disk.guard.change(lambda: 8, ignore) == 8


def test_guard_caller_out_of_time_leaves_a_slow_volume(disk: Disk) -> None:
    patient = VolumeGuard("n/nvme1", stall_s=LONG_S)
    with pytest.raises(VolumeStalled):
        patient.read(disk.hang, disk.note, MonotonicClock().now_s() + 0.01)
    assert not patient.stalled
    disk.release.set()
    wait_until(lambda: disk.late == [None] or [type(error) for error in disk.late] == [VolumeStalled])
    patient.close()


def test_guard_closed_settles_what_it_refuses(disk: Disk) -> None:
    disk.guard.close()
    with pytest.raises(VolumeStalled):
        disk.guard.read(disk.hang, disk.note)
    disk.guard.begin(disk.hang, disk.note)
    assert [type(error) for error in disk.late] == [VolumeStalled] * 2


def test_guard_background_read_is_not_cancelled(disk: Disk) -> None:
    disk.guard.begin(disk.hang, disk.note)
    assert disk.begun.acquire(timeout=LONG_S)
    assert disk.guard.abandoned == 1
    disk.release.set()
    assert disk.back.acquire(timeout=LONG_S)
    assert disk.late == [None]


def test_guard_window_hung_does_not_hold_up_close(disk: Disk) -> None:
    window = disk.guard.submit(lambda: disk.guard.timed(disk.hang))
    assert disk.begun.acquire(timeout=LONG_S)
    disk.guard.close()
    assert disk.guard.stalled
    assert not window.done()
    disk.release.set()
    assert window.result(LONG_S) == "came"


def test_guard_cached_answers_do_not_hide_a_stall(disk: Disk) -> None:
    """``stat`` on the volume's files is answered by the kernel's caches, however long the disk hangs."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            with suppress(VolumeStalled):
                disk.guard.look_up(lambda: True)

    with ThreadPoolExecutor(1) as lookers:
        lookers.submit(look)
        with pytest.raises(VolumeStalled):
            disk.guard.read(disk.hang, disk.note, MonotonicClock().now_s() + LONG_S)
        assert disk.guard.stalled
        over.set()


def test_guard_without_thread_never_runs_what_it_refused(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller releases memory, or takes blocks as kept, once its I/O is refused: it must not run in another thread later."""
    start, begun, readers = threading.Thread.start, [], []

    def limited_start(thread: threading.Thread) -> None:
        if thread.name in {"kvstore-volume_1", "kvstore-volume-read_1"}:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    disk.guard.begin(disk.hang, ignore)
    readers.append(disk.guard.submit(disk.hang))
    for _ in range(2):
        assert disk.begun.acquire(timeout=LONG_S)
    with pytest.raises(VolumeStalled):
        disk.guard.change(lambda: begun.append("change"), disk.note)
    with pytest.raises(Unavailable):
        disk.guard.submit(lambda: begun.append("window"))
    assert [type(error) for error in disk.late] == [VolumeStalled]
    disk.release.set()
    assert readers[0].result(LONG_S) == "came"
    monkeypatch.undo()  # the first thread may not be idle yet
    assert disk.guard.read(lambda: 7, disk.note) == 7
    assert begun == []
