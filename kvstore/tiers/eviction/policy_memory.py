"""What an eviction policy keeps of blocks: the queue of those that are held, and ghosts of those that were evicted. Pure.

A large node holds millions of blocks, and a policy remembers several times as many evicted ones. So neither is a dict or a list
of objects: a queue takes about 20 bytes per entry, and a ghost about 26.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey

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
    """Entries (place, number, row): by place, then by number. Not thread-safe.

    Most entries come in the order in which they will leave, so they are appended to a sorted *run* of three arrays. An entry that
    belongs further ahead goes into a small heap, as one packed integer, and is merged into the run with the others once the heap
    has grown to an eighth of the run. Numbers are unique and only grow, so the order is total, and does not depend on which of
    the two holds an entry.
    """

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


_SEGMENT_BITS = 12
_SEGMENT = 1 << _SEGMENT_BITS
_BUCKET = 64
_ENTRY = struct.Struct("<II")
_GONE = -(1 << 62)
_POSITION_MASK = (1 << 32) - 1
_HASH_MASK = (1 << 64) - 1


class GhostList:
    """Keys with a number each, first in, first out. Not thread-safe.

    A key is known by its 64-bit hash. The hashes and numbers are in order of arrival in arrays of ``_SEGMENT`` ghosts each; a
    *position* counts ghosts since the beginning. Buckets of about ``_BUCKET`` entries of eight bytes map a hash to its position:
    the upper half of the hash, and the position. Buckets are added one at a time (linear hashing), so that growth never stops
    the caller for long.

    Two keys with equal hashes count as one: a wrong guess of a policy, about once in 2**64 pairs.
    """

    __slots__ = ("_buckets", "_count", "_hashes", "_head", "_level", "_next", "_numbers", "_split")

    def __init__(self) -> None:
        self._hashes: deque[array[int]] = deque()
        self._numbers: deque[array[int]] = deque()
        self._head = 0  # position of the oldest that may still be here
        self._next = 0  # position of the next to come
        self._count = 0
        self._buckets = [bytearray()]
        self._level = 1  # buckets at the last doubling
        self._split = 0  # the bucket that is split next

    def __len__(self) -> int:
        return self._count

    def add(self, key: BlockKey, number: int) -> None:
        """Add the newest ghost. The list must not contain the key."""
        digest = hash(key) & _HASH_MASK
        position = self._next
        if not position & (_SEGMENT - 1):
            self._hashes.append(array("Q"))
            self._numbers.append(array("q"))
        self._hashes[-1].append(digest)
        self._numbers[-1].append(number)
        self._buckets[self._bucket_of(digest)] += _ENTRY.pack(digest >> 32, position & _POSITION_MASK)
        self._next = position + 1
        self._count += 1
        if self._count > _BUCKET * len(self._buckets):
            self._split_one()

    def pop(self, key: BlockKey) -> int | None:
        """Remove a key and return its number; None: the key is absent."""
        digest = hash(key) & _HASH_MASK
        bucket = self._buckets[self._bucket_of(digest)]
        for at, position in self._candidates(bucket, digest):
            segment, place = self._place(position)
            if self._hashes[segment][place] == digest:
                numbers = self._numbers[segment]
                number, numbers[place] = numbers[place], _GONE
                del bucket[at : at + 8]
                self._count -= 1
                return number
        return None

    def drop_oldest(self) -> None:
        """Remove the oldest ghost, if any."""
        while self._count:
            numbers, place = self._numbers[0], self._head & (_SEGMENT - 1)
            here = numbers[place] != _GONE
            if here:
                digest = self._hashes[0][place]
                bucket = self._buckets[self._bucket_of(digest)]
                wanted = _ENTRY.pack(digest >> 32, self._head & _POSITION_MASK)
                at = bucket.find(wanted)
                while at > 0 and at & 7:  # found across the border of two entries
                    at = bucket.find(wanted, at + 1)
                if at < 0:
                    raise Internal("ghost entry is in no bucket", position=self._head)
                del bucket[at : at + 8]
                self._count -= 1
            self._head += 1
            if not self._head & (_SEGMENT - 1):
                self._hashes.popleft()
                self._numbers.popleft()
            if here:
                return

    def _place(self, position: int) -> tuple[int, int]:
        """Segment and place of a position, of which the lower 32 bits are given."""
        since = (position - self._head) & _POSITION_MASK  # the list is shorter than 2**32
        whole = self._head + since
        return (whole >> _SEGMENT_BITS) - (self._head >> _SEGMENT_BITS), whole & (_SEGMENT - 1)

    def _bucket_of(self, digest: int) -> int:
        number = digest & (self._level - 1)
        return number if number >= self._split else digest & (2 * self._level - 1)

    @staticmethod
    def _candidates(bucket: bytearray, digest: int) -> Iterator[tuple[int, int]]:
        """Entries of a bucket whose half of the hash matches ``digest``: index in the bucket, and position."""
        half = (digest >> 32).to_bytes(4, "little")
        at = bucket.find(half)
        while at >= 0:
            if not at & 7:
                yield at, int.from_bytes(bucket[at + 4 : at + 8], "little")
            at = bucket.find(half, at + 1)

    def _split_one(self) -> None:
        """Add a bucket. An existing bucket gives it half of its entries."""
        stays, goes = bytearray(), bytearray()
        for half, position in _ENTRY.iter_unpack(bytes(self._buckets[self._split])):
            segment, place = self._place(position)
            moved = self._hashes[segment][place] & self._level
            (goes if moved else stays).extend(_ENTRY.pack(half, position))
        self._buckets[self._split] = stays
        self._buckets.append(goes)
        self._split += 1
        if self._split == self._level:
            self._level *= 2
            self._split = 0
