"""Facts about all records in a part of the index: range digests of volume epochs, and records of closed ones. Pure.

numpy computes them, because a loop in Python over a million records takes several seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core.types import KEY_BYTES
from kvstore.index.contract import PackedRecords, VolumeEpoch
from kvstore.index.record import REPLICA_BYTES
from kvstore.native import hash_parts

Numbers = np.ndarray[tuple[int], np.dtype[np.uint64]]
_RANGE_BITS = 12


@dataclass(frozen=True, slots=True)
class ReplicaDigests:
    """Digests of one volume epoch: the ranges in which it holds keys, ascending, with digest and number of keys of each."""

    volume_epoch: VolumeEpoch
    ranges: Numbers
    digests: Numbers
    counts: Numbers


def digest_replicas(records: PackedRecords) -> Iterator[ReplicaDigests]:
    """Compute the range digests (``kvstore.core.checksum``) of each volume epoch among the index's records."""
    ordinals, volume_epochs, replicas = _columns(records.values)
    if records.ordinals is not None:
        known = np.isin(ordinals, np.fromiter(records.ordinals, np.uint32, len(records.ordinals)))
        if not known.all():
            yield from digest_replicas(_taken(records, np.flatnonzero(known).tolist()))
            return
    if not len(volume_epochs):
        return
    hash_of = np.repeat(np.asarray(hash_parts(memoryview(records.keys), KEY_BYTES)), replicas)
    heads = np.frombuffer(records.keys, ">u2")[:: KEY_BYTES // 2].astype(np.uint16)
    ranges = np.repeat(heads >> (16 - _RANGE_BITS), replicas)
    numbers = volume_epochs - volume_epochs.min()
    if numbers.max() < 1 << 16:
        numbers = numbers.astype(np.uint16)  # numpy sorts these faster
    order = np.lexsort((ranges, numbers))
    hash_of = hash_of[order]
    # of each replica: volume epoch and range in one number
    place = volume_epochs[order].astype(np.uint64) << np.uint64(_RANGE_BITS) | ranges[order]
    starts = np.flatnonzero(np.concatenate(([True], place[1:] != place[:-1])))
    digests = np.bitwise_xor.reduceat(hash_of, starts)
    counts = np.diff(np.concatenate((starts, [len(place)]))).astype(np.uint64)
    owners, found = place[starts] >> np.uint64(_RANGE_BITS), place[starts] & np.uint64((1 << _RANGE_BITS) - 1)
    borders = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1], [True])))
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        yield ReplicaDigests(VolumeEpoch(int(owners[first])), found[first:last], digests[first:last], counts[first:last])


def find_other_epochs(values: Sequence[bytes], volume_epochs: Collection[VolumeEpoch]) -> list[int]:
    """Find the positions of records that name other volume epochs than these, in order."""
    _, found, replicas = _columns(values)
    other = ~np.isin(found, np.array(sorted(volume_epochs), np.uint32))
    positions: list[int] = np.unique(np.repeat(np.arange(len(values)), replicas)[other]).tolist()
    return positions


def _taken(records: PackedRecords, positions: Sequence[int]) -> PackedRecords:
    keys = [records.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in positions]
    return PackedRecords(b"".join(keys), [records.values[at] for at in positions])


def _columns(values: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The namespace number of each record, the volume epochs of all replicas, and the number of replicas of each record."""
    units = np.fromiter(map(len, values), np.int64, len(values)) // REPLICA_BYTES
    firsts = np.frombuffer(b"".join(values), "<u4")[::2]
    # a record is one unit of 8 bytes that begins with the namespace, and one per replica that begins with the volume epoch
    is_replica = np.ones(len(firsts), np.bool_)
    heads = np.cumsum(units) - units
    is_replica[heads] = False
    return firsts[heads], firsts[is_replica], units - 1
