"""Pinning of a mapped arena for the device's DMA, in the background.

Pinning has three costs: the kernel finds every page, enters it into this process's page table, and the driver registers it.
Several threads do the first two in advance (``MADV_POPULATE_WRITE``, which never changes content). The driver then pins chunk by
chunk, so that the first gigabytes are usable while later pages are still populated. The threads run on the device's NUMA node.

Rules, so that other processes of the host are not harmed:

1. Only pages that exist are populated. The kernel charges a page of shared memory to the process that touches it first, and the
   arena belongs to the node. A chunk waits until the node has allocated all of its pages, in the background if that takes long.
2. No huge pages are requested: pages that exist are as large as the node has made them.
3. One thread pins, one chunk at a time, in turn with the other processes that map the arena. A pin holds locks of the driver, for
   which every CUDA call on the host waits. Once the engine serves, there is a pause of the same length after each chunk.

Copies from unpinned memory also work, but they are slower and block the thread that begins them. They are counted.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvclient.device.driver import HostPinning, PinRefused
from kvclient.device.pins.host_turns import HostLock
from kvclient.memory.shared_mapping import is_charged_to_first_user, is_resident, populate
from kvstore.core.errors import Internal
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

CHUNK_BYTES = 128 << 20
"""Bytes pinned by one call, for which the driver's locks are held."""
PIECE_BYTES = 64 << 20
"""Bytes populated by one call: ``close`` takes effect between two calls."""
POPULATE_THREADS = 8
_PAUSES_S = (0.05, 5.0)
"""Least and longest pause before looking again for pages that the node has allocated."""
_IDLE_PAUSE_S = 0.5
"""Once pauses are this long, the node is assumed not to allocate pages at the moment."""
CAPTURE_S = 30.0
"""How long to retry while the driver refuses because graphs are captured: engines capture many graphs in sequence."""
_CAPTURE_PAUSE_S = 0.02
"""Between two attempts."""
_CLOSE_S = 30.0
"""Longer than pinning one chunk takes."""


@dataclass(frozen=True, slots=True)
class PinReport:
    """State of pinning.

    Attributes:
        bytes_total: size of the arena.
        bytes_pinned: bytes pinned until now.
        seconds: from the start to the last pinned chunk, or until now.
        done: whether nothing can be pinned at the moment: all is pinned, the driver refused, or the node has not allocated the
            rest.
        refused: error message of the driver; empty: no error.
        device_bytes: free memory that the device lost during the pins, for its page tables; None: the driver does not say. It
            includes what the engine allocates at the same moments.
    """

    bytes_total: int
    bytes_pinned: int
    seconds: float
    done: bool
    refused: str
    device_bytes: int | None


