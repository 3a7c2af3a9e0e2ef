"""Tasks of one kind in threads: each ends by its deadline, which begins when it is submitted, and its result is fetched once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Generic, TypeVar

from kvclient.engines.lmcache.counters import AdapterCounters

R = TypeVar("R")
_MOST_RESULTS = 65_536


class TaskQueue(Generic[R]):
    """Runs tasks of one kind. Thread-safe.

    Args:
        name: of the kind, for logs and threads.
        numbers: source of task numbers, shared by all kinds.
        workers: number of threads.
        max_pending: tasks that may wait or run; one more fails at once.
        counters: counts refused tasks.
        wake: called after a result is there, and never after ``close``; must not wait.
    """

    def __init__(
        self,
        name: str,
        numbers: count[int],
        workers: int,
        max_pending: int,
        counters: AdapterCounters,
        wake: Callable[[], None],
    ) -> None:
        self._name = name
        self._numbers = numbers
        self._max_pending = max_pending
        self._counters = counters
        self._wake = wake
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self._silent = False
        self._results: dict[int, R] = {}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=f"kvstore-lmcache-{name}")

    @property
    def pending(self) -> int:
        """Tasks that wait or run."""
        with self._lock:
            return self._pending

    def submit(self, work: Callable[[float], R], failed: R, deadline_s: float) -> int:
        """Start a task and return its number. A task beyond the bound, or after the end, has failed already.

        Args:
            work: called in a thread with the monotonic time at which it must have ended.
            failed: the result if it is not called, or raises.
            deadline_s: how long the task may take, waiting included.
        """
        end_s = time.monotonic() + deadline_s
        with self._lock:
            number = next(self._numbers)
            accepted = not self._closed and self._pending < self._max_pending
            if accepted:
                try:
                    self._pool.submit(self._run, number, work, failed, end_s)
                    self._pending += 1
                except RuntimeError:  # the interpreter ends
                    accepted = False
        if not accepted:
            self._counters.failed("tasks_refused", 1, f"{self._name} task refused: too many pending, or the adapter is closed")
            self._end(number, failed)
        return number

    def _run(self, number: int, work: Callable[[float], R], failed: R, end_s: float) -> None:
        result = failed
        try:
            if self._closed:
                return
            if time.monotonic() < end_s:
                result = work(end_s)
            else:
                self._counters.failed("tasks_expired", 1, f"{self._name} task failed: its deadline passed before it began")
        except Exception as error:  # noqa: BLE001  # the edge of the thread: the task must end
            self._counters.bug(f"{self._name} task", error)
        finally:
            self._end(number, result, ran=1)

    def _end(self, number: int, result: R, *, ran: int = 0) -> None:
        dropped = 0
        with self._lock:
            self._pending -= ran
            self._results[number] = result
            while len(self._results) > _MOST_RESULTS:
                del self._results[next(iter(self._results))]
                dropped += 1
            if not self._silent:
                self._wake()
        if dropped:
            self._counters.failed("results_dropped", dropped, f"results of {self._name} tasks were not fetched")

    def take(self, number: int) -> R | None:
        """Return the result of a task, once; None: it has not ended, or its result was returned before."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, R]:
        """Return all results that are there, each once, by task."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Refuse further tasks, end those that have not begun as failed, and wait for the others."""
        with self._lock:
            self._closed = True
        self._pool.shutdown()
        with self._lock:
            self._silent = True
