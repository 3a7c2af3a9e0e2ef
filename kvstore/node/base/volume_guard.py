"""All I/O of one volume, done in the volume's own threads: a disk that stops answering stalls no load, store or flush.

Theory of operation.

1. A caller hands over an I/O and waits for it. The I/O runs in one of the volume's threads.
2. While the volume answers, however slowly, the caller waits until the I/O ends, or until a time that the caller chose.
3. Once the volume is *stalled* (``VolumeStallDetector``), every caller leaves at once with ``VolumeStalled``, and new I/Os are
   refused. An I/O that had not begun is cancelled. One that had begun cannot be cancelled: the kernel may still use its memory.
4. When an I/O ends after its caller left, its thread calls the caller's ``settle``. Until then memory and slots of the I/O stay
   reserved. Every ``VolumeStalled`` means exactly one call of ``settle``, perhaps before it is raised.
5. Windows of loads run as a whole in reader threads of the volume (``submit``, ``timed``), because a switch of threads for each
   read costs more than a small read. Their loads leave them in the same way.
6. The end of an outstanding I/O is the probe that closes this circuit breaker. No other I/O is sent to a stalled volume, so a
   hung disk blocks at most the threads of its own volume.
7. *Changes* (writes and commits) are refused until every change whose caller left has ended and its ``settle`` has returned. So
   changes reach the catalog in the order in which the table learned of them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.threads.submission import submit


class VolumeState(StrEnum):
    """Whether a volume answers I/O."""

    ANSWERING = "answering"
    STALLED = "stalled"


class VolumeStallDetector:
    """The outstanding I/Os of one volume, and whether it is stalled. Pure: events and the time go in, the state comes out.

    1. An I/O of a volume begins once and ends once. While it has not ended it is *outstanding*.
    2. The volume *answers* when an I/O ends, and when its device answers a part of a larger I/O.
    3. An outstanding I/O is *overdue* once its patience has passed both since it began and since the volume answered last.
    4. The volume is STALLED while an outstanding I/O is overdue, and ANSWERING otherwise.
    5. Time counts only between frequent looks: of a longer gap between two looks at an ANSWERING volume, ``gap_s`` counts. The
       process may not have run, and answers may wait for it.

    So a slow disk under load is not stalled while it answers some I/O, and any answer ends a stall. Not thread-safe. Times are of
    one monotonic clock.

    Args:
        gap_s: maximum part of the time between two looks that counts.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self.looked_s = -math.inf
        """When ``look`` was called last, or the first outstanding I/O began."""
        self.state = VolumeState.ANSWERING
        """As of the last ``look``."""
        self._outstanding: dict[int, tuple[float, float]] = {}  # number -> (when it began, its patience)
        self._begun = 0
        self._answered_s = -math.inf

    @property
    def outstanding(self) -> int:
        """Number of I/Os that have begun and not ended."""
        return len(self._outstanding)

    def begin(self, now_s: float, patience_s: float) -> int:
        """Note that an I/O begins. Returns its number, for ``end``."""
        if not self._outstanding:
            self.looked_s = now_s
        self._begun += 1
        self._outstanding[self._begun] = now_s, patience_s
        return self._begun

    def end(self, number: int, now_s: float, *, answered: bool = True) -> None:
        """Note that an I/O has ended, with success or an error. ``answered``: the volume answered it, and not a cache."""
        del self._outstanding[number]
        if answered:
            self.answer(now_s)

    def answer(self, at_s: float) -> None:
        """Note that the device answered a part of an outstanding I/O. A time before the last answer changes nothing."""
        self._answered_s = max(self._answered_s, at_s)

    def due_s(self) -> float:
        """When the volume becomes stalled unless it answers before; infinity if no I/O is outstanding."""
        waits = ((max(began_s, self._answered_s) + patience_s) for began_s, patience_s in self._outstanding.values())
        return min(waits, default=math.inf)

    def silent_s(self, now_s: float) -> float:
        """How long the volume has owed an answer; 0 if no I/O is outstanding."""
        oldest_s = min((began_s for began_s, _ in self._outstanding.values()), default=now_s)
        return max(0.0, now_s - max(oldest_s, self._answered_s))

    def look(self, now_s: float) -> bool:
        """Set the state as of now. Returns whether it changed."""
        if self.state is VolumeState.ANSWERING and (missed_s := now_s - self.looked_s - self._gap_s) > 0:
            self._outstanding = {
                number: (began_s + missed_s, patience_s) for number, (began_s, patience_s) in self._outstanding.items()
            }
            self._answered_s = min(now_s, self._answered_s + missed_s)
        self.looked_s = now_s
        state = VolumeState.STALLED if now_s >= self.due_s() else VolumeState.ANSWERING
        changed, self.state = state is not self.state, state
        return changed


