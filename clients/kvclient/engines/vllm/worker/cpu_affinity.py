"""Keeps the connector's threads off the processors on which the engine computes, if there are others.

On CPUs vLLM binds each worker process to the processors that compute, and with a connector leaves one free for it. But a thread
inherits the processors of its starter: copies and calls of the connector would share them with the computation, and each
layer waits for the slowest of its threads. The engine's other processes are not bound, so they know what there is.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unbound() -> Iterator[None]:
    """Let threads that are started in this context run on all processors of the parent process."""
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
    """The processors of the process that started this worker; empty if none did."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return set()
    try:
        return os.sched_getaffinity(parent.pid)
    except OSError:  # it has ended, or is another user's
        return set()
