"""Shared by loads and reads ahead: the loads that read, and the blocks that no load has asked for yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvstore.core.cancel_scope import current
from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.base.cancellation import wait
from kvstore.observe.counters import Counters


class WaitedReads:
    """Counts the loads that an engine waits for and that read from volumes or peers. Thread-safe.

    Args:
        counters: metrics.
        clock: time.
    """

    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._changed = threading.Condition()
        self._reading = 0

    def __enter__(self) -> None:
        with self._changed:
            self._reading += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._reading -= 1
            if not self._reading:
                self._changed.notify_all()

    def wait_none(self, deadline_s: float) -> bool:
        """Wait until none of them reads. False: one still does at the deadline, or the current scope is cancelled."""
        with self._changed:
            while self._reading and not current().cancelled and (left_s := deadline_s - self._clock.now_s()) > 0:
                wait(self._changed, left_s, self._counters)
            return not self._reading and not current().cancelled


class UnaskedKeys:
    """Keys of blocks that are read ahead, and that no load has asked for since. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[BlockKey] = set()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add keys that will be read ahead."""
        with self._lock:
            self._keys.update(keys)

    def discard(self, keys: Iterable[BlockKey]) -> int:
        """Remove keys: a load asks for them, or they are no longer held. Returns how many were not asked for before."""
        with self._lock:
            before = len(self._keys)
            self._keys.difference_update(keys)
            return before - len(self._keys)
