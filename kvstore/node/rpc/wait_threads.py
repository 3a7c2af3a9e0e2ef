"""Threads for calls that wait for long: one each, for as long as the call lives.

In a pool with fewer threads than calls, those that wait for room could hold every thread, and whoever has the room would find
none to go on with and to give it back: all would wait until their deadlines. So there are no more calls than threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.core.errors import CapacityExceeded
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.tenant_limits import TenantLimit


class Lanes:
    """``enter`` before a call begins to wait; leave when no thread works for it any more. On the event loop only.

    Args:
        count: calls at once; threads are made as they are needed.
        name: of the threads, and for errors.
        counters: what is refused to tenants that have their share.
    """

    def __init__(self, count: int, name: str, counters: Counters) -> None:
        self.pool = ThreadPoolExecutor(count, thread_name_prefix=f"kvstore-{name}")
        self._count = count
        self._name = name
        self._shares = TenantLimit(name, count, counters.add)
        self._taken = 0

    @property
    def taken(self) -> int:
        """Calls that have one."""
        return self._taken

    def enter(self) -> Callable[[], None]:
        """Takes a lane.

        Returns:
            What gives it back, once.

        Raises:
            CapacityExceeded: all are taken, or the caller's tenant has its share of them.
        """
        if self._taken >= self._count:
            raise CapacityExceeded("too many calls wait on this node", what=self._name, limit=self._count)
        give_back = self._shares.acquire()
        self._taken += 1

        def leave() -> None:
            self._taken -= 1
            give_back()

        return leave

    def close(self) -> None:
        """Waits in it are bounded by their deadlines or ended by ``BlockTable.close``."""
        self.pool.shutdown(wait=False, cancel_futures=True)
