"""What all share has a share for each tenant: who is confined by its token holds a quarter of it at most.

Else one tenant that holds on to all there is (places to wait in, subscriptions) would keep everybody else out. Callers that are
confined to no tenant (engines, nodes, operators, servers without tokens) are trusted with all of it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kvstore.core.errors import CapacityExceeded
from kvstore.core.limits import TENANT_SHARE
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.auth.interceptor import tenant

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)


class Shares:
    """Of one thing that has a bound. Thread-safe.

    Args:
        what: its name, for logs and errors.
        capacity: the bound of all; in whatever unit.
        count: counts an event: ``tenant_share_refused_total``.
    """

    def __init__(self, what: str, capacity: int, count: Callable[[str], None]) -> None:
        self._what = what
        self._most = max(1, capacity // TENANT_SHARE)
        self._count = count
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, amount: int = 1) -> Callable[[], None]:
        """Takes some for the tenant that this call is confined to, if it is to any.

        Returns:
            What gives it back: to be called once, from anywhere.

        Raises:
            CapacityExceeded: the tenant would have more than its share.
        """
        mine = tenant()
        if mine is None:
            return _nothing
        with self._lock:
            fits = self._held[mine] + amount <= self._most
            if fits:
                self._held[mine] += amount
        if not fits:
            self._count("tenant_share_refused_total")
            _limited.warning("tenant %s has its share of %s: refused", mine, self._what)
            raise CapacityExceeded("your tenant has its share of this", what=self._what, limit=self._most)

        def give_back() -> None:
            with self._lock:
                self._held[mine] -= amount
                if not self._held[mine]:
                    del self._held[mine]

        return give_back


def _nothing() -> None:
    """To be given back by who is confined to no tenant."""
