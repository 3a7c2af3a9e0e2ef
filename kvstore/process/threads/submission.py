"""Work for a thread pool that either runs before its future is done, or never.

``ThreadPoolExecutor.submit`` queues the work before it starts a thread. If the thread cannot be started, ``submit`` raises and
the work stays in the queue. Another thread of the pool may run it later, when the caller has released its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from kvstore.core.errors import Unavailable

T = TypeVar("T")


def submit(pool: Executor, work: Callable[..., T], *arguments: object) -> Future[T]:
    """Run work in a thread of a pool. A call that raises has not begun the work, and the pool never runs it.

    The pool must not be shut down with ``cancel_futures``, because the returned future would never be done.

    Args:
        pool: the pool.
        work: called with ``arguments``.
        arguments: of the call.

    Returns:
        The result of the work. The future can be cancelled until the work begins.

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
        pool.submit(run)
    except RuntimeError as error:
        if future.cancel():
            raise Unavailable("no thread for the work", error=error) from error
        # another thread of the pool has begun the work
    return future
