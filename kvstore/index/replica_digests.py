"""Facts about all records in a part of the index: range digests of volume epochs, and records of closed ones. Pure.

numpy computes them, because a loop in Python over a million records takes several seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core.types import KEY_BYTES
from kvstore.index.contract import VolumeEpoch
from kvstore.native import hash_parts

Numbers = np.ndarray[tuple[int], np.dtype[np.uint64]]
_RANGE_BITS = 12
_HEAD = 2
"""Numbers of a record before its replicas."""


@dataclass(frozen=True, slots=True)
class ReplicaDigests:
    """Digests of one volume epoch: the ranges in which it holds keys, ascending, with digest and number of keys of each."""

    volume_epoch: VolumeEpoch
    ranges: Numbers
    digests: Numbers
    counts: Numbers


def digest_replicas(records: Sequence[tuple[bytes, bytes]]) -> Iterator[ReplicaDigests]:
    """Compute the range digests (``kvstore.core.checksum``) of each volume epoch among the index's records."""
    if not records:
        return
    keys = b"".join([key for key, _ in records])
    hashes = np.asarray(hash_parts(memoryview(keys), KEY_BYTES))
    heads = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[:, :2].astype(np.uint64)
    ranges = heads[:, 0] << np.uint64(4) | heads[:, 1] >> np.uint64(4)
    places, hashed = [], []  # of each replica: volume epoch and range in one number, and the key's hash
    for chosen, numbers in _by_size(records):
        volume_epochs = numbers[:, _HEAD::2].astype(np.uint64)
        places.append((volume_epochs << np.uint64(_RANGE_BITS) | ranges[chosen, None]).ravel())
        hashed.append(np.repeat(hashes[chosen], volume_epochs.shape[1]))
    place, hash_of = np.concatenate(places), np.concatenate(hashed)
    if not len(place):
        return
    order = np.argsort(place, kind="stable")
    place, hash_of = place[order], hash_of[order]
    starts = np.flatnonzero(np.concatenate(([True], place[1:] != place[:-1])))
    digests = np.bitwise_xor.reduceat(hash_of, starts)
    counts = np.diff(np.concatenate((starts, [len(place)]))).astype(np.uint64)
    owners, found = place[starts] >> np.uint64(_RANGE_BITS), place[starts] & np.uint64((1 << _RANGE_BITS) - 1)
    borders = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1], [True])))
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        yield ReplicaDigests(VolumeEpoch(int(owners[first])), found[first:last], digests[first:last], counts[first:last])


def find_other_epochs(records: Sequence[tuple[bytes, bytes]], volume_epochs: Collection[VolumeEpoch]) -> list[int]:
    """Find the positions of records that name other volume epochs than these, in order."""
    if not records:
        return []
    known, found = np.array(sorted(volume_epochs), np.uint32), []
    for chosen, numbers in _by_size(records):
        found += chosen[~np.isin(numbers[:, _HEAD::2], known).all(axis=1)].tolist()
    return sorted(found)


def _by_size(records: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The records of each size: their positions, and their numbers in rows."""
    sizes = np.fromiter((len(value) for _, value in records), np.int64, len(records))
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        yield chosen, np.frombuffer(b"".join([records[at][1] for at in chosen.tolist()]), "<u4").reshape(len(chosen), -1)
