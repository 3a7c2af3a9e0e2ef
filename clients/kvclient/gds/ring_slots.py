"""Slots of a landing ring. Pure bookkeeping under one lock; knows no memory and no device."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class RingSlots:
    """Numbers ``[0, count)``, each with one holder at most. Thread-safe.

    1. A slot is free, held, or lost.
    2. ``take`` makes free slots held, in the order in which they became free.
    3. ``give_back`` makes held slots free. Only their holder calls it, after nothing reads or writes their memory any more.
    4. A slot that is never given back is lost: its memory may still be written to.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = dict.fromkeys(range(count))
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, most: int, timeout_s: float) -> list[int]:
        """Take up to ``most`` slots, at least one. Empty: none became free in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, timeout_s)
            taken = list(self._free)[:most]
            for slot in taken:
                del self._free[slot]
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Return held slots."""
        with self._changed:
            for slot in slots:
                assert slot not in self._free, "a slot is given back twice"
                self._free[slot] = None
            self._changed.notify_all()
