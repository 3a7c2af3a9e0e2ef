"""The bounded parts of the arena that loads and prompts pass through: the prefill buffer and the decode buffer.

A buffer is a budget in bytes, not a region: slots come from the one arena, which evicts to make room. What the budget sees to is
that those who hold blocks for a whole load or a whole prompt never hold more than a share of the arena together, and that each
of them takes all of its room or none: two that each held a part and waited for the rest would wait for each other for ever.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.core.clock import Clock
from kvstore.core.limits import TENANT_SHARE
from kvstore.node.base.cancellation import over, wait
from kvstore.observe.counters import Counters


class StagingBuffer:
    """Admission in order of arrival, all or none. Thread-safe.

    Args:
        name: for counters, e.g. ``"prefill_buffer"``.
        capacity_bytes: the most that is admitted at once.
        clock: where time comes from.
        counters: ``<name>_refused_total``: too large ever to fit; ``<name>_timeouts_total``: no room in time.
    """

    def __init__(self, name: str, capacity_bytes: int, clock: Clock, counters: Counters) -> None:
        self.capacity_bytes = capacity_bytes
        self._name = name
        self._clock = clock
        self._counters = counters
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._used = 0
        self._of_tenants: Counter[str] = Counter()  # admitted, or in the line

    @property
    def used_bytes(self) -> int:
        """Admitted and not given back."""
        return self._used

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def most_bytes(self, tenant: str | None) -> int:
        """What one may have who is confined to a tenant, or (None) to none."""
        return self.capacity_bytes if tenant is None else self.capacity_bytes // TENANT_SHARE

    def admit(self, size: int, deadline_s: float, tenant: str | None = None) -> bool:
        """Takes room, after those who came before. False: none in time, or there can never be, or nobody wants it any more.

        Who is confined to a ``tenant`` comes into the line once that has room in its share: what waits for its own does not keep
        others waiting.
        """
        if size > self.most_bytes(tenant):
            self._counters.add(f"{self._name}_refused_total")
            return False
        turn = object()
        with self._changed:
            while tenant is not None and self._of_tenants[tenant] + size > self.most_bytes(tenant):
                if not self._wait(deadline_s):
                    return False
            self._count(tenant, size)
            self._waiting.append(turn)
            admitted = False
            try:
                while self._waiting[0] is not turn or self._used + size > self.capacity_bytes:
                    if not self._wait(deadline_s):
                        return False
                self._used += size
                admitted = True
                return True
            finally:
                if not admitted:
                    self._count(tenant, -size)
                self._waiting.remove(turn)
                self._changed.notify_all()  # who is next may fit now

    def _wait(self, deadline_s: float) -> bool:
        left_s = deadline_s - self._clock.now_s()
        if left_s > 0 and wait(self._changed, left_s, self._counters):
            return True
        if not over():
            self._counters.add(f"{self._name}_timeouts_total")
        return False

    def _count(self, tenant: str | None, size: int) -> None:
        if tenant is None:
            return
        self._of_tenants[tenant] += size
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]

    def release(self, size: int, tenant: str | None = None) -> None:
        """Gives room back, as it was admitted."""
        with self._changed:
            self._used -= size
            self._count(tenant, -size)
            assert self._used >= 0, "more given back than taken"
            self._changed.notify_all()

    @contextmanager
    def room(self, size: int, deadline_s: float, tenant: str | None = None) -> Iterator[bool]:
        """Room for as long as the block lasts; yields whether it was admitted."""
        admitted = self.admit(size, deadline_s, tenant)
        try:
            yield admitted
        finally:
            if admitted:
                self.release(size, tenant)
