"""Threads that may not start, and work for a thread pool that either runs before its future is done, or never.

``ThreadPoolExecutor.submit`` queues the work before it starts a thread. If the thread cannot be started, ``submit`` raises and
the work stays in the queue. Another thread of the pool may run it later, when the caller has released its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from kvstore.core.errors import Unavailable

T = TypeVar("T")


def start_thread(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread.

    Returns:
        The started thread. None: the process may start no further thread; a later call may succeed.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def submit(pool: Executor, work: Callable[..., T], *arguments: object) -> Future[T]:
    """Run work in a thread of a pool. A call that raises has not begun the work, and the pool never runs it.

    Args:
        pool: the pool.
        work: called with ``arguments``.
        arguments: of the call.

    Returns:
        The result of the work. The future can be cancelled until the work begins, also by the pool's shutdown.

    Raises:
        Unavailable: the pool is shut down, or the process may start no further thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work(*arguments)
        except BaseException as error:  # noqa: BLE001  # the caller gets it from the future
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        queued = pool.submit(run)
    except RuntimeError as error:
        if future.cancel():
            raise Unavailable("no thread for the work", error=error) from error
        # another thread of the pool has begun the work
    else:
        queued.add_done_callback(lambda done: done.cancelled() and future.cancel())  # by ``cancel_futures`` at a shutdown
    return future


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
