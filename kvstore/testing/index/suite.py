"""Conformance suite of ``PrefixIndex``: a backend exists only when it passes this, and the machines of ``state_machine``.

Subclass it in a test module of your own and give it ``open_index``; say by the class attributes what the backend can do::

    class TestMyIndex(IndexSuite):
        process_opener = "my_package.my_index:MyIndex.open"

        def open_index(self, place):
            return MyIndex.open(place)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument, NotFound, Unavailable
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import (
    Beat,
    IndexedBlock,
    PrefixHit,
    PrefixIndex,
    RemovedKeys,
    ReplicaRun,
    VolumeEpoch,
    VolumeEpochInfo,
)
from kvstore.testing.index.leases_suite import LeasesSuite
from kvstore.testing.index.model import Chain, IndexModel
from kvstore.testing.index.process import IndexProcess
from kvstore.testing.index.small_records_suite import BOOT, CHAIN, NAMESPACE, SmallRecordsSuite, ask, begin


class RecordingListener:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def opened(self, info: VolumeEpochInfo) -> None:
        """Kept."""
        self.heard.append(info)

    def closed(self, volume_epoch: VolumeEpoch) -> None:
        """Kept."""
        self.heard.append(volume_epoch)

    def published(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> None:
        """Kept."""
        self.heard.append((volume_epoch, list(stored), [(one.volume_epoch, one.namespace, list(one.keys)) for one in removed]))


class IndexSuite(SmallRecordsSuite, LeasesSuite):
    """Behaviour of every index. One empty folder per test."""

    persistent: ClassVar[bool] = True
    """Whether closing and opening again at one place brings the content back."""
    process_opener: ClassVar[str | None] = None
    """``"module:callable"`` that opens the index in another process; None: the backend is for one process alone."""
    whole_batches: ClassVar[bool] = True
    """Whether a batch is atomic as a whole; False: only the record of each key is."""

    def open_index(self, place: Path) -> PrefixIndex:
        """Open or create the index at a place."""
        raise NotImplementedError

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """Folder of this test's index."""
        return tmp_path / "index"

    @pytest.fixture
    def index(self, place: Path) -> Iterator[PrefixIndex]:
        """An open, empty index."""
        index = self.open_index(place)
        yield index
        index.close()

    @pytest.fixture
    def other_process(self, index: PrefixIndex, place: Path) -> Iterator[IndexProcess]:
        """The same index, open in another process."""
        del index  # opened first, so that the place is made
        if self.process_opener is None:
            pytest.skip("the backend is for one process alone")
        process = IndexProcess(self.process_opener, place)
        yield process
        process.kill()

    # ---- volume epochs ----
    def test_volume_epoch_same_boot_is_found_again(self, index: PrefixIndex) -> None:
        boot = BootId(b"b" * 16)
        volume_epoch = index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.NVME, boot)
        assert index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.NVME, boot) == volume_epoch
        other = index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.NVME, BootId(b"c" * 16))
        third = index.open_volume_epoch(VolumeId("w"), NodeId("n"), Tier.DRAM, boot)
        assert len({volume_epoch, other, third}) == 3
        assert VolumeEpochInfo(volume_epoch, VolumeId("v"), NodeId("n"), Tier.NVME, boot) in index.volume_epochs()
        assert {info.volume_epoch for info in index.volume_epochs()} == {volume_epoch, other, third}

    def test_volume_epoch_numbers_are_never_reused(self, index: PrefixIndex) -> None:
        first = begin(index)
        index.close_volume_epoch(first)
        index.close_volume_epoch(first)
        index.close_volume_epoch(VolumeEpoch(4_000_000))
        while not index.sweep(10):
            pass
        second = begin(index)
        assert second != first
        assert [info.volume_epoch for info in index.volume_epochs()] == [second]

    def test_volume_epoch_closed_is_hidden_at_once(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        index.publish(other, [CHAIN.run(0, 10)], [])
        index.close_volume_epoch(volume_epoch)
        # a caller who has not noticed yet still names it as visible
        assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(10, (ReplicaRun(0, 10, other),))
        assert index.keys_in_range(volume_epoch, int.from_bytes(CHAIN.keys[0][:2], "big") >> 4) == []
        with pytest.raises(NotFound):
            index.publish(volume_epoch, [CHAIN.run(0, 1)], [])

    # ---- lookups ----
    def test_lookup_empty_index_is_a_miss(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        assert ask(index, CHAIN, {volume_epoch}) == PrefixHit(0, ())
        assert index.lookup(NAMESPACE, b"", {volume_epoch}) == PrefixHit(0, ())

    @pytest.mark.parametrize("held", [1, 2, 3, 50, 99, 100])
    @pytest.mark.parametrize("asked", [1, 2, 64, 100])
    def test_lookup_hits_are_exact(self, index: PrefixIndex, held: int, asked: int) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, held)], [])
        hit = min(held, asked)
        assert ask(index, Chain(NAMESPACE, CHAIN.keys[:asked]), {volume_epoch}) == PrefixHit(
            hit, (ReplicaRun(0, hit, volume_epoch),)
        )

    def test_lookup_invisible_volume_epoch_counts_as_absent(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        index.publish(other, [CHAIN.run(0, 30)], [])
        assert ask(index, CHAIN, set()) == PrefixHit(0, ())
        assert ask(index, CHAIN, {other}) == PrefixHit(30, (ReplicaRun(0, 30, other),))

    def test_lookup_other_namespace_is_a_miss(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        stranger = NamespaceId(b"o" * 16)
        assert index.lookup(stranger, CHAIN.packed, {volume_epoch}) == PrefixHit(0, ())
        index.put_namespace(stranger, b"spec")
        assert index.lookup(stranger, CHAIN.packed, {volume_epoch}) == PrefixHit(0, ())

    def test_lookup_key_at_other_depth_is_a_miss(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        assert ask(index, Chain(NAMESPACE, CHAIN.keys[1:]), {volume_epoch}) == PrefixHit(0, ())

    def test_publish_key_at_second_depth_keeps_the_first(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        stranger = NamespaceId(b"o" * 16)
        index.publish(other, [BlockRun(stranger, None, 0, CHAIN.keys)], [])
        index.publish(other, [BlockRun(NAMESPACE, CHAIN.keys[0], 1, CHAIN.keys[:5])], [])
        index.publish(other, [BlockRun(NAMESPACE, BlockKey(b"unknown parent.."), 7, CHAIN.keys[50:])], [])
        index.publish(other, [BlockRun(NAMESPACE, None, 0, CHAIN.keys[50:])], [])
        assert index.lookup(stranger, CHAIN.packed, {volume_epoch, other}) == PrefixHit(0, ())
        assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))

    def test_publish_run_after_parent_repairs_a_wrong_depth(self, index: PrefixIndex) -> None:
        """Another node published the rest as a separate chain, and continues to do so."""
        volume_epoch, other = begin(index), begin(index, "w")
        slip = BlockRun(NAMESPACE, None, 0, CHAIN.keys[50:])
        index.publish(other, [slip], [])
        index.publish(volume_epoch, [CHAIN.run(0, 50)], [])
        assert ask(index, CHAIN, {volume_epoch, other}).blocks == 50
        index.publish(volume_epoch, [CHAIN.run(50, 100)], [])
        for _ in range(2):
            assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))
            index.publish(other, [slip], [])
        index.publish(other, [], slip.keys)
        assert ask(index, CHAIN, {volume_epoch, other}).blocks == 100

    def test_lookup_volume_with_first_blocks_only_is_found(self, index: PrefixIndex) -> None:
        nvme, dram = begin(index), begin(index, "dram")
        index.publish(nvme, [CHAIN.run(0, 100)], [])
        index.publish(dram, [CHAIN.run(0, 40)], [])
        assert ask(index, CHAIN, {nvme, dram}) == PrefixHit(100, (ReplicaRun(0, 100, nvme), ReplicaRun(0, 40, dram)))

    def test_lookup_parts_in_different_volumes_make_one_hit(self, index: PrefixIndex) -> None:
        one, two, three = begin(index), begin(index, "two"), begin(index, "three")
        index.publish(one, [CHAIN.run(0, 33)], [])
        index.publish(two, [CHAIN.run(33, 70)], [])
        index.publish(three, [CHAIN.run(60, 100)], [])
        runs = (ReplicaRun(0, 33, one), ReplicaRun(33, 37, two), ReplicaRun(60, 40, three))
        assert ask(index, CHAIN, {one, two, three}) == PrefixHit(100, runs)
        assert ask(index, CHAIN, {one, three}) == PrefixHit(33, runs[:1])

    def test_lookup_run_published_in_parts_is_one_run(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        for start in range(0, 100, 7):
            index.publish(volume_epoch, [CHAIN.run(start, min(start + 7, 100))], [])
        assert ask(index, CHAIN, {volume_epoch}) == PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))

    def test_lookup_alternating_volumes_is_one_hit(self, index: PrefixIndex) -> None:
        volume_epochs = [begin(index), begin(index, "w")]
        for at in range(100):
            index.publish(volume_epochs[at % 2], [CHAIN.run(at, at + 1)], [])
        hit = ask(index, CHAIN, set(volume_epochs))
        assert hit == PrefixHit(100, tuple(ReplicaRun(at, 1, volume_epochs[at % 2]) for at in range(100)))

    # ---- publishing ----
    def test_holders_are_listed_per_key(self, index: PrefixIndex) -> None:
        first, second = begin(index, "a"), begin(index, "b")
        index.publish(first, [CHAIN.run(0, 3)], [])
        index.publish(second, [CHAIN.run(2, 5)], [])
        keys = [CHAIN.keys[at] for at in (4, 2, 0, 9)]
        assert [set(volume_epochs) for volume_epochs in index.holders(NAMESPACE, keys)] == [
            {second},
            {first, second},
            {first},
            set(),
        ]
        assert index.holders(NamespaceId(b"o" * 16), keys) == [()] * 4, "keys belong to a namespace"
        index.close_volume_epoch(first)
        assert index.holders(NAMESPACE, keys) == [(second,), (second,), (), ()]
        with pytest.raises(InvalidArgument):
            index.holders(NAMESPACE, [BlockKey(b"short")])

    def test_batch_removed_is_applied_before_stored(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, 10)], list(CHAIN.keys[:10]))
        assert ask(index, CHAIN, {volume_epoch}).blocks == 10
        index.publish(volume_epoch, [CHAIN.run(8, 9), CHAIN.run(9, 12)], list(CHAIN.keys[8:10]))
        assert ask(index, CHAIN, {volume_epoch}) == PrefixHit(12, (ReplicaRun(0, 12, volume_epoch),))

    def test_batch_repeated_changes_nothing(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(other, [CHAIN.run(0, 50)], [])
        # out of order on purpose: a child before its parent
        batch = ([CHAIN.run(20, 40), CHAIN.run(0, 20)], list(CHAIN.keys[30:50]))
        for _ in range(3):
            index.publish(volume_epoch, *batch)
            assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(
                50, (ReplicaRun(0, 50, other), ReplicaRun(0, 40, volume_epoch))
            )
            assert index.stats().blocks == 50

    def test_removed_leaf_blocks_are_misses(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        index.publish(other, [CHAIN.run(0, 60)], [])
        index.publish(volume_epoch, [], list(CHAIN.keys[:49:-1]))
        index.publish(volume_epoch, [], [BlockKey(b"?" * 16)])
        assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(
            60, (ReplicaRun(0, 60, other), ReplicaRun(0, 50, volume_epoch))
        )
        assert index.stats().blocks == 60

    def test_batch_rejected_changes_nothing(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, 10)], [])
        with pytest.raises(InvalidArgument):
            index.publish(
                volume_epoch, [CHAIN.run(10, 20), BlockRun(NAMESPACE, None, 0, (BlockKey(b"short"),))], list(CHAIN.keys[9:10])
            )
        assert ask(index, CHAIN, {volume_epoch}).blocks == 10

    def test_lookup_gap_shortens_the_hit(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 30), CHAIN.run(31, 100)], [])
        model = IndexModel({volume_epoch: {}, other: {}})
        model.publish(volume_epoch, [CHAIN.run(0, 30), CHAIN.run(31, 100)], [])
        model.check(CHAIN, {volume_epoch, other}, ask(index, CHAIN, {volume_epoch, other}))
        index.publish(other, [CHAIN.run(30, 31)], [])
        runs = (ReplicaRun(0, 30, volume_epoch), ReplicaRun(30, 1, other), ReplicaRun(31, 69, volume_epoch))
        assert ask(index, CHAIN, {volume_epoch, other}) == PrefixHit(100, runs)
        index.publish(volume_epoch, [CHAIN.run(30, 31)], [])
        assert ask(index, CHAIN, {volume_epoch}) == PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))

    @pytest.mark.parametrize(
        "run",
        [
            BlockRun(NamespaceId(b"short"), None, 0, CHAIN.keys[:1]),
            BlockRun(NAMESPACE, None, 1, CHAIN.keys[:1]),
            BlockRun(NAMESPACE, CHAIN.keys[0], 0, CHAIN.keys[1:2]),
            BlockRun(NAMESPACE, BlockKey(b"short"), 1, CHAIN.keys[1:2]),
            BlockRun(NAMESPACE, CHAIN.keys[0], -1, CHAIN.keys[1:2]),
            BlockRun(NAMESPACE, CHAIN.keys[0], limits.MAX_DEPTH, CHAIN.keys[1:2]),
            BlockRun(NAMESPACE, None, 0, (BlockKey(b""),)),
            BlockRun(NAMESPACE, None, 0, CHAIN.keys[:1] * (limits.MAX_KEYS_PER_CALL + 1)),
        ],
        ids=range(8),
    )
    def test_batch_malformed_run_is_rejected(self, index: PrefixIndex, run: BlockRun) -> None:
        volume_epoch = begin(index)
        with pytest.raises(InvalidArgument):
            index.publish(volume_epoch, [run], [])
        assert index.stats().blocks == 0

    def test_lookup_malformed_call_is_rejected(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        with pytest.raises(InvalidArgument):
            index.lookup(NAMESPACE, b"x" * 17, {volume_epoch})
        with pytest.raises(InvalidArgument):
            index.lookup(NAMESPACE, b"x" * 16 * (limits.MAX_KEYS_PER_CALL + 1), {volume_epoch})
        for key_range in (-1, limits.DIGEST_RANGES):
            with pytest.raises(InvalidArgument):
                index.keys_in_range(volume_epoch, key_range)
        for first, count in ((-1, 1), (0, 0), (limits.DIGEST_RANGES, 1), (limits.DIGEST_RANGES - 1, 2)):
            with pytest.raises(InvalidArgument):
                index.records_in_ranges(first, count)
            with pytest.raises(InvalidArgument):
                index.packed_records(first, count)
        with pytest.raises(InvalidArgument):
            index.sweep(0)
        with pytest.raises(InvalidArgument):
            index.put_namespace(NamespaceId(b"short"), b"")
        with pytest.raises(InvalidArgument):
            index.open_volume_epoch(VolumeId(""), NodeId("n"), Tier.DRAM, BootId(b"b" * 16))
        with pytest.raises(InvalidArgument):
            index.open_volume_epoch(VolumeId("v" * (limits.MAX_NAME_BYTES + 1)), NodeId("n"), Tier.DRAM, BootId(b"b" * 16))
        with pytest.raises(InvalidArgument):
            index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.DRAM, BootId(b"short"))

    def test_lookup_longest_call_is_answered(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        size = limits.MAX_KEYS_PER_CALL
        packed = os.urandom(16 * size)
        keys = tuple(BlockKey(packed[at : at + 16]) for at in range(0, len(packed), 16))
        index.publish(volume_epoch, [BlockRun(NAMESPACE, None, 0, keys)], [])
        assert index.lookup(NAMESPACE, packed, {volume_epoch}) == PrefixHit(size, (ReplicaRun(0, size, volume_epoch),))

    @pytest.mark.parametrize("ends", [(40, 60), (60,), (1, 59, 61, 99), (0, 100, 101, 2**32 - 1), range(20, 28), range(90)])
    def test_lookup_guessed_ends_never_change_the_answer(self, index: PrefixIndex, ends: Sequence[int]) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 60)], [])
        index.publish(other, [CHAIN.run(0, 40)], [])
        for _ in range(2):
            hit = index.lookup(NAMESPACE, CHAIN.packed, {volume_epoch, other}, ends)
            assert hit.blocks == 60
            assert set(hit.runs) == {ReplicaRun(0, 60, volume_epoch), ReplicaRun(0, 40, other)}
        assert index.lookup(NAMESPACE, b"", {volume_epoch}, ends) == PrefixHit(0, ())

    # ---- who listens, and the whole ----
    def test_listener_gets_effective_changes(self, index: PrefixIndex) -> None:
        told = RecordingListener()
        index.listen(told)
        volume_epoch, other = begin(index), begin(index, "w")
        infos = {info.volume_epoch: info for info in index.volume_epochs()}
        assert told.heard == [infos[volume_epoch], infos[other]]
        told.heard.clear()
        stray = CHAIN.keys[70]
        index.publish(volume_epoch, [CHAIN.run(0, 60), BlockRun(NAMESPACE, None, 0, (stray,))], [CHAIN.keys[99]])
        assert told.heard == [(volume_epoch, [CHAIN.run(0, 60), BlockRun(NAMESPACE, None, 0, (stray,))], [])]
        told.heard.clear()
        index.publish(other, [BlockRun(NAMESPACE, CHAIN.keys[68], 69, CHAIN.keys[69:72])], [])  # its parent is not here
        assert told.heard == [
            (
                other,
                [
                    BlockRun(NAMESPACE, CHAIN.keys[68], 69, CHAIN.keys[69:70]),
                    BlockRun(NAMESPACE, stray, 71, CHAIN.keys[71:72]),
                ],
                [],
            )
        ]
        told.heard.clear()
        index.publish(other, [CHAIN.run(50, 71)], CHAIN.keys[69:70])  # the conflicting run is removed from its holder
        assert told.heard == [
            (other, [CHAIN.run(50, 71)], [(other, NAMESPACE, [CHAIN.keys[69]]), (volume_epoch, NAMESPACE, [stray])])
        ]
        told.heard.clear()
        index.publish(other, [], [CHAIN.keys[0]])  # it does not hold it
        assert told.heard == []
        index.close_volume_epoch(volume_epoch)
        assert told.heard == [volume_epoch]

    def test_inventory_in_parts_is_complete(self, index: PrefixIndex) -> None:
        assert index.blocks_from(None, 10) == ([], None)
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 5)], [])
        index.publish(other, [CHAIN.run(0, 3)], [])
        by_key = sorted(range(5), key=lambda at: CHAIN.keys[at])
        expected = [
            IndexedBlock(CHAIN.keys[at], NAMESPACE, at, (volume_epoch, other) if at < 3 else (volume_epoch,)) for at in by_key
        ]
        first, following = index.blocks_from(None, 2)
        assert first == expected[:2]
        assert following == expected[2].key
        rest, following = index.blocks_from(following, 10)
        assert rest == expected[2:]
        assert following is None
        index.close_volume_epoch(volume_epoch)
        left, _ = index.blocks_from(None, 10)
        assert [(block.key, block.volume_epochs) for block in left] == [(CHAIN.keys[at], (other,)) for at in by_key if at < 3]
        with pytest.raises(InvalidArgument):
            index.blocks_from(None, 0)

    # ---- anti-entropy ----
    def test_inventory_by_range_is_exact(self, index: PrefixIndex) -> None:
        volume_epoch, other = begin(index), begin(index, "w")
        # crowded ranges at both ends of key space, and the rest of the chain anywhere
        ends = [
            BlockKey(first + os.urandom(14)) for first in (b"\x00\x0f", b"\x00\x10", b"\xff\xef", b"\xff\xf0") for _ in range(700)
        ]
        keys = (*CHAIN.keys, *ends)
        index.publish(volume_epoch, [BlockRun(NAMESPACE, None, 0, keys)], [])
        index.publish(other, [CHAIN.run(0, 100)], [])
        for key_range in {int.from_bytes(key[:2], "big") >> 4 for key in keys}:
            expected = {key for key in keys if int.from_bytes(key[:2], "big") >> 4 == key_range}
            assert set(index.keys_in_range(volume_epoch, key_range)) == expected
            assert set(index.keys_in_range(other, key_range)) == expected & set(CHAIN.keys)
        assert index.keys_in_range(VolumeEpoch(4_000_000), 0) == []
        records = index.records_in_ranges(0, limits.DIGEST_RANGES)
        assert [key for key, _ in records] == sorted(keys)
        assert index.packed_records(0, limits.DIGEST_RANGES).pairs() == records

    def test_sweep_drops_records_of_dead_volume_epochs(self, index: PrefixIndex) -> None:
        assert index.sweep(1)
        volume_epoch, other = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        index.publish(other, [CHAIN.run(0, 40)], [])
        index.close_volume_epoch(volume_epoch)
        assert index.stats().dead_volume_epochs == 1
        calls = 1
        while not index.sweep(9):
            calls += 1
        assert calls >= 100 // 9, "a sweep is bounded by what it was asked for"
        assert index.stats().blocks == 40
        assert index.stats().dead_volume_epochs == 0
        assert ask(index, CHAIN, {other}).blocks == 40

    def test_sweep_epoch_closed_during_sweep_is_swept_too(self, index: PrefixIndex) -> None:
        first, second = begin(index), begin(index, "w")
        index.publish(first, [CHAIN.run(0, 100)], [])
        index.publish(second, [CHAIN.run(0, 100)], [])
        index.close_volume_epoch(first)
        assert not index.sweep(50)
        index.close_volume_epoch(second)
        while not index.sweep(50):
            pass
        assert index.stats().blocks == 0

    # ---- looking ----
    def test_describe_key_names_its_holders(self, index: PrefixIndex) -> None:
        """Position and holders with their run starts; closed epochs are shown until they are swept."""
        first, second = self.volume_epochs_for_describe(index)
        index.publish(first, [CHAIN.run(0, 4)], [])
        index.publish(second, [CHAIN.run(2, 4)], [])
        keys = list(CHAIN.keys[:5])
        found = index.describe(keys)
        assert found[4] is None
        assert [entry and (entry.namespace, entry.depth, dict(entry.replicas)) for entry in found[:4]] == [
            (NAMESPACE, 0, {first: 0}),
            (NAMESPACE, 1, {first: 0}),
            (NAMESPACE, 2, {first: 0, second: 2}),
            (NAMESPACE, 3, {first: 0, second: 2}),
        ]
        index.close_volume_epoch(first)
        (entry,) = index.describe(keys[:1])
        assert entry is not None
        assert first not in [volume_epoch.volume_epoch for volume_epoch in index.volume_epochs()]
        assert dict(entry.replicas) == {first: 0}
        while not index.sweep(1_000):
            pass
        assert index.describe(keys[:1]) == [None]
        assert index.describe([]) == []

    @staticmethod
    def volume_epochs_for_describe(index: PrefixIndex) -> tuple[VolumeEpoch, VolumeEpoch]:
        """Two volume epochs of two volumes."""
        one = index.open_volume_epoch(VolumeId("a/dram"), NodeId("a"), Tier.DRAM, BootId(b"a" * 16))
        return one, index.open_volume_epoch(VolumeId("b/dram"), NodeId("b"), Tier.DRAM, BootId(b"b" * 16))

    # ---- the whole ----
    def test_sizes_match_the_content(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        assert index.stats().blocks == 0
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        assert index.stats().blocks == 100
        assert index.stats().bytes > 0
        assert len(index.epoch) == 16

    def test_index_closed_rejects_calls(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.close()
        index.close()
        with pytest.raises(Unavailable):
            ask(index, CHAIN, {volume_epoch})
        with pytest.raises(Unavailable):
            index.publish(volume_epoch, [], [])

    def test_index_many_threads_stays_consistent(self, index: PrefixIndex) -> None:
        """Readers and writers at once: every answer is one that was true at some moment."""
        chains = [Chain.of(NAMESPACE, [thread, *range(99)]) for thread in range(4)]
        volume_epochs = [begin(index, f"v{thread}") for thread in range(4)]
        failures: list[BaseException] = []

        def write(thread: int) -> None:
            for start in range(0, 100, 10):
                index.publish(volume_epochs[thread], [chains[thread].run(start, start + 10)], [])

        def read(thread: int) -> None:
            try:
                last = 0
                while last < 100:
                    hit = ask(index, chains[thread], set(volume_epochs))
                    assert hit.blocks >= last
                    assert hit.blocks % 10 == 0 or not self.whole_batches
                    last = hit.blocks
            except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=target, args=(thread,)) for target in (read, write) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if failures:
            raise failures[0]

    def test_index_reopened_has_everything(self, index: PrefixIndex, place: Path) -> None:
        if not self.persistent:
            pytest.skip("the backend keeps nothing")
        volume_epoch, dead = begin(index), begin(index, "w")
        index.publish(volume_epoch, [CHAIN.run(0, 50)], [])
        index.publish(dead, [CHAIN.run(0, 100)], [])
        index.close_volume_epoch(dead)
        index.sweep(30)
        index.put_namespace(NAMESPACE, b"spec")
        index.put_note("a", b"1")
        index.put_beats({NodeId("n"): Beat(BOOT, 7, 5)})

        def content(one: PrefixIndex) -> tuple[object, ...]:
            notes, beats = one.notes(""), one.beats()
            return one.epoch, one.volume_epochs(), one.namespaces(), notes, beats, one.revision, one.stats().blocks

        before = content(index)
        index.close()
        again = self.open_index(place)
        try:
            assert content(again) == before
            assert ask(again, CHAIN, {volume_epoch, dead}).blocks == 50
            while not again.sweep(30):
                pass
            assert again.stats().blocks == 50
            assert begin(again, "x") not in {volume_epoch, dead}
        finally:
            again.close()

    # ---- several processes ----
    def test_writes_of_other_process_are_visible_at_once(self, index: PrefixIndex, other_process: IndexProcess) -> None:
        assert other_process.call("epoch") == index.epoch
        revision = index.revision
        volume_epoch = other_process.call("open_volume_epoch", "v", "n", Tier.DRAM, b"b" * 16)
        assert index.revision > revision
        assert index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.DRAM, BootId(b"b" * 16)) == volume_epoch
        other_process.call("publish", volume_epoch, [CHAIN.run(0, 60)], [])
        assert ask(index, CHAIN, {volume_epoch}).blocks == 60
        index.publish(volume_epoch, [CHAIN.run(60, 100)], [])
        expected = PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))
        assert other_process.call("lookup", NAMESPACE, CHAIN.packed, {volume_epoch}) == expected
        other_process.call("put_notes", {"a": b"1"})
        other_process.call("put_beats", {"n": Beat(BOOT, 7, 5)})
        assert (index.notes("a"), index.beats()) == ({"a": b"1"}, {"n": Beat(BOOT, 7, 5)})
        index.put_beats({NodeId("n"): Beat(BOOT, 8, 5)})
        assert other_process.call("beats") == {"n": Beat(BOOT, 8, 5)}
        other_process.call("close_volume_epoch", volume_epoch)
        assert ask(index, CHAIN, {volume_epoch}).blocks == 0
        with pytest.raises(NotFound):
            index.publish(volume_epoch, [CHAIN.run(0, 1)], [])
        other_process.close()
        assert begin(index, "v") != volume_epoch

    def test_writes_of_two_processes_are_all_applied(self, index: PrefixIndex, other_process: IndexProcess) -> None:
        chains = [Chain.of(NAMESPACE, [process, *range(999)]) for process in range(2)]
        ours, theirs = begin(index), begin(index, "w")
        for start in range(0, 1_000, 50):
            other_process.send("publish", theirs, [chains[1].run(start, start + 50)], [])
            index.publish(ours, [chains[0].run(start, start + 50)], [])
        for _ in range(0, 1_000, 50):
            other_process.receive()
        for chain, volume_epoch in zip(chains, (ours, theirs), strict=True):
            assert ask(index, chain, {ours, theirs}) == PrefixHit(1_000, (ReplicaRun(0, 1_000, volume_epoch),))

    def test_process_killed_leaves_whole_batches(self, index: PrefixIndex, other_process: IndexProcess) -> None:
        volume_epoch = begin(index)
        sent = 200
        for at in range(sent):
            chain = Chain.of(NAMESPACE, [at, *range(99)])
            other_process.send("publish", volume_epoch, [chain.run(0, 100)], [])
            if at == 20:
                other_process.receive()
        other_process.kill()
        hits = [ask(index, Chain.of(NAMESPACE, [at, *range(99)]), {volume_epoch}).blocks for at in range(sent)]
        assert hits[0] == 100
        assert set(hits) <= {0, 100} or not self.whole_batches
        assert hits == sorted(hits, reverse=True), "batches are applied in order"
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])  # the writer's lock did not die with its holder
        assert ask(index, CHAIN, {volume_epoch}).blocks == 100
