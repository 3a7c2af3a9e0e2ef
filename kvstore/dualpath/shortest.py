"""The few least of many names by a number that changes all the time.

A heap with lazy deletion: a change pushes a new entry and leaves the old one behind, which is thrown away when it comes to the
top. So a decision costs the same whether there are six nodes or ten thousand.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

SLACK = 64
"""Stale entries that are always allowed; beyond four an entry the heap is made anew."""


class ShortestFirst:
    """Names, each with a key; among equal keys the one that was changed first."""

    __slots__ = ("_current", "_heap", "_tick")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._current: dict[str, tuple[float, int]] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._current)

    def set(self, name: str, key: float) -> None:
        """The name is in, with this key from now on."""
        self._tick += 1
        self._current[name] = key, self._tick
        heapq.heappush(self._heap, (key, self._tick, name))
        if len(self._heap) > 4 * len(self._current) + SLACK:
            self._heap = [(key, tick, name) for name, (key, tick) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """The name is out; nothing happens if it was."""
        self._current.pop(name, None)

    def least(self, count: int, without: Container[str] = ()) -> list[str]:
        """Up to ``count`` names in the order of their keys, none of ``without``."""
        found: list[str] = []
        seen: list[tuple[float, int, str]] = []
        heap = self._heap
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            key, tick, name = entry
            if self._current.get(name) != (key, tick):
                continue
            seen.append(entry)
            if name not in without:
                found.append(name)
        for entry in seen:
            heapq.heappush(heap, entry)
        return found
