"""Per-tenant limits on shared resources: a confined tenant may hold at most a quarter of each.

Without them one tenant could occupy a whole resource, e.g. all subscriptions. Callers without a tenant (engines, nodes,
operators, and every caller of a server without tokens) are not limited.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kvstore.core.errors import CapacityExceeded
from kvstore.core.limits import TENANT_SHARE
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metrics import Event
from kvstore.rpc.auth.interceptor import tenant

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)


class TenantLimit:
    """Limit on one resource. Thread-safe.

    Args:
        resource: its name, for logs and errors.
        capacity: capacity for all callers, in any unit.
        count: counts a rejected call.
    """

    def __init__(self, resource: str, capacity: int, count: Callable[[Event], None]) -> None:
        self._resource = resource
        self._limit = max(1, capacity // TENANT_SHARE)
        self._count = count
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def acquire(self, amount: int = 1) -> Callable[[], None]:
        """Reserve an amount for the current call's tenant, if it is confined to one.

        Returns:
            A function that releases the reservation; call it once, from any thread.

        Raises:
            CapacityExceeded: the tenant would exceed its limit.
        """
        mine = tenant()
        if mine is None:
            return _nothing
        with self._lock:
            fits = self._held[mine] + amount <= self._limit
            if fits:
                self._held[mine] += amount
        if not fits:
            self._count(common_metrics.TENANT_SHARE_REFUSED)
            _limited.warning("call rejected: tenant limit reached (tenant=%s, resource=%s)", mine, self._resource)
            raise CapacityExceeded("tenant limit reached; release some or retry later", what=self._resource, limit=self._limit)

        def release() -> None:
            with self._lock:
                self._held[mine] -= amount
                if not self._held[mine]:
                    del self._held[mine]

        return release


def _nothing() -> None:
    """Release of a caller without a tenant."""
