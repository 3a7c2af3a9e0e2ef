"""Tests of the announcements of stored blocks, without vLLM."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient import CacheSpec
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.announcements import engine_events
from kvclient.engines.vllm.announcements.announcer import Announcement, Announcer, ordered_parts
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.engines.vllm.announcements.recent_prefixes import MOST_PER_CALL, RecentPrefixes
from kvclient.events import BlockMirror
from kvclient.events.block_groups import BlockGroup, GroupBlockId, xor
from kvclient.events.labels import BlockLabel
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import Tier
from kvstore.core.types import BlockKey

SPECS = [CacheSpec(model="m", block_tokens=4, layers=1, layer_block_bytes=64, shard_rank=r, shard_count=2) for r in range(2)]
DRAM, NVME = 1 << 2, 1 << 3
BLOCKS = 6


def run_of(first: int, count: int) -> EngineRun:
    ids = tuple(GroupBlockId(bytes([7, at]) * 8) for at in range(first, first + count))
    return EngineRun(first, ids, tuple(bytes([at]) * 32 for at in range(first, first + count)))


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_parts_of_a_run_have_the_labels_of_the_run(blocks: int, hashes: int, extras: bool, data: st.DataObject) -> None:
    run = EngineRun(
        3,
        tuple(GroupBlockId(bytes([at]) * 16) for at in range(blocks)),
        tuple(bytes([at]) * 32 for at in range(blocks * hashes)),
        b"before",
        array("I", range(blocks * hashes * 4)),
        extra_keys=tuple(range(blocks * hashes)) if extras else None,
        keys=tuple(bytes([at]) for at in range(blocks)),
    )
    start = data.draw(st.integers(0, blocks - 1))
    stop = data.draw(st.integers(start + 1, blocks))
    part = run.part(start, stop)
    assert list(part.labels()) == list(run.labels())[start:stop]
    assert part.keys == run.keys[start:stop]


def test_memory_of_a_run_grows_with_its_tokens_and_hashes() -> None:
    small, large = (
        EngineRun(0, (GroupBlockId(bytes(16)),) * n, (bytes(32),) * n, tokens=array("I", range(16 * n))) for n in (1, 1_000)
    )
    assert large.memory_bytes == 1_000 * small.memory_bytes
    assert small.memory_bytes >= 16 * 4 + 32 + 16


class Feed:
    """An announcer, a mirror that keeps only its blocks, and the state of a subscriber."""

    def __init__(self, most: int = 1_000) -> None:
        self.now_s = 0.0
        self.retracted = 0
        self.unconfirmed = 0
        self.announcer = Announcer(
            BlockGroup([spec.namespace for spec in SPECS]), most, self._count, self._count_unconfirmed, lambda: self.now_s
        )
        self.mirror = BlockMirror(self.announcer.wanted)
        self.believed: dict[bytes, int] = {}
        self.held: set[tuple[int, int, bytes]] = set()
        self.snapshot()

    def _count(self, count: int) -> None:
        self.retracted += count

    def _count_unconfirmed(self, count: int) -> None:
        self.unconfirmed += count

    def tell(self, message: pb.WatchBlocksResponse) -> None:
        self.announcer.on_change(self.mirror, self.mirror.apply(message))

    def events(self, *events: pb.BlockEvent) -> None:
        self.tell(pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=1, events=events)))

    def snapshot(self) -> None:
        self.tell(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
        for number, tier in ((1, Tier.TIER_DRAM), (2, Tier.TIER_NVME)):
            opened = pb.VolumeOpened(
                volume=number, volume_id=f"v{number}", node_id="n", tier=tier, boot_id=b"b" * 16, served=True
            )
            self.events(pb.BlockEvent(opened=opened))
        for one in sorted(self.held):
            self._held(*one)
        self.tell(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))

    def _held(self, volume: int, shard: int, block: bytes) -> None:
        namespace = SPECS[shard].namespace
        held = pb.BlocksHeld(volume=volume, namespace_id=namespace, keys=xor(block, namespace), depths=[0])
        self.events(pb.BlockEvent(held=held))

    def hold(self, volume: int, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            for shard in range(2):
                self.held.add((volume, shard, block))
                self._held(volume, shard, block)

    def drop(self, volume: int, blocks: Iterable[bytes], shard: int = 0) -> None:
        namespace = SPECS[shard].namespace
        for block in blocks:
            self.held.discard((volume, shard, block))
            gone = pb.BlocksRemoved(volume=volume, namespace_id=namespace, keys=xor(block, namespace))
            self.events(pb.BlockEvent(removed=gone))

    def take(self, most: int = 1_000) -> list[Announcement]:
        taken = self.announcer.take(most)
        for one in taken:
            block = one.run.ids[one.at]
            old = self.believed.get(block, 0)
            assert not one.stored & old
            assert one.removed & old == one.removed
            self.believed[block] = (old | one.stored) & ~one.removed
        return taken

    def told(self) -> dict[bytes, int]:
        self.take()
        return {block: bits for block, bits in self.believed.items() if bits}


def test_block_is_announced_at_once_and_moves_between_tiers() -> None:
    feed, run = Feed(), run_of(0, 3)
    feed.announcer.expect(run)
    assert feed.told() == {}
    feed.announcer.stored(run)
    assert feed.told() == dict.fromkeys(run.ids, DRAM)
    feed.hold(1, run.ids)
    feed.hold(2, run.ids)
    assert feed.told() == dict.fromkeys(run.ids, DRAM | NVME)
    feed.drop(1, run.ids)
    assert feed.told() == dict.fromkeys(run.ids, NVME)
    feed.drop(2, run.ids[1:])
    assert feed.told() == {run.ids[0]: NVME}
    assert len(feed.announcer) == 1


def test_block_that_no_event_confirms_is_retracted() -> None:
    feed, run = Feed(), run_of(0, 2)
    feed.announcer.expect(run)
    feed.announcer.stored(run)
    feed.hold(1, run.ids[:1])
    assert len(feed.told()) == 2
    feed.now_s = 60.0
    assert feed.told() == {run.ids[0]: DRAM}
    assert (feed.unconfirmed, feed.retracted) == (1, 0)


def test_other_blocks_are_not_mirrored() -> None:
    feed = Feed()
    feed.announcer.expect(run_of(0, 1))
    feed.hold(1, run_of(0, 4).ids)
    assert [key in feed.mirror for key in map(BlockKey, (xor(run_of(0, 2).ids[at], SPECS[0].namespace) for at in (0, 1)))] == [
        True,
        False,
    ]


def test_mirror_that_begins_again_changes_only_the_difference() -> None:
    feed, run = Feed(), run_of(0, 3)
    feed.announcer.expect(run)
    feed.announcer.stored(run)
    feed.hold(1, run.ids)
    assert len(feed.told()) == 3
    feed.held = {one for one in feed.held if one[2] != run.ids[1]}  # evicted while the subscription was lost
    feed.mirror.clear()
    assert feed.take() == []
    feed.snapshot()
    assert [(one.at, one.stored, one.removed) for one in feed.take()] == [(1, 0, DRAM)]


def test_announced_blocks_are_bounded() -> None:
    feed = Feed(most=4)
    for first in range(0, 10, 2):
        run = run_of(first, 2)
        feed.announcer.expect(run)
        feed.announcer.stored(run)
        feed.hold(1, run.ids)
        feed.take(1)
    while feed.take(1):
        pass
    assert set(feed.told()) == {*run_of(6, 4).ids}
    assert (len(feed.announcer), feed.retracted) == (4, 6)


def test_announcements_are_repeated_after_a_clear_event() -> None:
    feed, run = Feed(), run_of(0, 2)
    feed.announcer.expect(run)
    feed.announcer.stored(run)
    feed.hold(1, run.ids)
    feed.take()
    feed.believed.clear()
    feed.announcer.announce_again()
    assert feed.told() == dict.fromkeys(run.ids, DRAM)
    feed.announcer.retract_all()
    assert feed.told() == {}


steps = st.tuples(
    st.sampled_from(["plan", "hold", "drop", "snapshot", "take"]),
    st.integers(1, 2),
    st.integers(0, BLOCKS - 1),
    st.integers(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40))
def test_announced_tiers_equal_those_of_the_store(happened: list[tuple[str, int, int, int]]) -> None:
    feed = Feed()
    planned = set()
    for what, volume, at, shard in happened:
        run = run_of(at, 1)
        if what == "plan" and run.ids[0] not in {one[2] for one in feed.held}:
            feed.announcer.expect(run)
            planned.add(run.ids[0])
        elif what == "hold" and run.ids[0] in planned:
            feed.hold(volume, run.ids)
        elif what == "drop":
            feed.drop(volume, run.ids, shard)
        elif what == "snapshot":
            feed.snapshot()
        else:
            feed.take(2)
    feed.take()
    parts = {block: [{v for v, s, b in feed.held if (s, b) == (shard, block)} for shard in (0, 1)] for block in planned}
    for block, tiers in parts.items():
        expected = 0
        if all(tiers):
            expected = sum(1 << v + 1 for v in set.union(*tiers) if all(any(one <= v for one in some) for some in tiers))
        if feed.announcer.wanted(SPECS[0].namespace, BlockKey(xor(block, SPECS[0].namespace))):
            assert feed.believed.get(block, 0) == expected


def chain_of(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in numbers]


def label_next(recent: RecentPrefixes, keys: list[BlockKey]) -> range:
    part = recent.next_part(keys)
    recent.labelled(keys, part)
    return part


def test_found_prefix_is_labelled_once_then_only_its_growth() -> None:
    now_s = [0.0]
    recent = RecentPrefixes(clock=lambda: now_s[0])
    keys = chain_of(*range(100))
    assert label_next(recent, keys[:10]) == range(10)
    assert not label_next(recent, keys[:10])
    now_s[0] = 500.0
    assert label_next(recent, keys[:30]) == range(10, 30)
    assert label_next(recent, [*keys[:20], *chain_of(1_000, 1_001)]) == range(20, 22)
    now_s[0] = 601.0  # the oldest blocks expire, and later ones with them
    assert label_next(recent, keys[:31]) == range(31)
    assert not label_next(recent, keys[:31])


def test_found_prefix_costs_the_scheduler_a_bounded_part() -> None:
    recent, keys = RecentPrefixes(), chain_of(*range(2 * MOST_PER_CALL + 5))
    sizes = [len(label_next(recent, keys)) for _ in range(4)]
    assert sizes == [MOST_PER_CALL, MOST_PER_CALL, 5, 0]


def test_recent_prefixes_are_bounded() -> None:
    recent = RecentPrefixes(most=8)
    for first in range(0, 100, 10):
        keys = chain_of(*range(first, first + 6))
        assert label_next(recent, keys) == range(6)
    assert not label_next(recent, keys)
    assert label_next(recent, chain_of(*range(6))) == range(6)


def routed(announcements: list[Announcement]) -> dict[bytes, int]:
    """Return the tiers of each hash in a router that receives, of each part, first the stored and then the removed blocks."""
    state: dict[bytes, int] = {}
    for part in ordered_parts(announcements):
        for one in part:
            state[one.run.hashes[one.at]] = state.get(one.run.hashes[one.at], 0) | one.stored
        for one in part:
            state[one.run.hashes[one.at]] &= ~one.removed
    return {block: bits for block, bits in state.items() if bits}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, DRAM, NVME, DRAM | NVME])), max_size=30))
def test_router_ends_with_the_last_state_of_each_block(happened: list[tuple[int, int]]) -> None:
    run, held = run_of(0, 4), dict.fromkeys(range(4), 0)
    announcements: list[Announcement] = []
    for at, bits in happened:
        announcements.append(Announcement(run, at, bits & ~held[at], held[at] & ~bits))
        held[at] = bits
    assert routed(announcements) == {run.hashes[at]: bits for at, bits in held.items() if bits}
    assert [one for part in ordered_parts(announcements) for one in part] == announcements
    assert all(ordered_parts(announcements))


def test_block_retracted_and_stored_again_in_a_step_stays() -> None:
    feed, run = Feed(most=1), run_of(0, 1)
    for one in (run, run_of(1, 1), run):  # the second one displaces the first, and is displaced
        feed.announcer.expect(one)
        feed.announcer.stored(one)
        if one is run:
            feed.hold(1, run.ids)
        if not feed.believed:
            before = feed.take()
    assert routed([*before, *feed.take()]) == {run.hashes[0]: DRAM}


def test_labels_of_a_run_have_parents_and_tokens() -> None:
    run = EngineRun(
        4,
        (GroupBlockId(b"i" * 16), GroupBlockId(b"j" * 16)),
        (b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32),
        b"p" * 32,
        array("I", range(8)),
        3,
        "adapter",
        (["x"], None, None, ["y"]),
    )
    assert list(run.labels()) == [
        (b"i" * 16, BlockLabel(4, run.hashes[:2], b"p" * 32, struct.pack("<4I", 0, 1, 2, 3), "adapter", (["x"], None))),
        (b"j" * 16, BlockLabel(5, run.hashes[2:], b"b" * 32, struct.pack("<4I", 4, 5, 6, 7), "adapter", (None, ["y"]))),
    ]


def test_labels_without_a_thread_end_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    class FakeWriter:
        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            closed.set()

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine_events, "LabelWriter", FakeWriter)
    events = engine_events.EngineEvents(HookOptions(), announce=False, most_blocks=1, count=lambda _name, _count: None)
    events.connect([engine_events.AnnouncedGroup(SPECS, "sha256", "full", labelled=True)])
    assert events.labels
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        events.disconnect()
    assert not closed.is_set()
    events.take()
    assert closed.wait(10.0)


def test_close_that_fails_lets_the_other_labels_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    counts: list[str] = []

    class FakeWriter:
        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            ended.append(len(ended))
            raise OSError("closed twice")

    monkeypatch.setattr(engine_events, "LabelWriter", FakeWriter)
    events = engine_events.EngineEvents(HookOptions(), announce=False, most_blocks=1, count=lambda name, _: counts.append(name))
    events.connect([engine_events.AnnouncedGroup(SPECS, "sha256", "full", labelled=True)] * 2)
    events.close()
    assert (ended, counts) == ([0, 1], ["bugs", "bugs"])
