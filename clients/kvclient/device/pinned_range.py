"""Pins a mapped arena for the device's DMA, in the background, and fast.

Pinning takes three costs: the kernel must find (and for the first process that touches them, zero) every page, enter it into this
process's page table, and the driver must take it. The first two are done ahead by several threads (``MADV_POPULATE_WRITE``, which
never changes content), the last in chunks as they become ready, so that the first gigabytes are usable while the last are
touched. Huge pages, where the host grants them for shared memory, make all of it cheaper; the threads run near the device, so
that pages which nobody has touched yet come from its NUMA node.

What is not pinned works too: copies out of it are slower and hold up whoever begins them. They are counted.
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

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
"""Pinned in one call. A copy may not reach over the border of two, so there should not be many."""
PIECE_BYTES = 64 << 20
"""Populated in one call: between two, whoever closes is heard."""
POPULATE_THREADS = 8
PIN_THREADS = 2
"""The driver takes memory under locks of its own and of the address space: more threads only wait there."""
CAPTURE_S = 30.0
"""How long the driver may refuse a pin, or its end, because graphs are captured: engines capture many, one after the other."""
_CAPTURE_PAUSE_S = 0.02
"""Between two tries."""
_CLOSE_S = 30.0
"""Longer than any chunk takes."""
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class PinReport:
    """How pinning went.

    Attributes:
        bytes_total: of the arena.
        bytes_pinned: so far.
        seconds: from the start to the last chunk; so far, while it goes on.
        done: whether it has ended.
        refused: what the driver said where it refused; empty: it did not.
        huge_pages: whether the kernel was asked for huge pages, and did not refuse.
    """

    bytes_total: int
    bytes_pinned: int
    seconds: float
    done: bool
    refused: str
    huge_pages: bool


class PinnedRange:
    """One mapping on its way to being pinned. Thread-safe.

    Args:
        address: of the mapping, a multiple of the page size.
        nbytes: its length.
        driver: pins.
        counters: where refusals are counted.
        chunk_bytes: pinned at a time.
        populate: whether this process touches the pages first; False: they are taken as they are.
        cpus: processors that the threads run on; None: anywhere.
        threads: that populate.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        driver: HostPinning,
        counters: Counters,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        populate: bool = True,
        cpus: Collection[int] | None = None,
        threads: int | None = None,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self._driver = driver
        self._counters = counters
        self._chunk_bytes = max(mmap.PAGESIZE, chunk_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        self._chunks = -(-nbytes // self._chunk_bytes)
        self._populate = populate
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
        if populate:
            workers += [("populate", self._populate_pieces)] * min(count, len(pieces))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.huge_pages = populate and self._ask_for_huge_pages()
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
                self._left[chunk] += int(self._populate)
        return pieces

    def _ask_for_huge_pages(self) -> bool:
        """Shared memory has them where the host says ``advise`` or ``always``; reserved ones refuse, and are huge anyway."""
        refused: int = self._libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), mmap.MADV_HUGEPAGE)
        return refused == 0

    # ---- what is pinned ----
    def chunk_of(self, starts: npt.NDArray[np.int64], nbytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """For stretches of memory: the chunk that each begins in, and whether all of it is pinned.

        Args:
            starts: addresses.
            nbytes: of each stretch, at most a chunk.
        """
        first = (starts - self.address) // self._chunk_bytes
        last = (starts + (nbytes - 1) - self.address) // self._chunk_bytes
        return first, self._pinned[first] & self._pinned[last]

    @property
    def chunk_bytes(self) -> int:
        """Of all chunks but the last, which may be shorter."""
        return self._chunk_bytes

    def report(self) -> PinReport:
        """How it goes, or went."""
        with self._changed:
            pinned = int(self._pinned.sum()) * self._chunk_bytes
            if self._chunks and self._pinned[-1]:
                pinned -= self._chunks * self._chunk_bytes - self.nbytes
            ended_s = self._ended_s if self._ended_s is not None else time.monotonic()
            seconds = ended_s - self._began_s
            return PinReport(self.nbytes, pinned, seconds, self._ended_s is not None, self._refused, self.huge_pages)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended, well or not. False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._working == 0, timeout_s)

    # ---- threads ----
    def _work(self, work: Callable[[], None]) -> None:
        try:
            if self._cpus:
                try:
                    os.sched_setaffinity(0, self._cpus)  # of this thread
                except OSError as error:
                    _log.info("cannot run near the device: %s", error)
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
            huge = ", huge pages asked for" if self.huge_pages else ""
            _log.info("%d MiB of the arena pinned for the device in %.1f s%s", self.nbytes >> 20, seconds, huge)

    def _populate_pieces(self) -> None:
        while True:
            with self._changed:
                piece = None if self._closing or self._refused else next(self._pieces, None)
            if piece is None:
                return
            chunk, start, stop = piece
            address, length = ctypes.c_void_p(self.address + start), ctypes.c_size_t(stop - start)
            # refused by kernels before 5.14: then the driver finds the pages, slowly
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
                self._patiently(partial(self._driver.pin, self.address + start, nbytes), unless=lambda: self._closing)
            except (PinRefused, Internal) as refused:
                self._give_up(refused)
                return
            with self._changed:
                self._pinned[chunk] = True

    def _patiently(self, call: Callable[[], None], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Asks the driver, again and again where it says that a graph is captured, ``unless`` that is in vain. Bounded.

        Raises:
            PinRefused: it does not do it.
            Internal: the driver fails.
        """
        until_s = time.monotonic() + CAPTURE_S
        while True:
            try:
                call()
            except PinRefused as refused:
                if not refused.passes or unless() or time.monotonic() > until_s:
                    raise
                self._counters.add("device_pin_retries_total")
                time.sleep(_CAPTURE_PAUSE_S)
            else:
                return

    def _take_chunk(self) -> int | None:
        """The next chunk, when it is populated; None: nothing more is to be pinned."""
        with self._changed:
            chunk = self._next_chunk
            if chunk >= self._chunks:
                return None
            self._next_chunk += 1
            # bounded: populating ends, and whoever closes or gives up tells
            self._changed.wait_for(lambda: self._closing or self._refused or not self._left[chunk])
            return None if self._closing or self._refused else chunk

    def _give_up(self, refused: Exception) -> None:
        """The rest stays as it is: most likely the next chunk would be refused too, and what is pinned serves."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
        with self._changed:
            first = not self._refused
            self._refused = self._refused or str(refused)
            self._changed.notify_all()
        if first:
            self._counters.add("device_pin_refused_total")
            _log.warning(
                "the driver pins no more than about %d of %d MiB of the arena: %s. The rest is copied unpinned, and slower. The "
                "limit on locked memory is %s (ulimit -l, LimitMEMLOCK=): it, or a smaller node.dram, may be what to change",
                self.report().bytes_pinned >> 20,
                self.nbytes >> 20,
                refused,
                limit,
            )

    # ---- end ----
    def close(self) -> bool:
        """Unpins all. Call it with no copy under way, before the memory is unmapped; idempotent.

        Returns:
            False: a pin is still being made or did not end: the memory must stay mapped.
        """
        if os.getpid() != self._pid:
            return True  # a child has no pins: they are its parent's, and so are the threads
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._counters.add("device_unpin_failed_total")
            _log.error("pinning does not come to an end: the arena stays mapped")
            return False
        sound = True
        for chunk in np.flatnonzero(self._pinned).tolist():
            try:
                self._patiently(partial(self._driver.unpin, self.address + chunk * self._chunk_bytes))
                self._pinned[chunk] = False
            except (PinRefused, Internal) as refused:
                sound = False
                self._counters.add("device_unpin_failed_total")
                _log.error("the driver does not let go of the arena, which stays mapped: %s", refused)
        return sound


def cpus_near(bus_id: str) -> frozenset[int] | None:
    """Processors of the NUMA node that a PCI device hangs on, among those that this process may use.

    Args:
        bus_id: as the driver names it, ``0000:3b:00.0``.

    Returns:
        None: not known, or none of them.
    """
    try:
        listed = Path("/sys/bus/pci/devices", bus_id, "local_cpulist").read_text(encoding="ascii") if bus_id else ""
    except OSError:
        return None
    near: set[int] = set()
    for stretch in filter(None, listed.strip().split(",")):
        first, _, last = stretch.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return frozenset(near & os.sched_getaffinity(0)) or None
