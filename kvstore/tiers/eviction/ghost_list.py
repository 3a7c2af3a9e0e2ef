"""Ghosts: keys of evicted blocks, each with a number, oldest first, in about 26 bytes per key. Pure.

A policy remembers several times as many keys as a volume holds blocks, so a dict of them would take more memory than all blocks.
A key is known by its 64-bit hash. The hashes and numbers are in order of arrival in arrays of ``_SEGMENT`` ghosts each; a
*position* counts ghosts since the beginning. Buckets of about ``_BUCKET`` entries of eight bytes map a hash to its position: the
upper half of the hash, and the position. Buckets are added one at a time (linear hashing), so that growth never stops the caller
for long.

Two keys with equal hashes count as one: a wrong guess of a policy, about once in 2**64 pairs.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey

_SEGMENT_BITS = 12
_SEGMENT = 1 << _SEGMENT_BITS
_BUCKET = 64
_ENTRY = struct.Struct("<II")
_GONE = -(1 << 62)
_POSITION_MASK = (1 << 32) - 1
_HASH_MASK = (1 << 64) - 1


class GhostList:
    """Keys with a number each, first in, first out. Not thread-safe."""

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
