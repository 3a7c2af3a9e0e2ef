"""Threads for calls that wait: one thread per call, for as long as the call lasts.

In a pool with fewer threads than calls, calls that wait for memory could hold every thread. The calls that hold the memory would
then find no thread to continue and release it, and all would wait until their deadlines. So a call without a thread is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import CapacityExceeded
from kvstore.observe.counters import Counters
from kvstore.process.threads.submission import submit
from kvstore.rpc.auth.interceptor import TenantLimit

Result = TypeVar("Result")


class WaitThreads:
    """A bounded set of threads. Acquire one before a call begins to wait; release it when no thread works for the call any more.

    To be used on the event loop only.

    Args:
        count: calls at once; threads are created when they are needed.
        name: of the threads, and for errors.
        counters: count refusals of tenants that are at their limit.
        threads: number of threads, if smaller than ``count``. The other calls wait in the pool's queue, so no call may wait for
            another one.
    """

    def __init__(self, count: int, name: str, counters: Counters, *, threads: int | None = None) -> None:
        self.pool = ThreadPoolExecutor(threads or count, thread_name_prefix=f"kvstore-{name}")
        self._count = count
        self._name = name
        self._shares = TenantLimit(name, count, counters.add)
        self._in_use = 0

    def acquire(self) -> Callable[[], None]:
        """Reserve a thread.

        Returns:
            A function that releases it. To be called once.

        Raises:
            CapacityExceeded: all are in use, or the caller's tenant is at its limit.
        """
        if self._in_use >= self._count:
            raise CapacityExceeded("too many calls wait on this node; try again later", calls=self._name, limit=self._count)
        leave_share = self._shares.acquire()
        self._in_use += 1

        def release() -> None:
            self._in_use -= 1
            leave_share()

        return release

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a call's work in a thread.

        A cancelled call counts until its work has ended. So the queue never has more than ``count`` entries.

        Raises:
            CapacityExceeded: see ``acquire``.
            Unavailable: the pool is shut down, or the process may start no further thread. The work never runs.
        """
        release = self.acquire()
        scope = CancelScope()
        try:
            ended = asyncio.wrap_future(submit(self.pool, scope.context().run, work))
        except BaseException:
            release()
            raise
        ended.add_done_callback(lambda _: release())
        try:
            return await asyncio.shield(ended)
        finally:
            scope.cancel()

    def close(self) -> None:
        """Shut the pool down without waiting: deadlines or ``BlockTable.close`` end the calls in it."""
        self.pool.shutdown(wait=False, cancel_futures=True)
