"""Admission of loads and prompts to the arena: the prefill buffer and the decode buffer.

A buffer is a budget of bytes, not a region: its slots come from the arena, which evicts to free some. The budget bounds how much
of the arena is held for whole loads and whole prompts. Admission is all or nothing: two loads that each held a part and waited
for the rest would deadlock.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.core.cancel_scope import current
from kvstore.core.clock import Clock
from kvstore.core.limits import TENANT_SHARE
from kvstore.node.base.cancellation import wait
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics


class BufferBudget:
    """A budget of bytes with admission in order of arrival. Thread-safe.

    Args:
        name: for counters, e.g. ``"prefill_buffer"``.
        capacity_bytes: maximum admitted at once.
        clock: time.
        counters: ``node_staging_refused_total``: larger than the caller's limit; ``node_staging_timeouts_total``: not admitted
            in time.
    """

    def __init__(self, name: str, capacity_bytes: int, clock: Clock, counters: Counters) -> None:
        self.capacity_bytes = capacity_bytes
        self._name = name
        self._clock = clock
        self._counters = counters
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._used = 0
        self._of_tenants: Counter[str] = Counter()
        """Bytes admitted or queued per tenant."""

    @property
    def used_bytes(self) -> int:
        """Bytes admitted and not released."""
        return self._used

    @property
    def waiting(self) -> int:
        """Number of callers in the queue."""
        return len(self._queue)

    def limit_bytes(self, tenant: str | None) -> int:
        """Return the maximum for one tenant. None: the caller is not confined to a tenant."""
        return self.capacity_bytes if tenant is None else self.capacity_bytes // TENANT_SHARE

    def admit(self, size: int, deadline_s: float, tenant: str | None = None) -> bool:
        """Wait until ``size`` bytes are free and all earlier callers are admitted. ``release`` gives the bytes back.

        A caller that is confined to a ``tenant`` enters the queue only once its request fits under the tenant's limit, so a
        tenant at its limit does not delay others.

        Returns:
            False: not in time, larger than the limit, or cancelled.
        """
        if size > self.limit_bytes(tenant):
            self._counters.add(node_metrics.STAGING_REFUSED[self._name])
            return False
        ticket = object()
        with self._changed:
            while tenant is not None and self._of_tenants[tenant] + size > self.limit_bytes(tenant):
                if not self._wait(deadline_s):
                    return False
            self._count(tenant, size)
            self._queue.append(ticket)
            admitted = False
            try:
                while self._queue[0] is not ticket or self._used + size > self.capacity_bytes:
                    if not self._wait(deadline_s):
                        return False
                self._used += size
                admitted = True
                return True
            finally:
                if not admitted:
                    self._count(tenant, -size)
                self._queue.remove(ticket)
                self._changed.notify_all()  # the next in the queue may fit now

    def release(self, size: int, tenant: str | None = None) -> None:
        """Give admitted bytes back."""
        with self._changed:
            self._used -= size
            self._count(tenant, -size)
            assert self._used >= 0, "more released than admitted"
            self._changed.notify_all()

    @contextmanager
    def admission(self, size: int, deadline_s: float, tenant: str | None = None) -> Iterator[bool]:
        """Admit for the duration of a ``with`` statement. Yields whether it was admitted."""
        admitted = self.admit(size, deadline_s, tenant)
        try:
            yield admitted
        finally:
            if admitted:
                self.release(size, tenant)

    def _wait(self, deadline_s: float) -> bool:
        left_s = deadline_s - self._clock.now_s()
        if left_s > 0 and wait(self._changed, left_s, self._counters):
            return True
        if not current().cancelled:
            self._counters.add(node_metrics.STAGING_TIMEOUTS[self._name])
        return False

    def _count(self, tenant: str | None, size: int) -> None:
        if tenant is None:
            return
        self._of_tenants[tenant] += size
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
