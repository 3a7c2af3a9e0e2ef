"""Comparing a node's digests with the index: which ranges of key space must be repaired.

Reading ranges of a large index takes a while. It happens on a thread of its own, in slices, so that neither lookups nor writes
wait for it and a caller that has gone away stops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.core.range_digests import digest_keys
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.indexing.index_thread import IndexThread

_SLICE: Final = 64
"""Ranges compared in one job."""


async def differing_ranges(
    index: PrefixIndex, thread: IndexThread, volume_epoch: VolumeEpoch, first: int, digests: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Ranges in which the index and the node do not hold the same keys for a volume epoch.

    Args:
        index: the index.
        thread: reads it.
        volume_epoch: the node's volume in its present boot.
        first: the first range compared.
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
    for wanted_range, (digest, count) in enumerate(zip(digests, counts, strict=True), start=first):
        keys = index.keys_in_range(volume_epoch, wanted_range)
        if len(keys) != count or digest_keys(keys) != digest:
            differing.append(wanted_range)
    return differing
