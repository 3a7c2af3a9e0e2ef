"""I/O engine ``gds``: reads through kvikio, straight into device memory where GPUDirect Storage is real.

For reads into host memory kvikio is ``preadv`` with more steps, so the engine leaves those to ``posix`` unless ``host_reads`` is
asked for (tests and benchmarks, on machines without a GPU: the same calls, futures and fallbacks). Writes are ``posix``'s too:
what is written lies in the arena.

Each piece is one request of kvikio: where it cuts a request itself and one part fails, it answers while other parts are still
being read, into memory that the caller would then use for something else. All requests of a call are started before the first
is waited for, and each is waited for whatever became of the others.

A request that fails or comes back short is counted, and the bytes are read by ``posix``. After ``GIVE_UP_AFTER`` of those in a
row the engine leaves kvikio alone for ``PAUSE_S``; then one more failure is enough for the next pause.

A driver may also never answer. Whoever waits then waits on, for the memory may be written to until the answer comes; but nobody
else follows into the trap: while a call has been out for ``STALLED_S``, all others go to ``posix``. So that these find a free
thread, no more than ``in_flight`` calls are in kvikio's hands at once.
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
    """A slab file through kvikio, with ``posix`` behind it.

    Args:
        posix: the same file; stays the caller's.
        kvikio: the library, from ``load_kvikio``.
        in_flight: calls under way in kvikio at once.
        host_reads: read into host memory through kvikio as well.
        counters: where fallbacks are counted.
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
        self._room = threading.BoundedSemaphore(in_flight)
        self._began_s: dict[object, float] = {}  # calls under way, the oldest first
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
            return f"{self._posix.name} (gds left alone: a read has not come back for {STALLED_S:.0f} s)"
        if self._paused_until_s is not None:
            return f"{self._posix.name} (gds left alone after failures: {self._last_failure})"
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
        if failure is not None and done == total:  # else the file or the disk is at fault, not kvikio
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
            _log.warning("kvikio cannot close %s: %s", self._posix.path, first_line(error))

    def _transfer(self, parts: Sequence[memoryview | DeviceMemory], position: int) -> str | None:
        """Reads parts that follow each other. Nothing touches them any more when it returns; what went wrong, or None."""
        failures: list[str] = []

        def wait_for(future: Any, size: int) -> None:  # noqa: ANN401
            try:
                done = future.get()
            except KVIKIO_ERRORS as error:
                failures.append(first_line(error))
            else:
                if done != size:
                    failures.append(f"a read came back short: {done} of {size} bytes")

        with ExitStack() as under_way:  # waits for all, whatever is raised in between
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
            _limited.warning("slab %s: kvikio failed: %s; read by posix", self._posix.path, failure)
        return failure

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Within it, if it says True, the caller may use kvikio."""
        if not self._may_try():
            yield False
            return
        if self._stalled() or not self._room.acquire(timeout=STALLED_S):
            self._counters.add(volumes_metrics.GDS_STALLED)
            _limited.warning("slab %s: kvikio has not answered for %.0f s: read by posix", self._posix.path, STALLED_S)
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
            self._room.release()

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
        if self._failures:  # an unlocked look: at worst a failure of this moment counts for one more read
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
            "slab %s: kvikio failed %d times in a row (%s): reads by posix for %.0f s",
            self._posix.path, GIVE_UP_AFTER, failure, PAUSE_S,
        )  # fmt: skip


def _steps(piece: memoryview) -> list[memoryview]:
    return [piece[at : at + STEP_BYTES] for at in range(0, piece.nbytes, STEP_BYTES)]
