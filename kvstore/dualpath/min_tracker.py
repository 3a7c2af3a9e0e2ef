"""The names with the smallest values, under constant changes of the values.

A sorted list: a change is a bisection and a move of pointers, some kilobytes for a thousand names. A decision therefore costs
about the same for six nodes and for ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container


class ShortestFirst:
    """Names, each with a key; among equal keys the one that was changed first."""

    __slots__ = ("_entries", "_order", "_tick")

    def __init__(self) -> None:
        self._order: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._order)

    def set(self, name: str, key: float) -> None:
        """The name is in, with this key from now on."""
        self.drop(name)
        self._tick += 1
        entry = self._entries[name] = (key, self._tick, name)
        insort(self._order, entry)

    def drop(self, name: str) -> None:
        """The name is out; nothing happens if it was."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def least(self, count: int, without: Container[str] = ()) -> list[str]:
        """Up to ``count`` names in the order of their keys, none of ``without``."""
        found: list[str] = []
        for _, _, name in self._order:
            if len(found) >= count:
                break
            if name not in without:
                found.append(name)
        return found
