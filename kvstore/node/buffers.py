"""The bounded parts of the arena that loads and prompts pass through: the prefill buffer and the decode buffer.

A buffer is a budget in bytes, not a region: slots come from the one arena, which evicts to make room. What the budget sees to is
that those who hold blocks for a whole load or a whole prompt never hold more than a share of the arena together, and that each
of them takes all of its room or none: two that each held a part and waited for the rest would wait for each other for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.core.clock import Clock
from kvstore.node.wanted import over, wait
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

    @property
    def used_bytes(self) -> int:
        """Admitted and not given back."""
        return self._used

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def admit(self, size: int, deadline_s: float) -> bool:
        """Takes room, after those who came before. False: none in time, or there can never be, or nobody wants it any more."""
        if size > self.capacity_bytes:
            self._counters.add(f"{self._name}_refused_total")
            return False
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or self._used + size > self.capacity_bytes:
                    left_s = deadline_s - self._clock.now_s()
                    if left_s <= 0 or not wait(self._changed, left_s, self._counters):
                        if not over():
                            self._counters.add(f"{self._name}_timeouts_total")
                        return False
                self._used += size
                return True
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()  # who is next may fit now

    def release(self, size: int) -> None:
        """Gives room back."""
        with self._changed:
            self._used -= size
            assert self._used >= 0, "more given back than taken"
            self._changed.notify_all()

    @contextmanager
    def room(self, size: int, deadline_s: float) -> Iterator[bool]:
        """Room for as long as the block lasts; yields whether it was admitted."""
        admitted = self.admit(size, deadline_s)
        try:
            yield admitted
        finally:
            if admitted:
                self.release(size)
