"""Range digests of the index: equal to a simple computation, read once for all volumes, confirmed before drift is reported."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.checksum import digest_keys, key_range
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Unavailable
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import IndexStats, PackedRecords, VolumeEpoch
from kvstore.index.lmdb import LmdbIndex
from kvstore.index.record import encode
from kvstore.index.replica_digests import digest_replicas, find_other_epochs
from kvstore.metadata.indexing.anti_entropy import IndexDigests
from kvstore.metadata.indexing.index_thread import IndexThread

NAMESPACE = NamespaceId(b"n" * 16)
ROUND_S = 30.0
PATIENCE_S = 20.0
SLICES = DIGEST_RANGES // 128
keys = st.tuples(st.binary(min_size=2, max_size=2), st.binary(min_size=14, max_size=14)).map(b"".join)
epochs = st.sets(st.integers(1, 2**32 - 1), max_size=9)


@given(st.dictionaries(keys, epochs, max_size=60))
def test_range_digests_equal_a_simple_computation(held: dict[bytes, set[int]]) -> None:
    records = [(key, encode(1, 7, {VolumeEpoch(one): 3 for one in sorted(held[key])})) for key in sorted(held)]
    expected: dict[tuple[int, int], list[BlockKey]] = defaultdict(list)
    for key, owners in held.items():
        for owner in owners:
            expected[owner, key_range(BlockKey(key))].append(BlockKey(key))
    found = {
        (one.volume_epoch, where): (digest, count)
        for one in digest_replicas(PackedRecords(b"".join(sorted(held)), [value for _, value in records]))
        for where, digest, count in zip(one.ranges.tolist(), one.digests.tolist(), one.counts.tolist(), strict=True)
    }
    assert found == {place: (digest_keys(of), len(of)) for place, of in expected.items()}


@given(st.dictionaries(keys, st.tuples(st.integers(1, 3), epochs), max_size=60), st.frozensets(st.integers(1, 3)))
def test_range_digests_leave_lost_namespaces_out(held: dict[bytes, tuple[int, set[int]]], known: frozenset[int]) -> None:
    def packed(of: dict[bytes, tuple[int, set[int]]], ordinals: frozenset[int] | None) -> PackedRecords:
        values = [encode(ordinal, 7, {VolumeEpoch(one): 3 for one in sorted(owners)}) for ordinal, owners in of.values()]
        return PackedRecords(b"".join(of), values, ordinals)

    def digests(records: PackedRecords) -> list[tuple[int, list[int], list[int], list[int]]]:
        found = digest_replicas(records)
        return [(one.volume_epoch, one.ranges.tolist(), one.digests.tolist(), one.counts.tolist()) for one in found]

    left = {key: (ordinal, owners) for key, (ordinal, owners) in held.items() if ordinal in known}
    assert digests(packed(held, known)) == digests(packed(left, None))


@given(st.dictionaries(keys, epochs, max_size=60), epochs)
def test_other_epochs_equal_a_simple_search(held: dict[bytes, set[int]], known: set[int]) -> None:
    records = [(key, encode(1, 7, {VolumeEpoch(one): 3 for one in sorted(held[key])})) for key in sorted(held)]
    expected = [at for at, (key, _) in enumerate(records) if held[key] - known]
    assert find_other_epochs([value for _, value in records], {VolumeEpoch(one) for one in known}) == expected


class Gate:
    """Stops reads until each of them is let through."""

    def __init__(self) -> None:
        self._stopped, self._through = threading.Semaphore(0), threading.Semaphore(0)

    def stop(self) -> None:
        self._stopped.release()
        assert self._through.acquire(timeout=PATIENCE_S)

    async def wait_stopped(self) -> None:
        assert await asyncio.to_thread(self._stopped.acquire, timeout=PATIENCE_S)

    def let_through(self, reads: int = 1) -> None:
        self._through.release(reads)


class CountingIndex(LmdbIndex):
    """Counts passes over the index, in ranges, and ranges that are read again."""

    passes = 0
    again = 0
    widest = 0
    blocks: int | None = None
    """Size that it reports, if it is not the true one."""
    clock: ManualClock | None = None
    """Clock that a read of a range advances by 10 ms."""
    gate: Gate | None = None
    """Stops each read of a slice at its end."""

    def stats(self) -> IndexStats:
        found = super().stats()
        return found if self.blocks is None else dataclasses.replace(found, blocks=self.blocks)

    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        self.widest = max(self.widest, count)
        self.passes += count
        if self.clock is not None:
            self.clock.advance(0.01 * count)
        found = super().records_in_ranges(first, count)
        if self.gate is not None:
            self.gate.stop()
        return found

    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        self.again += 1
        self.passes -= 1
        return super().keys_in_range(volume_epoch, key_range)


@dataclass
class Bed:
    index: CountingIndex
    clock: ManualClock
    digests: IndexDigests
    held: dict[VolumeEpoch, set[BlockKey]] = field(default_factory=dict)
    """The nodes' own blocks."""

    def volume(self, name: str, blocks: int) -> VolumeEpoch:
        volume_epoch = self.index.open_volume_epoch(VolumeId(name), NodeId(name), Tier.DRAM, BootId(b"b" * 16))
        self.held[volume_epoch] = set()
        self.store(volume_epoch, np.random.default_rng(len(self.held)).bytes(16 * blocks))
        return volume_epoch

    def store(self, volume_epoch: VolumeEpoch, packed: bytes) -> None:
        mine = [BlockKey(packed[at : at + 16]) for at in range(0, len(packed), 16)]
        self.held[volume_epoch].update(mine)
        self.index.publish(volume_epoch, [BlockRun(NAMESPACE, None, 0, tuple(mine))], [])

    async def compare(self, volume_epoch: VolumeEpoch, max_age_s: float = ROUND_S) -> list[int]:
        digests, counts = [0] * DIGEST_RANGES, [0] * DIGEST_RANGES
        for key in self.held[volume_epoch]:
            digests[key_range(key)] ^= digest_keys([key])
            counts[key_range(key)] += 1
        found = []
        for first in range(0, DIGEST_RANGES, 512):
            part = slice(first, first + 512)
            found += await self.digests.differing(volume_epoch, first, digests[part], counts[part], max_age_s)
        return found


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    index, thread, clock = CountingIndex.open(tmp_path / "index", map_bytes=64 << 20), IndexThread("test"), ManualClock()
    yield Bed(index, clock, IndexDigests(index, thread, clock))
    await thread.close()
    index.close()


