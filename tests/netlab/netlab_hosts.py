"""Work of the test process on a host of a lab."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from kvstore.netlab import netns
from kvstore.netlab.lab import LabHost

T = TypeVar("T")


class HostThread:
    """A thread on a host. Sockets and threads that its work opens belong to that host. A context manager."""

    def __init__(self, host: LabHost) -> None:
        self._fd = os.open(netns.NETNS_DIR / host.namespace, os.O_RDONLY | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(1, f"on-{host.name}", initializer=netns.enter, initargs=(self._fd,))

    def run(self, work: Callable[[], T]) -> T:
        """Do work and wait for it."""
        return self.begin(work).result()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin work."""
        return self._pool.submit(work)

    def close(self) -> None:
        """End the thread, after its work."""
        self._pool.shutdown()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
