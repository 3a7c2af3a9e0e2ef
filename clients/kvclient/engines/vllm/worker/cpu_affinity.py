"""Where the connector's threads run: not where the engine computes, if there is anywhere else.

On CPUs vLLM binds each worker process to the processors that compute, and with a connector leaves one free for it. But a thread
may run where the one may that started it: copies and calls of the connector would take turns with the computation, and each
layer waits for the slowest of its threads. The engine's other processes are not bound, so they know what there is.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unbound() -> Iterator[None]:
    """Threads that are started meanwhile may run wherever the process may that started this one."""
    own = os.sched_getaffinity(0)
    everywhere = own | _of_parent()
    if everywhere == own:
        yield
        return
    os.sched_setaffinity(0, everywhere)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _of_parent() -> set[int]:
    """The processors of the process that started this one as its worker; none, where nobody did."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return set()
    try:
        return os.sched_getaffinity(parent.pid)
    except OSError:  # it has ended, or is another user's
        return set()
