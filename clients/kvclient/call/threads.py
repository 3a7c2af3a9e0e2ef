"""Threads of a client, started when first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvstore.core.errors import Unavailable
from kvstore.process.threads.submission import submit

Result = TypeVar("Result")


class LazyThreadPool:
    """A thread pool that is created on first use. Thread-safe.

    Args:
        workers: maximum number of threads.
        name: prefix of their names.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self._name = name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def submit(self, work: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Run ``work`` in a thread.

        Raises:
            Unavailable: the client is closed, or the process may start no further thread. The work never runs.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix=self._name)
            return submit(self._pool, work, *arguments)

    def close(self) -> None:
        """Refuse new work and wait until the work under way has ended."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
