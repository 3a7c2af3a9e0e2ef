"""I/O engine ``gds``: reads through kvikio, directly into device memory if GPUDirect Storage works.

For reads into host memory kvikio is ``preadv`` with overhead, so ``posix`` does them, unless ``host_reads`` is set (for tests
and benchmarks without a GPU: the same calls, futures and fallbacks). ``posix`` also does all writes, because their source is the
arena.

Each piece is one request. If kvikio split a request and one part failed, it would return while other parts still write to memory
that the caller may use again. All requests of a call are started before the first is awaited, and every one is awaited.

A failed or short request is counted, and ``posix`` reads the bytes. After ``GIVE_UP_AFTER`` consecutive failures the engine does
not use kvikio for ``PAUSE_S``; after that, one failure begins the next pause.

A driver may never answer. The caller then waits, because the driver may still write to its memory. While a call is stalled for
``STALLED_S``, all other calls use ``posix``. At most ``in_flight`` calls are in kvikio, so that the others find a free thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvstore.core.errors import Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine
from kvstore.tiers.io_engines.kvikio_library import KVIKIO_ERRORS, Kvikio, first_line
from kvstore.tiers.io_engines.posix import STEP_BYTES, PosixFile

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

GIVE_UP_AFTER = 3
PAUSE_S = 60.0
STALLED_S = 10.0


class GdsFile(IoEngine):
    """A slab file read through kvikio, with ``posix`` as the fallback.

    Args:
        posix: the same file; not closed with this one.
        kvikio: the library, from ``load_kvikio``.
        in_flight: number of concurrent calls of kvikio.
        host_reads: use kvikio for reads into host memory too: the conformance suite reads there.
        counters: counts fallbacks.
        now_s: a monotonic clock.

    Raises:
        Unsupported: kvikio cannot open the file.
    """

    def __init__(
        self,
        posix: PosixFile,
        kvikio: Kvikio,
        *,
        in_flight: int,
        host_reads: bool = False,
        counters: Counters,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._posix = posix
        self._version = kvikio.version
        self._host_reads = host_reads
        self._counters = counters
        self._now_s = now_s
        self._lock = threading.Lock()
        self._free_slots = threading.BoundedSemaphore(in_flight)
        self._began_s: dict[object, float] = {}  # running calls, oldest first
        self._failures = 0
        self._paused_until_s: float | None = None
        self._last_failure = ""
        try:
            self._file = kvikio.open(posix.path)
        except KVIKIO_ERRORS as error:
            raise Unsupported("kvikio cannot open the slab", path=posix.path, reason=first_line(error)) from error

    @property
    def name(self) -> str:
        if self._stalled():
            return f"{self._posix.name} (gds not used: a read is stalled for {STALLED_S:.0f} s)"
        if self._paused_until_s is not None:
            return f"{self._posix.name} (gds not used after failures: {self._last_failure})"
        if self._host_reads:
            return f"gds (kvikio {self._version})"
        return f"{self._posix.name}, gds into device memory (kvikio {self._version})"

    def read(self, pieces: Sequence[memoryview], position: int) -> int:
        if not self._host_reads:
            return self._posix.read(pieces, position)
        parts = [part for piece in pieces for part in _steps(piece)]
        total = sum(part.nbytes for part in parts)
        failure: str | None = None
        with self._turn() as ours:
            if ours:
                failure = self._transfer(parts, position)
                if failure is None:
                    self._went_well()
                    return total
        done = self._posix.read(pieces, position)
        if failure is not None and done == total:  # else the cause is the file or the disk, not kvikio
            self._note(failure)
        return done

    def read_device(self, memory: DeviceMemory, position: int) -> bool:
        with self._turn() as ours:
            if ours:
                failure = self._transfer([memory], position)
                if failure is None:
                    self._went_well()
                    self._counters.add(volumes_metrics.GDS_DEVICE_READS)
                    return True
                self._note(failure)
        self._counters.add(volumes_metrics.DEVICE_READS_BOUNCED)
        return False

    def close(self) -> None:
        try:
            self._file.close()
        except KVIKIO_ERRORS as error:
            _log.warning("kvikio failed to close: %s (error=%s)", self._posix.path, first_line(error))

    def _transfer(self, parts: Sequence[memoryview | DeviceMemory], position: int) -> str | None:
        """Read adjacent parts. When it returns, nothing writes to their memory any more. Returns the error, or None."""
        failures: list[str] = []

        def wait_for(future: Any, size: int) -> None:  # noqa: ANN401
            try:
                done = future.get()
            except KVIKIO_ERRORS as error:
                failures.append(first_line(error))
            else:
                if done != size:
                    failures.append(f"short read: {done} of {size} bytes")

        with ExitStack() as under_way:  # waits for all, also after an exception
            for part in parts:
                size = part.nbytes
                try:
                    future = self._file.pread(part, size, position, size)
                except KVIKIO_ERRORS as error:
                    failures.append(first_line(error))
                    break
                under_way.callback(wait_for, future, size)
                position += size
        failure = failures[0] if failures else None
        if failure is not None:
            self._counters.add(volumes_metrics.GDS_READ_FAILURES)
            _limited.warning("kvikio read failed: %s (error=%s); read by posix", self._posix.path, failure)
        return failure

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Admission to kvikio; False: use ``posix``."""
        if not self._may_try():
            yield False
            return
        if self._stalled() or not self._free_slots.acquire(timeout=STALLED_S):
            self._counters.add(volumes_metrics.GDS_STALLED)
            _limited.warning("kvikio read stalled: %s (seconds=%.0f); read by posix", self._posix.path, STALLED_S)
            yield False
            return
        call = object()
        with self._lock:
            self._began_s[call] = self._now_s()
        try:
            yield True
        finally:
            with self._lock:
                del self._began_s[call]
            self._free_slots.release()

    def _stalled(self) -> bool:
        with self._lock:
            oldest_s = next(iter(self._began_s.values()), None)
        return oldest_s is not None and self._now_s() - oldest_s >= STALLED_S

    def _may_try(self) -> bool:
        with self._lock:
            if self._paused_until_s is None:
                return True
            if self._now_s() < self._paused_until_s:
                return False
            self._paused_until_s = None
            return True

    def _went_well(self) -> None:
        if self._failures:  # unlocked: at worst one more read counts a concurrent failure
            with self._lock:
                self._failures = 0

    def _note(self, failure: str) -> None:
        with self._lock:
            self._failures += 1
            self._last_failure = failure
            if self._failures < GIVE_UP_AFTER or self._paused_until_s is not None:
                return
            self._failures = GIVE_UP_AFTER - 1
            self._paused_until_s = self._now_s() + PAUSE_S
        self._counters.add(volumes_metrics.GDS_GIVEN_UP)
        _log.warning(
            "kvikio not used: %s (consecutive_failures=%d, error=%s, seconds=%.0f); reads by posix",
            self._posix.path, GIVE_UP_AFTER, failure, PAUSE_S,
        )  # fmt: skip


def _steps(piece: memoryview) -> list[memoryview]:
    return [piece[at : at + STEP_BYTES] for at in range(0, piece.nbytes, STEP_BYTES)]
