"""Compare a node's range digests with the index, to find the ranges of key space that must be repaired.

Reading the ranges of a large index is slow. It runs on a separate thread, in slices, so that neither lookups nor writes
wait for it, and a cancelled caller stops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.core.range_digests import digest_keys
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.indexing.index_thread import IndexThread

_SLICE: Final = 64
"""Ranges per job of the thread."""


async def differing_ranges(
    index: PrefixIndex, thread: IndexThread, volume_epoch: VolumeEpoch, first: int, digests: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Find the ranges in which the index and a node disagree about the keys of a volume epoch.

    Args:
        index: the index.
        thread: thread that reads the index.
        volume_epoch: volume epoch of the node's volume.
        first: number of the first range.
        digests: the node's digest of each range.
        counts: the node's number of keys in each range.
    """
    differing: list[int] = []
    for at in range(0, len(digests), _SLICE):
        part = slice(at, at + _SLICE)
        differing += await thread.run(_compare, index, volume_epoch, first + at, digests[part], counts[part])
    return differing


def _compare(
    index: PrefixIndex, volume_epoch: VolumeEpoch, first: int, digests: Sequence[int], counts: Sequence[int]
) -> list[int]:
    differing = []
    for number, (digest, count) in enumerate(zip(digests, counts, strict=True), start=first):
        keys = index.keys_in_range(volume_epoch, number)
        if len(keys) != count or digest_keys(keys) != digest:
            differing.append(number)
    return differing
