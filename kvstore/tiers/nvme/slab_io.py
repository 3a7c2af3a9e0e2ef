"""Block I/O on a slab file: many slots at once, few system calls, no copy where memory is aligned.

Adjacent slots become one ``preadv`` or ``pwritev`` (up to ``MERGE_BYTES``), and several of those run at once in a few threads:
enough to saturate an NVMe device, at a tenth of the CPU time of buffered I/O. With O_DIRECT the device reads and writes the
caller's memory directly if it is aligned to 4 KiB; small payloads and unaligned memory are copied through an aligned *scratch*
buffer, one per thread. So is the tail of a payload whose size is not a multiple of 4 KiB.

One call writes header and payload, in unknown order. That is safe because a slot is valid only after the catalog has an entry
for it, which is written after ``fdatasync`` of the slab. The remains of a crash before that are never read, because the entry of
the slot's former block was removed, synced, before the slot was allocated again.

If an I/O fails or is short, each of its slots is retried alone, so that one bad sector costs one block.

An *I/O engine* (``kvstore.tiers.io_engines``) transfers the bytes: ``posix``, or ``gds`` with ``posix`` as the fallback.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvstore.core import checksum
from kvstore.core.errors import InvalidArgument, Unavailable, Unsupported
from kvstore.core.types import Outcome
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.threads.submission import submit
from kvstore.tiers.allocator import ALIGNMENT, round_up
from kvstore.tiers.contract import BlockRecord
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine
from kvstore.tiers.io_engines.gds import GdsFile
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.nvme.superblock import DATA_START

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

MERGE_BYTES = 4 << 20
"""Adjacent slots are merged up to this size; a device gains nothing from larger requests, and threads share the work better."""
SCRATCH_PAYLOAD_BYTES = 32 << 10
"""Payloads up to this size are copied through scratch even where aligned: cheaper than two more pieces in a vector."""
_MAX_PIECES = min(1024, os.sysconf("SC_IOV_MAX"))
_PIECES_PER_SLOT = 3
_STALL_LOG_S = 10.0
NOTHING = memoryview(b"")
"""Payload of a slot whose bytes go to a device."""
_Piece = TypeVar("_Piece")


class SlotIO:
    """One slot to read or write: its slab offset, its header, the memory of its payload, and the result."""

    __slots__ = ("direct", "error", "header", "header_space", "offset", "outcome", "payload", "record", "size")

    def __init__(
        self, offset: int, size: int, header: bytes, header_space: int, record: BlockRecord, payload: memoryview
    ) -> None:
        self.offset = offset
        self.size = size
        self.header = header
        self.header_space = header_space
        self.record = record
        self.payload = payload
        self.direct = False
        self.error: Exception | None = None
        self.outcome = Outcome.UNAVAILABLE

    def judge(self, header: memoryview, *, verify: bool) -> Outcome:
        """HIT if the slot's ``header`` (and with ``verify`` the filled ``payload``) is as expected, else CORRUPT."""
        good = bytes(header) == self.header and (
            not verify or checksum.verify(self.payload, self.record.shape, self.record.checksums)
        )
        return Outcome.HIT if good else Outcome.CORRUPT


class _Scratch:
    """Aligned memory of one I/O thread, handed out from its start for each call. Grows (for that call) for a giant slot."""

    def __init__(self) -> None:
        self._usual = memoryview(mmap.mmap(-1, 2 * MERGE_BYTES))
        self._memory = self._usual
        self._used = 0

    def begin(self, size: int) -> None:
        self._used = 0
        self._memory = self._usual if size <= len(self._usual) else memoryview(mmap.mmap(-1, round_up(size)))

    def take(self, size: int) -> memoryview:
        self._used += size
        return self._memory[self._used - size : self._used]

    def end(self) -> None:
        self._memory = self._usual


def _aligned(view: memoryview) -> bool:
    return bool(np.frombuffer(view, np.uint8).__array_interface__["data"][0] % ALIGNMENT == 0)


@dataclass(frozen=True, slots=True)
class IoChoice:
    """How a slab file is to be read and written; see ``SlabFile``."""

    io_threads: int
    direct: bool = True
    gds: Kvikio | None = None
    gds_required: bool = False

    def open(self, path: Path, *, writable: bool, counters: Counters) -> SlabFile:
        """Open a slab file with these options."""
        return SlabFile(
            path,
            io_threads=self.io_threads,
            direct=self.direct,
            writable=writable,
            counters=counters,
            gds=self.gds,
            gds_required=self.gds_required,
        )