async def test_one_pass_serves_all_volumes_of_a_round(bed: Bed) -> None:
    volumes = [bed.volume(f"v{number}", 300) for number in range(5)]
    for _ in range(3):
        bed.index.passes = 0
        for volume in volumes:
            bed.clock.advance(1.0)
            assert await bed.compare(volume) == []
        assert (bed.index.passes, bed.index.again) == (DIGEST_RANGES, 0)
        bed.clock.advance(ROUND_S)


async def test_digests_large_index_is_read_in_small_parts(bed: Bed) -> None:
    volumes = [bed.volume(f"v{number}", 300) for number in range(2)]
    bed.index.blocks, bed.index.widest = 100_000_000, 0
    for volume in volumes:
        assert await bed.compare(volume) == []
    assert (bed.index.widest, bed.index.passes) == (2, DIGEST_RANGES)


async def test_digests_of_a_slow_index_serve_for_ten_passes(bed: Bed) -> None:
    volume = bed.volume("v", 300)
    bed.index.clock = bed.clock
    took_s = 0.01 * DIGEST_RANGES
    assert await bed.compare(volume) == []
    for wait_s, read in ((ROUND_S, 0), (8 * took_s, 0), (2 * took_s, DIGEST_RANGES)):
        bed.clock.advance(wait_s)
        bed.index.passes = 0
        assert await bed.compare(volume) == []
        assert bed.index.passes == read
    bed.index.passes = 0
    assert await bed.compare(volume, 0.0) == []
    assert bed.index.passes == DIGEST_RANGES, "the caller accepts no older digests"


async def test_ranges_read_again_in_vain_take_no_longer_than_a_pass(bed: Bed) -> None:
    volumes = [bed.volume(f"v{number}", 300) for number in range(40)]
    bed.index.clock = bed.clock
    assert await bed.compare(volumes[0]) == []
    for seed, volume in enumerate(volumes):
        bed.store(volume, np.random.default_rng(100 + seed).bytes(16 * 2_000))
        assert await bed.compare(volume) == []
    assert DIGEST_RANGES // 2 < bed.index.again <= DIGEST_RANGES + 2 * DIGEST_RANGES // 64
    lost = sorted(bed.held[volumes[0]])[:40]
    bed.index.publish(volumes[0], [], lost)
    drifted = {key_range(key) for key in lost}
    bed.clock.advance(0.1 * DIGEST_RANGES)
    assert drifted <= set(await bed.compare(volumes[0])), "the next pass finds what the last one left"