class PinnedRange:
    """One mapping that is being pinned. Thread-safe.

    Args:
        address: start of the mapping, a multiple of the page size.
        nbytes: its length.
        driver: pins.
        counters: counts refusals.
        chunk_bytes: bytes per pin.
        cpus: processors for the threads; None: any.
        threads: number of threads that populate.
        descriptor: of the memory, if it belongs to a node, open until ``close``; None: it belongs to this process.
        after: set when earlier pins of the same memory have been released; None: there are none.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        driver: HostPinning,
        counters: Counters,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        cpus: Collection[int] | None = None,
        threads: int | None = None,
        descriptor: int | None = None,
        after: threading.Event | None = None,
    ) -> None:
        self._after = after
        self.address = address
        self.nbytes = nbytes
        self.driver = driver
        self._counters = counters
        self._chunk_bytes = max(mmap.PAGESIZE, chunk_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        self._chunks = -(-nbytes // self._chunk_bytes)
        self._cpus = cpus
        self._waits_for_node = descriptor is not None and is_charged_to_first_user(descriptor)
        self._turns = HostLock(descriptor, counters)
        self._pinned = np.zeros(self._chunks, bool)
        self._changed = threading.Condition()
        self._left = [0] * self._chunks
        """Pieces of each chunk that are not populated yet."""
        self._ready: deque[int] = deque()
        """Populated chunks that are not pinned yet."""
        self._unpopulated = self._chunks
        self._idle = False
        """No page has appeared for a while, so nothing can be populated at the moment."""
        self._pinning = False
        self._serving = False
        self._refused = ""
        self._populate_refused = False
        self._closing = False
        self._pid = os.getpid()
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._device_bytes: int | None = 0
        self._workers = max(1, min(POPULATE_THREADS if threads is None else threads, len(cpus) if cpus else os.cpu_count() or 1))
        pieces = self._cut()
        self._threads: list[threading.Thread] = []
        try:
            self._start(self._threads, "populate", partial(self._populate_all, pieces))
            self._start(self._threads, "pin", self._pin_chunks)
        except RuntimeError as error:  # no more threads
            self._give_up(error)

    def _cut(self) -> list[tuple[int, int, int]]:
        """Pieces to populate: (chunk, start, stop), in order."""
        pieces = []
        for chunk in range(self._chunks):
            end = min((chunk + 1) * self._chunk_bytes, self.nbytes)
            for start in range(chunk * self._chunk_bytes, end, PIECE_BYTES):
                pieces.append((chunk, start, min(start + PIECE_BYTES, end)))
                self._left[chunk] += 1
        return pieces

    # ---- pinned chunks ----
    def chunk_of(self, starts: npt.NDArray[np.int64], nbytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """For ranges of memory: the chunk of each start, and whether the whole range is pinned.

        Args:
            starts: addresses.
            nbytes: bytes of each range.
        """
        first = (starts - self.address) // self._chunk_bytes
        last = (starts + (nbytes - 1) - self.address) // self._chunk_bytes
        if nbytes <= self._chunk_bytes:  # at most two chunks
            return first, self._pinned[first] & self._pinned[last]
        missing = np.concatenate([[0], np.cumsum(~self._pinned)])
        return first, missing[first] == missing[last + 1]

    @property
    def chunk_bytes(self) -> int:
        """Size of every chunk except the last, which may be shorter."""
        return self._chunk_bytes

    def report(self) -> PinReport:
        """Return the state of pinning."""
        with self._changed:
            pinned = int(self._pinned.sum()) * self._chunk_bytes
            if self._chunks and self._pinned[-1]:
                pinned -= self._chunks * self._chunk_bytes - self.nbytes
            done = self._is_done()
            ended_s = self._ended_s if done and self._ended_s is not None else time.monotonic()
            seconds = ended_s - self._began_s
            return PinReport(self.nbytes, pinned, seconds, done, self._refused, self._device_bytes)

    def _is_done(self) -> bool:
        over = self._closing or bool(self._refused) or ((self._idle or not self._unpopulated) and not self._ready)
        return over and not self._pinning

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing more can be pinned at the moment; see ``PinReport.done``. False: not in time."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout_s)

    def serve(self) -> None:
        """From now on, pause between chunks: the engine serves requests."""
        with self._changed:
            self._serving = True

    # ---- threads ----
    def _start(self, threads: list[threading.Thread], name: str, work: Callable[[], None]) -> None:
        """Start a thread and add it to ``threads``.

        Raises:
            RuntimeError: the process may start no further thread.
        """
        thread = threading.Thread(target=self._work, args=(work,), name=f"kvclient-{name}", daemon=True)
        thread.start()
        threads.append(thread)

    def _work(self, work: Callable[[], None]) -> None:
        if self._cpus:
            try:
                os.sched_setaffinity(0, self._cpus)  # only this thread
            except OSError as error:
                _log.info("CPU affinity not set: threads pin on any CPU (error=%s)", error)
        work()

    @property
    def _stopped(self) -> bool:
        return self._closing or bool(self._refused)

    def _populate_all(self, absent: list[tuple[int, int, int]]) -> None:
        """Populate pieces as their pages come into being, until all are populated."""
        pause_s = _PAUSES_S[0]
        while not self._stopped:
            here = [piece for piece in absent if self._may_exist(piece)]
            populated = self._populate(here)
            absent = [piece for piece in absent if piece not in populated]
            with self._changed:
                pause_s = _PAUSES_S[0] if populated else min(2 * pause_s, _PAUSES_S[1])
                self._idle = pause_s >= _IDLE_PAUSE_S
                self._changed.notify_all()
                if not absent:
                    return
                self._changed.wait_for(lambda: self._stopped, pause_s)

    def _may_exist(self, piece: tuple[int, int, int]) -> bool:
        """Whether the last page of a piece exists: cheap, and nodes allocate pages in order."""
        last = (piece[2] - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        return not self._waits_for_node or is_resident(self.address + last, 1)

    def _populate(self, pieces: list[tuple[int, int, int]]) -> set[tuple[int, int, int]]:
        """Populate those of some pieces whose pages all exist. Returns these."""
        queue, done = iter(pieces), set()
        lock = threading.Lock()

        def work() -> None:
            while not self._stopped:
                with lock:
                    piece = next(queue, None)
                if piece is None:
                    return
                if self._waits_for_node and not is_resident(self.address + piece[1], piece[2] - piece[1]):
                    continue
                self._populate_piece(*piece)
                with lock:
                    done.add(piece)

        helpers: list[threading.Thread] = []
        try:
            for number in range(1, min(self._workers, len(pieces))):
                self._start(helpers, f"populate-{number}", work)
        except RuntimeError as error:  # no more threads: this one does the rest
            _limited.warning("arena populated by fewer threads: slower (helpers=%d, error=%s)", len(helpers), error)
        work()
        for helper in helpers:
            helper.join()
        return done

    def _populate_piece(self, chunk: int, start: int, stop: int) -> None:
        if not populate(self.address + start, stop - start):
            self._note_refusal(os.strerror(ctypes.get_errno()))
        with self._changed:
            self._left[chunk] -= 1
            if not self._left[chunk]:
                self._unpopulated -= 1
                self._ready.append(chunk)
                self._changed.notify_all()

    def _note_refusal(self, error: str) -> None:
        """Count and log once that the kernel refused to populate pages. The driver then finds them itself, which is slower."""
        with self._changed:
            first, self._populate_refused = not self._populate_refused, True
        if first:
            self._counters.add(device_metrics.DEVICE_POPULATE_REFUSED)
            _log.info("arena not populated: pinning is slower (error=%s)", error)

    def _pin_chunks(self) -> None:
        if self._after is not None:
            self._after.wait(_CLOSE_S)
        while (chunk := self._take_chunk()) is not None:
            began_s = time.monotonic()
            try:
                self._pin_chunk(chunk)
            except (PinRefused, Internal) as refused:
                self._give_up(refused)
                return
            finally:
                with self._changed:
                    self._pinning = False
                    self._ended_s = time.monotonic()
                    self._changed.notify_all()
            took_s = time.monotonic() - began_s
            with self._changed:
                if self._serving:
                    self._changed.wait_for(lambda: self._stopped, took_s)
        if not self._stopped:
            report = self.report()
            _log.info(
                "arena pinned: %d MiB (seconds=%.1f, device_mib=%s)",
                report.bytes_pinned >> 20,
                report.seconds,
                "unknown" if report.device_bytes is None else report.device_bytes >> 20,
            )

    def _pin_chunk(self, chunk: int) -> None:
        start = chunk * self._chunk_bytes
        nbytes = min(self._chunk_bytes, self.nbytes - start)
        before = after = None

        def pin() -> None:
            nonlocal before, after
            before = self.driver.free_bytes()
            self.driver.pin(self.address + start, nbytes)
            self._pinned[chunk] = True  # even if a later call fails, ``close`` unpins it
            after = self.driver.free_bytes()

        self._retry_during_capture(pin, unless=lambda: self._closing)
        with self._changed:
            if before is None or after is None or self._device_bytes is None:
                self._device_bytes = None
            else:
                self._device_bytes += before - after

    def _retry_during_capture(self, call: Callable[[], None], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Call the driver in a turn, and retry while it reports a graph capture, except if ``unless`` is true. Bounded.

        Raises:
            PinRefused: the driver refused.
            Internal: the driver failed.
        """
        until_s = time.monotonic() + CAPTURE_S
        while True:
            try:
                with self._turns.turn(unless=unless):
                    call()
            except PinRefused as refused:
                if not refused.passes or unless() or time.monotonic() > until_s:
                    raise
                self._counters.add(device_metrics.DEVICE_PIN_RETRIES)
                time.sleep(_CAPTURE_PAUSE_S)
            else:
                return

    def _take_chunk(self) -> int | None:
        """Return the next populated chunk, after any wait for the node; None: nothing will be pinned any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._ready or not self._unpopulated)
            if self._stopped or not self._ready:
                return None
            self._pinning = True
            return self._ready.popleft()

    def _give_up(self, refused: Exception) -> None:
        """Leave the rest unpinned: the next chunk would probably be refused too, and the pinned chunks are useful."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
        with self._changed:
            first = not self._refused
            self._refused = self._refused or str(refused)
            self._changed.notify_all()
        if first:
            self._counters.add(device_metrics.DEVICE_PIN_REFUSED)
            _log.warning(
                "arena not pinned whole: about %d of %d MiB (error=%s); the rest is copied unpinned, slower. Raise the limit "
                "on locked memory, now %s (ulimit -l, LimitMEMLOCK=), or lower node.dram",
                self.report().bytes_pinned >> 20,
                self.nbytes >> 20,
                refused,
                limit,
            )

    # ---- end ----
    def close(self) -> bool:
        """Unpin all chunks. Call it without copies in flight, before the memory is unmapped; idempotent.

        Returns:
            False: a pin or unpin did not end: the memory must stay mapped.
        """
        if os.getpid() != self._pid:
            return True  # pins and threads belong to the parent process
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._counters.add(device_metrics.DEVICE_UNPIN_FAILED)
            _log.error("pinning not stopped: the arena stays mapped")
            return False
        sound = True
        for chunk in np.flatnonzero(self._pinned).tolist():
            try:
                self._retry_during_capture(partial(self.driver.unpin, self.address + chunk * self._chunk_bytes))
                self._pinned[chunk] = False
            except (PinRefused, Internal) as refused:
                sound = False
                self._counters.add(device_metrics.DEVICE_UNPIN_FAILED)
                _log.error("arena not unpinned: it stays mapped (error=%s)", refused)
        return sound


def cpus_near(bus_id: str) -> frozenset[int] | None:
    """Processors on the NUMA node of a PCI device, among those that this process may use.

    Args:
        bus_id: PCI address, ``0000:3b:00.0``.

    Returns:
        None: unknown, or none of them is allowed.
    """
    try:
        listed = Path("/sys/bus/pci/devices", bus_id, "local_cpulist").read_text(encoding="ascii") if bus_id else ""
    except OSError:
        return None
    cpus: set[int] = set()
    for stretch in filter(None, listed.strip().split(",")):
        first, _, last = stretch.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & os.sched_getaffinity(0)) or None