class SlabFile:
    """The slab file of one volume. Thread-safe.

    Args:
        path: an existing file.
        io_threads: number of concurrent I/O requests.
        direct: request O_DIRECT.
        writable: False: opened read-only.
        counters: counts fallbacks and failures.
        gds: engine for suitable reads; None: ``posix`` only.
        gds_required: fail if ``gds`` cannot open the file.

    Raises:
        OSError: the file cannot be opened or read.
        Unsupported: ``gds`` is required and cannot open it.
    """

    def __init__(
        self,
        path: Path,
        *,
        io_threads: int,
        direct: bool,
        writable: bool,
        counters: Counters,
        gds: Kvikio | None = None,
        gds_required: bool = False,
    ) -> None:
        if io_threads < 1:
            raise InvalidArgument("io_threads must be at least 1", io_threads=io_threads)
        self.path = path
        self._counters = counters
        self._posix = PosixFile(path, direct=direct, writable=writable, counters=counters)
        self.direct = self._posix.direct
        self._reader: IoEngine = self._posix
        if gds is not None:
            self._reader = self._open_gds(gds, io_threads, required=gds_required)
        self._scratches: queue.SimpleQueue[_Scratch] = queue.SimpleQueue()
        # twice as many threads as requests in flight: while some check what they read, others keep the device busy
        self._threads = 2 * io_threads
        self._in_flight = threading.BoundedSemaphore(io_threads)
        for _ in range(self._threads):
            self._scratches.put(_Scratch())
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="slab-io")
        self.answered_s = -math.inf
        """When the kernel answered a request last, well or badly, by ``CLOCK_MONOTONIC``."""

    def _open_gds(self, gds: Kvikio, in_flight: int, *, required: bool) -> IoEngine:
        try:
            return GdsFile(self._posix, gds, in_flight=in_flight, counters=self._counters)
        except Unsupported as error:
            if required:
                self._posix.close()
                raise
            self._counters.add(volumes_metrics.GDS_REFUSED)
            _log.warning("GPUDirect Storage not used: %s (error=%s); posix is used", self.path, error)
            return self._posix

    @property
    def engine(self) -> str:
        """The I/O path in use."""
        return self._reader.name

    @property
    def fd(self) -> int:
        """The file's descriptor, for operations on the whole file."""
        return self._posix.fd

    def make_writable(self) -> None:
        """Make a file that was opened read-only writable. Running reads continue.

        Raises:
            OSError: it still cannot be opened for writing.
        """
        self._posix.make_writable()

    # ---- small pieces: superblocks, headers ----
    def pread(self, position: int, size: int) -> bytes:
        """Read a few whole pages at a byte position of the file. Shorter at its end."""
        with self._scratch(size) as scratch:
            view = scratch.take(size)
            return bytes(view[: os.preadv(self.fd, [view], position)])

    def pwrite(self, position: int, data: bytes) -> None:
        """Write whole pages at a byte position of the file."""
        with self._scratch(len(data)) as scratch:
            view = scratch.take(len(data))
            view[:] = data
            if os.pwritev(self.fd, [view], position) != len(data):
                raise OSError(errno.EIO, "short write", str(self.path))

    def sync(self) -> None:
        """Sync the data, and the file metadata needed to read it, to stable storage."""
        self._posix.sync()

    def close(self) -> None:
        """Wait for I/O under way, then close."""
        self._executor.shutdown()
        if self._reader is not self._posix:
            self._reader.close()
        self._posix.close()

    # ---- slots ----
    def write(self, slots: Sequence[SlotIO]) -> None:
        """Write slots. A slot that failed gets an ``error``. Blocks until the kernel has answered for all."""
        self._run_all(slots, self._write_run)

    def read(self, slots: Sequence[SlotIO], *, verify: bool) -> None:
        """Read slots into their payloads, and set the ``outcome`` of each slot. Blocks until the kernel has answered for all.

        The call never gives up earlier, because the kernel may write into the callers' memory until it has answered.
        """
        self._run_all(slots, lambda run: self._read_run(run, verify))

    def read_headers(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Read the first bytes of slots, given as (slot offset, bytes); None: they cannot be read."""

        def read(place: tuple[int, int]) -> bytes | None:
            try:
                header = self.pread(DATA_START + place[0], place[1])
            except OSError as error:
                self._counters.add(volumes_metrics.NVME_READ_ERRORS)
                _log.warning("slot header not read: %s (offset=%d, error=%s)", self.path, place[0], error)
                return None
            return header if len(header) == place[1] else None

        return list(self._executor.map(read, places))

    def _run_all(self, slots: Sequence[SlotIO], work: Callable[[list[SlotIO]], None]) -> None:
        self._in_lanes(_merge(slots, self.direct), work)

    def _in_lanes(self, pieces: Sequence[_Piece], work: Callable[[_Piece], None]) -> None:
        """Do ``work`` on every piece, several at once. Returns when all are done."""
        todo = deque(pieces)
        if len(todo) < 2:
            for piece in todo:
                work(piece)
            return

        def lane() -> None:
            while True:
                try:
                    piece = todo.popleft()
                except IndexError:
                    return
                work(piece)

        futures: set[Future[None]] = set()
        try:
            for _ in range(min(self._threads, len(todo))):
                futures.add(submit(self._executor, lane))
        except Unavailable as error:
            self._counters.add(volumes_metrics.NVME_THREADS_REFUSED)
            _limited.warning("I/O thread not started: %s (error=%s)", self.path, error)
            if not futures:
                lane()
        pending = futures
        while pending:
            _, pending = wait(pending, timeout=_STALL_LOG_S)
            if pending:
                self._counters.add(volumes_metrics.NVME_IO_STALLED)
                _log.warning("I/O outstanding: %s (seconds=%.0f)", self.path, _STALL_LOG_S)
        for future in futures:
            future.result()

    def _write_run(self, run: list[SlotIO]) -> None:
        size = sum(slot.size for slot in run)
        try:
            with self._scratch(size) as scratch:
                pieces = _pieces_to_write(run, scratch)
                with self._in_flight:
                    done = self._timed(self._posix.write, pieces, DATA_START + run[0].offset)
        except OSError as error:
            if len(run) == 1:
                self._counters.add(volumes_metrics.NVME_WRITE_ERRORS)
                _log.warning("slot write failed: %s (error=%s)", self.path, error)
                run[0].error = error
                return
            done = -1
        if done == size:
            return
        if len(run) == 1:
            self._counters.add(volumes_metrics.NVME_WRITE_ERRORS)
            run[0].error = Unavailable("a slot was written short", written=done, expected=size)
            return
        for slot in run:
            self._write_run([slot])

    def _timed(self, work: Callable[[list[memoryview], int], int], pieces: list[memoryview], position: int) -> int:
        """One request to the kernel. Notes when it was answered."""
        try:
            return work(pieces, position)
        finally:
            self.answered_s = time.monotonic()

    def _read_run(self, run: list[SlotIO], verify: bool) -> None:
        size = sum(slot.size for slot in run)
        failure: object = "short read"
        try:
            with self._scratch(size) as scratch:
                pieces, headers, late = _pieces_to_read(run, scratch)
                with self._in_flight:
                    done = self._timed(self._reader.read, pieces, DATA_START + run[0].offset)
                if done == size:
                    for slot, header, copies in zip(run, headers, late, strict=True):
                        self._judge(slot, header, copies, verify)
                    return
        except OSError as error:  # of the read, or no memory for the scratch of a giant slot
            failure = error
        if len(run) == 1:
            self._counters.add(volumes_metrics.NVME_READ_ERRORS)
            _log.warning("slot not read: %s (offset=%d, error=%s)", self.path, run[0].offset, failure)
            return
        for slot in run:
            self._read_run([slot], verify)

    def _judge(self, slot: SlotIO, header: memoryview, late: Sequence[tuple[memoryview, memoryview]], verify: bool) -> None:
        for destination, source in late:
            destination[:] = source
        slot.outcome = slot.judge(header, verify=verify)
        if slot.outcome is Outcome.CORRUPT:
            self._counters.add(volumes_metrics.NVME_CORRUPT_BLOCKS)
            _log.warning("slot corrupt: %s (offset=%d)", self.path, slot.offset)

    # ---- slots into device memory ----
    def read_device(self, slots: Sequence[tuple[SlotIO, DeviceMemory]], *, verify: bool) -> None:
        """Read the payloads of slots into device memory, and set the ``outcome`` of each slot. Blocks like ``read``.

        With ``gds`` the payload is read without host memory; to be verified, it is copied back. Otherwise it is read into host
        memory, verified there, and copied to the device.

        Args:
            slots: with empty payloads, each with memory of the payload's size.
            verify: compare checksums. Headers are always compared.
        """
        self._in_lanes(slots, lambda pair: self._read_to_device(*pair, verify))

    def _read_to_device(self, slot: SlotIO, memory: DeviceMemory, verify: bool) -> None:
        try:
            with self._scratch(slot.size) as scratch:
                self._fill_device(slot, memory, scratch.take(slot.size), verify)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a failed device
            slot.outcome = Outcome.UNAVAILABLE
            self._counters.add(volumes_metrics.NVME_READ_ERRORS)
            _log.warning("slot not read into device memory: %s (offset=%d, error=%s)", self.path, slot.offset, error)
        finally:
            slot.payload = NOTHING

    def _fill_device(self, slot: SlotIO, memory: DeviceMemory, image: memoryview, verify: bool) -> None:
        position = DATA_START + slot.offset
        slot.payload = image[slot.header_space : slot.header_space + memory.nbytes]
        # not among the requests in flight: if the driver never answers, the others' turns must come all the same
        straight = self._reader.read_device(memory, position + slot.header_space)
        with self._in_flight:
            whole = image[: slot.header_space] if straight else image
            done = self._timed(self._posix.read, [whole], position)
        if done != whole.nbytes:
            raise OSError(errno.EIO, "short read", str(self.path))
        if straight and verify:
            memory.fetch(slot.payload)
        self._judge(slot, image[: len(slot.header)], (), verify)
        if slot.outcome is Outcome.HIT and not straight:
            memory.fill(slot.payload)

    @contextmanager
    def _scratch(self, size: int) -> Iterator[_Scratch]:
        """Scratch memory: as many as threads, so this bounds the I/O under way. Waits for other I/O to come back."""
        scratch = self._scratches.get()
        try:
            scratch.begin(size)
            yield scratch
        finally:
            scratch.end()
            self._scratches.put(scratch)


def _merge(slots: Sequence[SlotIO], direct: bool) -> list[list[SlotIO]]:
    """Divide slots, in order of offset, into runs of neighbours that one system call reads or writes."""
    runs: list[list[SlotIO]] = []
    end = -1
    space = pieces = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        # small payloads: two copies in memory cost less than pieces; unaligned ones: the device could not write there
        slot.direct = slot.payload.nbytes > SCRATCH_PAYLOAD_BYTES and (not direct or _aligned(slot.payload))
        space -= slot.size
        pieces -= _PIECES_PER_SLOT if slot.direct else 1
        if slot.offset != end or space < 0 or pieces < 0:
            runs.append([])
            space = MERGE_BYTES - slot.size
            pieces = _MAX_PIECES - _PIECES_PER_SLOT
        runs[-1].append(slot)
        end = slot.offset + slot.size
    return runs


def _pieces_to_write(run: list[SlotIO], scratch: _Scratch) -> list[memoryview]:
    pieces: list[memoryview] = []
    for slot in run:
        space = slot.header_space
        header = slot.header
        body = slot.payload.nbytes // ALIGNMENT * ALIGNMENT if slot.direct else 0
        front = scratch.take(space if slot.direct else slot.size)
        front[: len(header)] = header
        front[len(header) : space] = bytes(space - len(header))
        if not slot.direct:
            end = space + slot.payload.nbytes
            front[space:end] = slot.payload
            front[end:] = bytes(slot.size - end)
        pieces.append(front)
        if body:
            pieces.append(slot.payload[:body])
            ragged = slot.payload.nbytes - body
            if ragged:
                tail = scratch.take(ALIGNMENT)
                tail[:ragged] = slot.payload[body:]
                tail[ragged:] = bytes(ALIGNMENT - ragged)
                pieces.append(tail)
    return pieces


_Copies = Sequence[tuple[memoryview, memoryview]]


def _pieces_to_read(run: list[SlotIO], scratch: _Scratch) -> tuple[list[memoryview], list[memoryview], list[_Copies]]:
    """Destinations of the device's writes, each slot's header, and the copies to make from scratch after the read."""
    pieces: list[memoryview] = []
    headers: list[memoryview] = []
    late: list[_Copies] = []
    for slot in run:
        space = slot.header_space
        total = slot.payload.nbytes
        if not slot.direct:
            image = scratch.take(slot.size)
            pieces.append(image)
            headers.append(image[: len(slot.header)])
            late.append(((slot.payload, image[space : space + total]),))
            continue
        front = scratch.take(space)
        body = total // ALIGNMENT * ALIGNMENT
        pieces += [front, slot.payload[:body]]
        headers.append(front[: len(slot.header)])
        if body == total:
            late.append(())
        else:
            tail = scratch.take(round_up(total - body))
            pieces.append(tail)
            late.append(((slot.payload[body:], tail[: total - body]),))
    return pieces, headers, late
