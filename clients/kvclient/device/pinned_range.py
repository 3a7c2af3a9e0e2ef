"""Pinning of a mapped arena for the device's DMA, in the background.

Pinning has three costs: the kernel finds every page (and zeroes it for the first process that touches it), enters it into this
process's page table, and the driver registers it. Several threads do the first two in advance (``MADV_POPULATE_WRITE``, which
never changes content). The driver then pins chunk by chunk, so that the first gigabytes are usable while later pages are still
populated. Huge pages make all of it cheaper, if the host grants them for shared memory. The threads run on the NUMA node of the
device, so that untouched pages are allocated there.

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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvclient.device.driver import HostPinning, PinRefused
from kvstore.core.errors import Internal
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
"""Bytes pinned by one call. A copy may not cross the border of two chunks, so there should be few."""
PIECE_BYTES = 64 << 20
"""Bytes populated by one call: ``close`` takes effect between two calls."""
POPULATE_THREADS = 8
PIN_THREADS = 2
"""The driver pins under its own locks and those of the address space: more threads would only wait."""
CAPTURE_S = 30.0
"""How long to retry while the driver refuses because graphs are captured: engines capture many graphs in sequence."""
_CAPTURE_PAUSE_S = 0.02
"""Between two attempts."""
_CLOSE_S = 30.0
"""Longer than pinning one chunk takes."""
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class PinReport:
    """State of pinning.

    Attributes:
        bytes_total: size of the arena.
        bytes_pinned: bytes pinned until now.
        seconds: from the start to the last chunk, or until now.
        done: whether pinning has ended.
        refused: error message of the driver; empty: no error.
        huge_pages: whether the kernel accepted the request for huge pages.
    """

    bytes_total: int
    bytes_pinned: int
    seconds: float
    done: bool
    refused: str
    huge_pages: bool


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
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self._driver = driver
        self._counters = counters
        self._chunk_bytes = max(mmap.PAGESIZE, chunk_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        self._chunks = -(-nbytes // self._chunk_bytes)
        self._cpus = cpus
        self._pinned = np.zeros(self._chunks, bool)
        self._changed = threading.Condition()
        self._left = [0] * self._chunks
        """Pieces of each chunk that are not populated yet."""
        self._next_chunk = 0
        self._refused = ""
        self._closing = False
        self._pid = os.getpid()
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._working = 0
        count = max(1, min(POPULATE_THREADS if threads is None else threads, len(cpus) if cpus else os.cpu_count() or 1))
        pieces = self._cut()
        self._pieces = iter(pieces)
        workers: list[tuple[str, Callable[[], None]]] = [("pin", self._pin_chunks)] * min(PIN_THREADS, self._chunks)
        workers += [("populate", self._populate_pieces)] * min(count, len(pieces))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.huge_pages = self._ask_for_huge_pages()
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name=f"kvclient-{name}-{number}", daemon=True)
            for number, (name, work) in enumerate(workers)
        ]
        self._working = len(self._threads)
        for thread in self._threads:
            thread.start()

    def _cut(self) -> list[tuple[int, int, int]]:
        """Pieces to populate: (chunk, start, stop), in order."""
        pieces = []
        for chunk in range(self._chunks):
            end = min((chunk + 1) * self._chunk_bytes, self.nbytes)
            for start in range(chunk * self._chunk_bytes, end, PIECE_BYTES):
                pieces.append((chunk, start, min(start + PIECE_BYTES, end)))
                self._left[chunk] += 1
        return pieces

    def _ask_for_huge_pages(self) -> bool:
        """Request huge pages.

        The kernel grants them if the host sets ``advise`` or ``always``; reserved huge pages refuse the call.
        """
        refused: int = self._libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), mmap.MADV_HUGEPAGE)
        return refused == 0

    # ---- pinned chunks ----
    def chunk_of(self, starts: npt.NDArray[np.int64], nbytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """For ranges of memory: the chunk of each start, and whether the whole range is pinned.

        Args:
            starts: addresses.
            nbytes: bytes of each range, at most a chunk.
        """
        first = (starts - self.address) // self._chunk_bytes
        last = (starts + (nbytes - 1) - self.address) // self._chunk_bytes
        return first, self._pinned[first] & self._pinned[last]

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
            ended_s = self._ended_s if self._ended_s is not None else time.monotonic()
            seconds = ended_s - self._began_s
            return PinReport(self.nbytes, pinned, seconds, self._ended_s is not None, self._refused, self.huge_pages)

    def wait(self, timeout_s: float) -> bool:
        """Wait until pinning has ended, with or without success. False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._working == 0, timeout_s)

    # ---- threads ----
    def _work(self, work: Callable[[], None]) -> None:
        try:
            if self._cpus:
                try:
                    os.sched_setaffinity(0, self._cpus)  # only this thread
                except OSError as error:
                    _log.info("failed to set CPU affinity for pinning (error=%s)", error)
            work()
        finally:
            with self._changed:
                self._working -= 1
                if not self._working:
                    self._finish()
                self._changed.notify_all()

    def _finish(self) -> None:
        self._ended_s = time.monotonic()
        if not self._refused and not self._closing:
            seconds = self._ended_s - self._began_s
            _log.info("pinned arena: %d MiB (seconds=%.1f, huge_pages=%s)", self.nbytes >> 20, seconds, self.huge_pages)

    def _populate_pieces(self) -> None:
        while True:
            with self._changed:
                piece = None if self._closing or self._refused else next(self._pieces, None)
            if piece is None:
                return
            chunk, start, stop = piece
            address, length = ctypes.c_void_p(self.address + start), ctypes.c_size_t(stop - start)
            # kernels before 5.14 refuse this: then the driver finds the pages itself, which is slower
            self._libc.madvise(address, length, _MADV_POPULATE_WRITE)
            with self._changed:
                self._left[chunk] -= 1
                if not self._left[chunk]:
                    self._changed.notify_all()

    def _pin_chunks(self) -> None:
        while (chunk := self._take_chunk()) is not None:
            start = chunk * self._chunk_bytes
            nbytes = min(self._chunk_bytes, self.nbytes - start)
            try:
                self._retry_during_capture(partial(self._driver.pin, self.address + start, nbytes), unless=lambda: self._closing)
            except (PinRefused, Internal) as refused:
                self._give_up(refused)
                return
            with self._changed:
                self._pinned[chunk] = True

    def _retry_during_capture(self, call: Callable[[], None], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Call the driver, and retry while it reports a graph capture, except if ``unless`` is true. Bounded.

        Raises:
            PinRefused: the driver refused.
            Internal: the driver failed.
        """
        until_s = time.monotonic() + CAPTURE_S
        while True:
            try:
                call()
            except PinRefused as refused:
                if not refused.passes or unless() or time.monotonic() > until_s:
                    raise
                self._counters.add(device_metrics.DEVICE_PIN_RETRIES)
                time.sleep(_CAPTURE_PAUSE_S)
            else:
                return

    def _take_chunk(self) -> int | None:
        """Return the next populated chunk; None: nothing more to pin."""
        with self._changed:
            chunk = self._next_chunk
            if chunk >= self._chunks:
                return None
            self._next_chunk += 1
            # bounded: populating ends, and close and _give_up notify
            self._changed.wait_for(lambda: self._closing or self._refused or not self._left[chunk])
            return None if self._closing or self._refused else chunk

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
                "failed to pin arena: pinned about %d of %d MiB (error=%s), the rest is copied unpinned, slower. Raise the limit "
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
            _log.error("failed to stop pinning: the arena stays mapped")
            return False
        sound = True
        for chunk in np.flatnonzero(self._pinned).tolist():
            try:
                self._retry_during_capture(partial(self._driver.unpin, self.address + chunk * self._chunk_bytes))
                self._pinned[chunk] = False
            except (PinRefused, Internal) as refused:
                sound = False
                self._counters.add(device_metrics.DEVICE_UNPIN_FAILED)
                _log.error("failed to unpin arena: it stays mapped (error=%s)", refused)
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
