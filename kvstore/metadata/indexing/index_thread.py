"""A thread that runs jobs on the index in order.

A server process has one for changes of records and registrations, one for long reads, and one for heartbeats, which must not wait
for the others. Lookups run on the event loop, so they never wait for a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_PENDING: Final = 64
"""Maximum number of queued and running jobs. A further caller waits, up to its own deadline."""


class IndexThread:
    """Runs jobs one after the other, in the order of their submission.

    A caller that is cancelled (deadline, lost connection) no longer waits, but a job that has begun is completed: an index change
    is applied as a whole or not at all.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._slots = asyncio.Semaphore(MAX_PENDING)

    async def run(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a job and return its result."""
        async with self._slots:
            return await asyncio.wrap_future(self._executor.submit(job, *args, **kwargs))

    async def close(self) -> None:
        """Wait for the running job, and drop queued jobs."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
