"""Queue of an eviction policy: entries by place, then by number, in about 20 bytes each. Pure.

Every block enters a queue at least once, and a large node holds millions: an entry must not be an object. Most entries come in
the order in which they will leave, so they are appended to a sorted *run* of three arrays. An entry that belongs further ahead
goes into a small heap, as one packed integer, and is merged into the run with the others once the heap has grown to an eighth of
the run. Numbers are unique and only grow, so the order is total, and does not depend on which of the two holds an entry.
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np
import numpy.typing as npt

Entry = tuple[int, int, int]
"""Place (lower leaves first), number, row of the block."""

_ROW_BITS = 32
_NUMBER_BITS = 40
_PLACE_SHIFT = _ROW_BITS + _NUMBER_BITS
_ROW_MASK = (1 << _ROW_BITS) - 1
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_LEAST_MERGED = 4096
_MERGE_SHARE = 8
_LEAST_CUT = 4096


class EvictionQueue:
    """Entries (place, number, row) in order. Not thread-safe."""

    __slots__ = ("_at", "_first", "_from_heap", "_heap", "_numbers", "_places", "_rows")

    def __init__(self) -> None:
        self._places = array("q")
        self._numbers = array("q")
        self._rows = array("I")
        self._at = 0  # the run before it is empty
        self._heap: list[int] = []
        self._first: Entry | None = None  # what ``first`` found, while it holds
        self._from_heap = False  # where

    def __len__(self) -> int:
        return len(self._rows) - self._at + len(self._heap)

    def push(self, place: int, number: int, row: int) -> None:
        """Add an entry. ``number`` is larger than that of every entry before it."""
        places = self._places
        if self._first is not None and place < self._first[0]:
            self._first = None
        if not places or place >= places[-1]:
            places.append(place)
            self._numbers.append(number)
            self._rows.append(row)
        else:
            heapq.heappush(self._heap, place << _PLACE_SHIFT | number << _ROW_BITS | row)

    @property
    def crowded(self) -> bool:
        """Whether enough entries came out of order that ``keep`` is due."""
        return len(self._heap) > max(_LEAST_MERGED, (len(self._rows) - self._at) // _MERGE_SHARE)

    def first(self) -> Entry | None:
        """The entry that leaves next, left in its place. None: there is none."""
        if self._first is None:
            self._first = self._find_first()
        return self._first

    def _find_first(self) -> Entry | None:
        at, heap = self._at, self._heap
        if at == len(self._rows):
            self._from_heap = True
            if not heap:
                return None
            packed = heap[0]
            return packed >> _PLACE_SHIFT, packed >> _ROW_BITS & _NUMBER_MASK, packed & _ROW_MASK
        place, number = self._places[at], self._numbers[at]
        if heap:
            packed = heap[0]
            if packed < (place << _PLACE_SHIFT | number << _ROW_BITS):
                self._from_heap = True
                return packed >> _PLACE_SHIFT, packed >> _ROW_BITS & _NUMBER_MASK, packed & _ROW_MASK
        self._from_heap = False
        return place, number, self._rows[at]

    def drop_first(self) -> None:
        """Remove the entry that ``first`` returned last. No ``push`` may come between the two."""
        self._first = None
        if self._from_heap:
            heapq.heappop(self._heap)
            return
        self._at += 1
        if self._at == len(self._rows) or (self._at >= _LEAST_CUT and 2 * self._at > len(self._rows)):
            for column in (self._places, self._numbers, self._rows):
                del column[: self._at]
            self._at = 0

    def keep(self, numbers_by_row: array[int]) -> None:
        """Drop every entry whose number is not that of its row, and merge the heap into the run."""
        heap = self._heap
        places = np.array(self._places, np.int64)[self._at :]
        numbers = np.array(self._numbers, np.int64)[self._at :]
        rows = np.array(self._rows, np.uint32)[self._at :]
        if heap:
            ahead = len(heap)
            heap.sort()
            places = np.concatenate((np.fromiter((each >> _PLACE_SHIFT for each in heap), np.int64, ahead), places))
            numbers = np.concatenate((np.fromiter((each >> _ROW_BITS & _NUMBER_MASK for each in heap), np.int64, ahead), numbers))
            rows = np.concatenate((np.fromiter((each & _ROW_MASK for each in heap), np.uint32, ahead), rows))
        alive: npt.NDArray[np.bool_] = np.frombuffer(numbers_by_row, np.int64)[rows] == numbers
        places, numbers, rows = places[alive], numbers[alive], rows[alive]
        if heap:
            order = np.lexsort((numbers, places))
            places, numbers, rows = places[order], numbers[order], rows[order]
        self._places, self._numbers, self._rows = array("q"), array("q"), array("I")
        self._places.frombytes(places.tobytes())
        self._numbers.frombytes(numbers.tobytes())
        self._rows.frombytes(rows.tobytes())
        self._at = 0
        self._heap = []
        self._first = None
