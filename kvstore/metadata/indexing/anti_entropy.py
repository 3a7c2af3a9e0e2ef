"""Compare nodes' range digests with the index, to find the ranges of key space that must be repaired.

One pass over the index digests the keys of all volume epochs, and serves the comparisons of all volumes for as long as their
nodes allow. So a round costs about the same for one volume as for a hundred. A range that differs from digests of an earlier
pass may have changed since then, so it is read again before it is reported.

Reading a large index is slow. It runs on a separate thread, in slices, so that neither lookups nor writes wait for it. A caller
that is cancelled (deadline, lost connection) begins no further slice, and the slice that is being read serves the next caller. So
a pass ends even if a slice takes longer than the deadline of a call. The next pass begins at the earliest after ten times the
duration of the last one, and reading ranges again takes no longer than the pass. So anti-entropy uses a fifth of a processor at
most, for an index of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvstore.core.checksum import digest_keys
from kvstore.core.clock import Clock
from kvstore.core.limits import DIGEST_RANGES
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.index.replica_digests import ReplicaDigests, digest_replicas
from kvstore.metadata.indexing.index_thread import IndexThread

Digests = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""Digests of each range, then the numbers of keys; 64 KiB per volume epoch."""
_SLICE: Final = 128
"""Ranges per job of the thread."""
_MOST_RECORDS: Final = 1 << 16
"""Records in memory at once, about. In a large index, a slice is read in parts."""
_MAX_REREAD: Final = 8
"""Ranges per slice that one comparison reads again without finding drift. Stores change ranges all the time."""
_REST: Final = 10
"""Digests serve for as many times the duration of their pass, if the caller accepts older ones at all."""
_REREAD_S: Final = 0.2
"""Time that all comparisons may spend on reading ranges of a slice again, if reading the slice took less."""


class IndexDigests:
    """Digests of the index, per volume epoch and range. Use on one event loop.

    Args:
        index: the index.
        thread: thread that reads the index.
        clock: time.
    """

    def __init__(self, index: PrefixIndex, thread: IndexThread, clock: Clock) -> None:
        self._index = index
        self._thread = thread
        self._clock = clock
        self._read_s = [float("-inf")] * (DIGEST_RANGES // _SLICE)
        self._took_s = [0.0] * len(self._read_s)
        """Duration of the last read of each slice."""
        self._reread_s = [0.0] * len(self._read_s)
        """Time since then that reading ranges again took."""
        self._turn = 0
        self._digests: dict[VolumeEpoch, Digests] = {}
        self._reads: dict[int, asyncio.Task[None]] = {}
        """Reads of slices, waiting and under way."""
        self._reading = asyncio.Lock()

    async def differing(
        self, volume_epoch: VolumeEpoch, first: int, digests: Sequence[int], counts: Sequence[int], max_age_s: float
    ) -> list[int]:
        """Find the ranges in which the index and a node disagree about the keys of a volume epoch.

        Args:
            volume_epoch: volume epoch of the node's volume.
            first: number of the first range.
            digests: the node's digest of each range.
            counts: the node's number of keys in each range.
            max_age_s: age up to which digests of an earlier pass are compared, or more in a large index; 0: the index is read.
        """
        found: list[int] = []
        wanted = np.array([digests, counts], np.uint64)
        asked_s = self._clock.now_s()
        oldest_s = asked_s - (max(max_age_s, _REST * sum(self._took_s)) if max_age_s else 0.0)
        self._turn += 1
        end = first + len(digests)
        fresh = {number for number in range(first // _SLICE, -(-end // _SLICE)) if await self._refresh(number, oldest_s, asked_s)}
        differing = first + np.flatnonzero((self._of(volume_epoch)[:, first:end] != wanted).any(axis=0))
        for number in np.unique(differing // _SLICE).tolist():
            suspects = differing[differing // _SLICE == number]
            if number in fresh:
                found += suspects.tolist()
                continue
            unfounded = 0
            for suspect in np.roll(suspects, self._turn).tolist():  # others first each time: not all of them may be read again
                if self._reread_s[number] > max(self._took_s[number], _REREAD_S):
                    break
                began_s = self._clock.now_s()
                keys = await self._thread.run(self._index.keys_in_range, volume_epoch, suspect)
                self._reread_s[number] += self._clock.now_s() - began_s
                if [digest_keys(keys), len(keys)] != wanted[:, suspect - first].tolist():
                    found.append(suspect)
                    continue
                if (unfounded := unfounded + 1) == _MAX_REREAD:
                    break
        return sorted(found)

    def _of(self, volume_epoch: VolumeEpoch) -> Digests:
        return self._digests.get(volume_epoch, _NOTHING)

    async def _refresh(self, number: int, oldest_s: float, asked_s: float) -> bool:
        """Read a slice of the index unless that was done since ``oldest_s``.

        Returns:
            Whether the slice was read after ``asked_s``, for this caller or for another.
        """
        if self._read_s[number] <= oldest_s and (under_way := self._reads.get(number)) is not None:
            await asyncio.shield(under_way)  # it may have begun before the caller asked
        if self._read_s[number] > oldest_s:
            return self._read_s[number] > asked_s
        if (read := self._reads.get(number)) is None:
            read = self._reads[number] = asyncio.create_task(self._read(number))
            read.add_done_callback(partial(self._read_ended, number))
        await asyncio.shield(read)
        return True

    async def _read(self, number: int) -> None:
        """Read a slice of the index. One slice after the other, so that the duration is that of this slice."""
        async with self._reading:
            now_s = self._clock.now_s()
            found = await self._thread.run(_digest, self._index, number * _SLICE, self._index.stats().blocks)
            part = slice(number * _SLICE, (number + 1) * _SLICE)
            for known in self._digests.values():
                known[:, part] = 0
            for one in found:
                known = self._digests.setdefault(one.volume_epoch, np.zeros_like(_NOTHING))
                known[0, one.ranges], known[1, one.ranges] = one.digests, one.counts
            self._read_s[number], self._took_s[number], self._reread_s[number] = now_s, self._clock.now_s() - now_s, 0.0
            if part.stop == DIGEST_RANGES:
                self._digests = {epoch: known for epoch, known in self._digests.items() if known[1].any()}

    def _read_ended(self, number: int, read: asyncio.Task[None]) -> None:
        del self._reads[number]
        if not read.cancelled():
            read.exception()  # callers that still wait raise it; without any, the next caller reads again


_NOTHING: Final[Digests] = np.zeros((2, DIGEST_RANGES), np.uint64)


def _digest(index: PrefixIndex, first: int, blocks: int) -> list[ReplicaDigests]:
    width = max(1, min(_SLICE, _MOST_RECORDS * DIGEST_RANGES // (blocks + 1)))
    parts = [(at, min(width, first + _SLICE - at)) for at in range(first, first + _SLICE, width)]
    return [one for at, count in parts for one in digest_replicas(index.packed_records(at, count))]