log = logging.getLogger(__name__)

STALL_S: Final = 1.0
"""Default of ``node.volume_stall``."""
READERS: Final = 8
"""Maximum number of windows of loads that one volume reads at once, unless its owner sets another."""
CHANGERS: Final = 4
"""Maximum number of concurrent changes of one volume: the batches of write-back and one eviction."""
CHANGE_PATIENCE: Final = 2.5
"""A change may be outstanding for this many times ``volume_stall``: a disk that syncs slowly is not hung."""
POLL_S: Final = 0.25
"""Interval at which a waiting caller checks the state."""
LOOK_S: Final = 0.05
"""A state is checked again only after this time: most I/Os end earlier, and loads with many windows check often."""
GAP_S: Final = 0.5
"""Maximum part of the time between two checks that counts as silence of the volume: the process may not have run."""

T = TypeVar("T")
Settle = Callable[[BaseException | None], None]
"""Called with the exception of an I/O, or None, when it ends after its caller left."""


class VolumeStalled(Unavailable):
    """The volume did not answer an I/O in time. The I/O may still be outstanding."""


def ignore(_: BaseException | None) -> None:
    """A ``settle`` for I/Os that reserve neither memory nor slots."""


class VolumeGuard:
    """The threads and the circuit breaker of one volume. Thread-safe.

    Args:
        name: of the volume, for the log.
        counters: events.
        clock: a real clock: waits are real.
        answered_s: time of the device's last answer, on the same clock; None: only the end of an I/O is an answer.
        stall_s: how long an I/O may be outstanding while the volume answers nothing.
        readers: windows of loads at once, and as many other reads.
    """

    def __init__(
        self,
        name: str,
        counters: Counters | None = None,
        clock: Clock | None = None,
        *,
        answered_s: Callable[[], float] | None = None,
        stall_s: float = STALL_S,
        readers: int = READERS,
    ) -> None:
        self._name = name
        self._counters = counters or Counters()
        self._clock = clock or MonotonicClock()
        self._device_answered_s = answered_s
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._detector = VolumeStallDetector(gap_s=GAP_S)
        self._since_s = 0.0
        self.stalls = 0
        """Number of stalls since the start."""
        self._abandoned_reads = 0
        self._abandoned_changes = 0
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kvstore-volume-read")
        self._others = ThreadPoolExecutor(readers + CHANGERS, thread_name_prefix="kvstore-volume")
        self._submitted: set[Future[Any]] = set()

    # ---- state
    @property
    def stalled(self) -> bool:
        """Whether the volume has stopped answering. Memory only."""
        detector = self._detector
        fresh = not detector.outstanding or self._clock.now_s() - detector.looked_s < LOOK_S
        if fresh and detector.state is VolumeState.ANSWERING:
            return False
        self._look()
        return detector.state is VolumeState.STALLED

    @property
    def takes_changes(self) -> bool:
        """Whether a change would be attempted now."""
        return not self._abandoned_changes and not self.stalled

    @property
    def abandoned(self) -> int:
        """I/Os that have not ended and whose callers left."""
        return self._abandoned_reads + self._abandoned_changes

    @property
    def outstanding(self) -> int:
        """I/Os that have begun and not ended."""
        return self._detector.outstanding

    @property
    def windows(self) -> int:
        """Windows of loads that were submitted and have not ended; for tests."""
        return len(self._submitted)

    def why(self) -> str:
        """Why the volume is refused I/O now, as text; empty if it answers."""
        if not self.stalled:
            return ""
        return f"has not answered I/O for {max(0.0, self._clock.now_s() - self._since_s):.0f} s"

    # ---- I/O
    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run work in a reader thread of the volume. The work does its reads with ``timed``.

        Raises:
            Unavailable: the guard is closed, or no thread can start. The work never runs.
        """
        future = submit(self._readers, work)
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def timed(self, work: Callable[[], T]) -> T:
        """Do a read in the calling thread, a reader thread of this volume. The read may never return."""
        return self._timed(work, self.stall_s)

    def read(self, work: Callable[[], T], settle: Settle, until_s: float = math.inf) -> T:
        """Do something that changes nothing on the volume, and wait for it.

        Args:
            work: the I/O.
            settle: releases memory of the I/O, if this raises ``VolumeStalled``.
            until_s: leave at this time, also while the volume answers.

        Raises:
            VolumeStalled: it did not end in time, or was refused.
        """
        return self._run(work, settle, until_s, self.stall_s, change=False)

    def look_up(self, work: Callable[[], T]) -> T:
        """Do something that the kernel may answer from its caches, such as ``stat``. Its end does not count as an answer.

        Raises:
            VolumeStalled: it did not end in time, or was refused.
        """
        return self._run(work, ignore, math.inf, self.stall_s, change=False, answered=False)

    def begin(self, work: Callable[[], object], settle: Settle) -> None:
        """Do something that changes nothing on the volume, in the background. ``settle`` is called once it has ended."""
        future = None if self.stalled else self._submit(work, self.stall_s)
        if future is None:
            settle(self._refusal())
        else:
            self._abandon(future, settle, change=False)

    def change(self, work: Callable[[], T], settle: Settle) -> T:
        """Do something that changes the volume, and wait for it.

        Args:
            work: the I/O.
            settle: settles the change, if this raises ``VolumeStalled``.

        Raises:
            VolumeStalled: it did not end in time, or was refused.
        """
        if self._abandoned_changes:
            settle(error := self._refusal())
            raise error
        return self._run(work, settle, math.inf, CHANGE_PATIENCE * self.stall_s, change=True)

    def close(self) -> None:
        """Refuse all I/O from now on, and wait for windows in progress, unless the volume is stalled."""
        for pool in (self._readers, self._others):
            pool.shutdown(wait=False, cancel_futures=True)
        while (under_way := self._submitted.copy()) and not self.stalled:
            wait(under_way, POLL_S)

    # ---- inside
    def _run(
        self, work: Callable[[], T], settle: Settle, until_s: float, patience_s: float, *, change: bool, answered: bool = True
    ) -> T:
        future = None if self.stalled else self._submit(work, patience_s, answered=answered)
        while future is not None and not self._ended(future, until_s):
            if self.stalled or self._clock.now_s() >= until_s:
                future.cancel()  # no effect once it has begun
                self._abandon(future, settle, change=change)
                raise VolumeStalled("the volume did not answer in time", volume_id=self._name)
        if future is None or future.cancelled():  # refused, or closed before it began
            settle(error := self._refusal())
            raise error
        return future.result()

    def _submit(self, work: Callable[[], T], patience_s: float, *, answered: bool = True) -> Future[T] | None:
        try:
            return submit(self._others, partial(self._timed, work, patience_s, answered=answered))
        except Unavailable:  # closed, or no more threads: the work never runs
            return None

    def _refusal(self) -> VolumeStalled:
        return VolumeStalled("the volume does not answer, so its I/O is refused", volume_id=self._name)

    def _ended(self, future: Future[T], until_s: float) -> bool:
        """Wait for the end of an I/O, but not beyond the next look at the state. Whether it ended."""
        if future.done():
            return True
        now_s = self._clock.now_s()
        with self._lock:
            due_s = self._detector.due_s()
        try:
            future.exception(max(0.0, min(POLL_S, due_s - now_s, until_s - now_s)))
        except TimeoutError:
            return future.done()
        except CancelledError:
            pass
        return True

    def _timed(self, work: Callable[[], T], patience_s: float, *, answered: bool = True) -> T:
        with self._lock:
            number = self._detector.begin(self._clock.now_s(), patience_s)
        try:
            return work()
        finally:
            with self._lock:
                self._detector.end(number, self._clock.now_s(), answered=answered)
            if self._detector.state is VolumeState.STALLED:
                self._look()

    def _look(self) -> None:
        with self._lock:
            now_s = self._clock.now_s()
            if self._device_answered_s is not None:
                self._detector.answer(self._device_answered_s())
            silent_s = self._detector.silent_s(now_s)
            if not self._detector.look(now_s):
                return
            stalled = self._detector.state is VolumeState.STALLED
            outstanding = self._detector.outstanding
            if stalled:
                self._since_s = now_s - silent_s
                self.stalls += 1
            stalled_s = now_s - self._since_s
        if stalled:
            self._counters.add(volumes_metrics.VOLUME_STALLS)
            log.warning("volume stalled: %s (silent=%.1f s, outstanding=%d)", self._name, silent_s, outstanding)
        else:
            log.warning("volume answers again: %s (stalled=%.1f s, outstanding=%d)", self._name, stalled_s, outstanding)

    def _abandon(self, future: Future[T], settle: Settle, *, change: bool) -> None:
        """Note that the caller of an I/O has left, and have ``settle`` called when the I/O ends."""
        self._count_abandoned(1, change=change)

        def ended(_: Future[T]) -> None:
            try:
                settle(self._refusal() if future.cancelled() else future.exception())
            finally:
                self._count_abandoned(-1, change=change)

        future.add_done_callback(ended)

    def _count_abandoned(self, by: int, *, change: bool) -> None:
        with self._lock:
            if change:
                self._abandoned_changes += by
            else:
                self._abandoned_reads += by