async def test_drifted_ranges_read_again_take_no_longer_than_a_pass(bed: Bed) -> None:
    volume = bed.volume("v", 300)
    bed.index.clock = bed.clock
    assert await bed.compare(volume) == []
    rng = np.random.default_rng(5)
    bed.held[volume].update(BlockKey(rng.bytes(16)) for _ in range(4_000))  # not published yet
    for _ in range(20):
        await bed.compare(volume)
    assert DIGEST_RANGES // 2 < bed.index.again <= DIGEST_RANGES + 2 * DIGEST_RANGES // 64


async def test_slice_that_another_comparison_reads_is_as_good(bed: Bed) -> None:
    volumes = [bed.volume(f"v{number}", 300) for number in range(2)]
    bed.index.clock = bed.clock
    lost = sorted(bed.held[volumes[1]])[:40]
    bed.index.publish(volumes[1], [], lost)
    found = await asyncio.gather(*(bed.compare(volume, 0.0) for volume in volumes))
    assert found == [[], sorted({key_range(key) for key in lost})]
    assert bed.index.again == 0, "no range is read twice"


async def test_digests_cancelled_calls_finish_a_pass(bed: Bed) -> None:
    volume = bed.volume("v", 300)
    bed.index.passes, bed.index.gate = 0, Gate()
    for _ in range(SLICES):
        call = asyncio.create_task(bed.compare(volume))
        await bed.index.gate.wait_stopped()
        call.cancel()
        await asyncio.wait([call])
        bed.index.gate.let_through()
    assert await bed.compare(volume) == []
    assert bed.index.passes == DIGEST_RANGES, "each slice was read once"


async def test_digests_read_begun_before_the_call_is_repeated(bed: Bed) -> None:
    volume = bed.volume("v", 300)
    bed.index.gate = Gate()
    earlier = asyncio.create_task(bed.compare(volume, 0.0))
    await bed.index.gate.wait_stopped()
    lost = min(bed.held[volume])
    bed.index.publish(volume, [], [lost])
    later = asyncio.create_task(bed.compare(volume, 0.0))
    await asyncio.sleep(0)  # it waits for the slice that is being read
    bed.index.gate.let_through(2 * SLICES)
    assert await later == [key_range(lost)]
    await earlier


async def test_digests_failed_read_begins_again_at_next_call(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = bed.volume("v", 300)
    with monkeypatch.context() as broken:
        broken.setattr(CountingIndex, "records_in_ranges", Mock(side_effect=Unavailable("index away")))
        both = await asyncio.gather(bed.compare(volume), bed.compare(volume), return_exceptions=True)
    assert [type(one) for one in both] == [Unavailable, Unavailable]
    assert await bed.compare(volume) == []


async def test_stores_after_the_pass_are_no_drift(bed: Bed) -> None:
    volume, other = bed.volume("v", 300), bed.volume("w", 300)
    assert await bed.compare(volume) == []
    bed.store(volume, np.random.default_rng(9).bytes(16 * 200))
    bed.store(other, np.random.default_rng(10).bytes(16 * 2_000))
    assert await bed.compare(volume) == []
    assert 0 < bed.index.again <= 200
    bed.index.again = 0
    assert await bed.compare(other) == []
    assert bed.index.again <= DIGEST_RANGES // 64 * 4, "a comparison reads few ranges again"


async def test_drift_is_found_within_a_round(bed: Bed) -> None:
    volume = bed.volume("v", 300)
    assert await bed.compare(volume) == []
    lost = sorted(bed.held[volume])[:40]
    bed.index.publish(volume, [], lost)
    stray = BlockKey(b"s" * 16)
    bed.index.publish(volume, [BlockRun(NAMESPACE, None, 0, (stray,))], [])
    drifted = sorted({key_range(key) for key in [*lost, stray]})
    assert await bed.compare(volume) == [], "the digests of the last pass"
    assert await bed.compare(volume, 0.0) == drifted
    bed.clock.advance(ROUND_S)
    assert await bed.compare(volume) == drifted
    bed.clock.advance(1.0)
    assert await bed.compare(volume) == drifted, "read again, and confirmed"


async def test_unknown_and_closed_volumes_hold_nothing(bed: Bed) -> None:
    volume = bed.volume("v", 50)
    assert await bed.compare(volume) == []
    bed.index.close_volume_epoch(volume)
    while not bed.index.sweep(100):
        pass
    bed.held[volume] = set()
    bed.clock.advance(ROUND_S)
    assert await bed.compare(volume) == []
    bed.held[VolumeEpoch(4_000_000)] = set()
    assert await bed.compare(VolumeEpoch(4_000_000)) == []
