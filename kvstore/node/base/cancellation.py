"""Waits for a condition that the caller's disconnect ends.

A call may hold memory, claims or a thread while it waits. If its caller disconnects, the wait must end at once, and not at the
deadline of the call. So each call runs in a ``CancelScope`` that is cancelled when the caller disconnects.
"""

from __future__ import annotations

import threading

from kvstore.core.cancel_scope import current
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics


def wait(condition: threading.Condition, timeout_s: float, counters: Counters) -> bool:
    """Wait for a condition in the current scope, and count the wait if it is cancelled.

    A cancellation wakes all threads that wait for the condition, so each must check again what it waits for.

    Returns:
        False: cancelled, or not notified in time.
    """
    scope = current()
    notified = scope.wait(condition, timeout_s)
    if scope.cancelled:
        counters.add(node_metrics.WAITS_CANCELLED)
    return notified
