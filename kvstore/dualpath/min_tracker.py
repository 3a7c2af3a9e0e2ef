"""Finds the names with the smallest values while the values change constantly.

A sorted list: a change is a bisection and a move of pointers, some kilobytes for a thousand names. A decision therefore costs
about the same for six nodes and for ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container


class ShortestFirst:
    """Names ordered by their keys. Among equal keys, the name that was set first comes first."""

    __slots__ = ("_entries", "_order", "_tick")

    def __init__(self) -> None:
        self._order: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._order)

    def set(self, name: str, key: float) -> None:
        """Add a name, or change its key."""
        self.drop(name)
        self._tick += 1
        entry = self._entries[name] = (key, self._tick, name)
        insort(self._order, entry)

    def drop(self, name: str) -> None:
        """Remove a name, if it is present."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def least(self, count: int, without: Container[str] = ()) -> list[str]:
        """Return up to ``count`` names with the smallest keys, in order, except those in ``without``."""
        found: list[str] = []
        for _, _, name in self._order:
            if len(found) >= count:
                break
            if name not in without:
                found.append(name)
        return found
