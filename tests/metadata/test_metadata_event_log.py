"""Model-based test of block events: a mirror equals the index after any changes and interruptions."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvclient.events import BlockMirror
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import Tier as TierMessage
from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import VolumeEpoch, VolumeEpochInfo
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.events import subscription as watching
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.events.subscription import BlockEventSubscription
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.observe.counters import Counters
from kvstore.testing.index.model import Chain
from kvstore.testing.index.state_machine import CHAINS, LENGTH, choices, positions

IDLE_S = 0.002
FILTERS = (
    pb.WatchBlocksRequest(),
    pb.WatchBlocksRequest(namespace_ids=[CHAINS[0].namespace]),
    pb.WatchBlocksRequest(node_ids=["n0"], tiers=[TierMessage.TIER_DRAM]),
)
Truth = dict[tuple[BlockKey, bytes, int], set[tuple[str, bool]]]


class Nodes:
    """The visible volume epochs: the part of the node table that the log uses."""

    def __init__(self) -> None:
        self.visible: frozenset[VolumeEpoch] = frozenset()

    def view(self) -> None:
        pass


class Subscriber:
    """One mirror and its stream, read message by message."""

    def __init__(self, wanted: pb.WatchBlocksRequest) -> None:
        self.wanted = wanted
        self.mirror = BlockMirror()
        self.watch: BlockEventSubscription | None = None
        self.stream: AsyncIterator[pb.WatchBlocksResponse] | None = None
        self.pending: asyncio.Task[pb.WatchBlocksResponse] | None = None
        self.reasons: list[int] = []


class FeedMachine(RuleBasedStateMachine):
    """Nodes store, remove, die, fall silent; subscribers read, stall, return; the server restarts."""

    ring_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="feed-machine-"))
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.reads = IndexThread("reads")
        self.nodes = Nodes()
        self.counters = Counters()
        self.boots = 0
        self.subscribers = [Subscriber(wanted) for wanted in FILTERS]
        self.start_server()

    def start_server(self) -> None:
        self.index = LmdbIndex.open(self.folder / "index", map_bytes=1 << 22)
        self.feed = BlockEventLog(self.loop, self.ring_bytes, len(FILTERS), self.clock)
        self.index.listen(self.feed)

    def teardown(self) -> None:
        for subscriber in self.subscribers:
            self.hang_up(subscriber)
        self.loop.run_until_complete(self.reads.close())
        self.index.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    # ---- subscribers ----
    def hang_up(self, subscriber: Subscriber) -> None:
        async def close() -> None:
            if subscriber.pending is not None:
                subscriber.pending.cancel()
                await asyncio.gather(subscriber.pending, return_exceptions=True)
            if subscriber.stream is not None:
                await subscriber.stream.aclose()
            subscriber.pending = subscriber.stream = None

        self.loop.run_until_complete(close())

    def read_one(self, subscriber: Subscriber) -> bool:
        """Apply the next message. Returns False if there is none now."""

        async def step() -> bool:
            if subscriber.stream is None:
                request = pb.WatchBlocksRequest()
                request.CopyFrom(subscriber.wanted)
                if subscriber.mirror.complete:
                    request.feed_id, request.sequence = subscriber.mirror.feed_id, subscriber.mirror.sequence
                subscriber.watch = BlockEventSubscription(request, self.feed, self.index, self.reads, self.nodes, self.counters)
                subscriber.stream = subscriber.watch.run()
            if subscriber.pending is None:
                subscriber.pending = asyncio.ensure_future(anext(subscriber.stream))
            done, _ = await asyncio.wait([subscriber.pending], timeout=IDLE_S)
            if not done:
                return False
            message = subscriber.pending.result()
            subscriber.pending = None
            if message.WhichOneof("what") == "resync":
                subscriber.reasons.append(message.resync.reason)
            change = subscriber.mirror.apply(pb.WatchBlocksResponse.FromString(message.SerializeToString()))
            assert change.whole == (message.WhichOneof("what") in {"resync", "snapshot_end"})
            return True

        return self.loop.run_until_complete(step())

    def read_all(self, subscriber: Subscriber) -> None:
        while self.read_one(subscriber) or not self.idle(subscriber):
            pass

    def idle(self, subscriber: Subscriber) -> bool:
        """Whether the subscriber has received all events."""
        assert subscriber.pending is not None
        told_all = subscriber.watch.sequence == self.feed.sequence
        return subscriber.mirror.complete and told_all and not subscriber.pending.done()

    @rule(which=st.integers(0, len(FILTERS) - 1), count=st.integers(1, 12))
    def read_some(self, which: int, count: int) -> None:
        for _ in range(count):
            if not self.read_one(self.subscribers[which]):
                break

    @rule(which=st.integers(0, len(FILTERS) - 1), forgets=st.booleans())
    def come_back(self, which: int, forgets: bool) -> None:
        self.hang_up(self.subscribers[which])
        if forgets:
            self.subscribers[which].mirror = BlockMirror()

    @rule(forgets=st.booleans())
    def long_pause(self, forgets: bool) -> None:
        """No subscriber watches until all events are dropped."""
        for subscriber in self.subscribers:
            self.hang_up(subscriber)
        if forgets:
            self.clock.advance(3600.0)
        self.feed.expire()
        assert not (forgets and self.feed.held_bytes)

    @rule()
    def compare(self) -> None:
        for subscriber in self.subscribers:
            self.read_all(subscriber)
            assert self.mirrored(subscriber.mirror) == self.truth(subscriber.wanted)

    @staticmethod
    def mirrored(mirror: BlockMirror) -> Truth:
        found: Truth = {}
        for key in mirror:
            place = mirror.place(key)
            assert place is not None
            found[key, *place] = {(f"{volume.number}", volume.served) for volume in mirror.replicas(key)}
        return found

    def truth(self, wanted: pb.WatchBlocksRequest) -> Truth:
        volume_epochs = {
            info.volume_epoch
            for info in self.index.volume_epochs()
            if (not wanted.node_ids or info.node_id in wanted.node_ids) and (not wanted.tiers or info.tier in wanted.tiers)
        }
        blocks, _ = self.index.blocks_from(None, 10_000)
        return {
            (block.key, block.namespace, block.depth): {
                (f"{volume_epoch}", volume_epoch in self.nodes.visible) for volume_epoch in mine
            }
            for block in blocks
            if (mine := volume_epochs & set(block.volume_epochs))
            and (not wanted.namespace_ids or block.namespace in wanted.namespace_ids)
        }

    # ---- the store ----
    @initialize()
    def begin(self) -> None:
        for number in range(2):
            self.boot(number)

    @rule(number=st.integers(0, 3))
    def boot(self, number: int) -> None:
        self.boots += 1
        tier = Tier.DRAM if number % 2 else Tier.NVME
        boot = BootId(self.boots.to_bytes(16, "big"))
        volume_epoch = self.index.open_volume_epoch(VolumeId(f"v{number}"), NodeId(f"n{number // 2}"), tier, boot)
        self.nodes.visible |= {volume_epoch}
        self.feed.update_served(self.nodes.visible)

    def volume_epoch(self, choice: int) -> VolumeEpoch:
        volume_epochs = sorted(info.volume_epoch for info in self.index.volume_epochs())
        return volume_epochs[choice % len(volume_epochs)]

    @precondition(lambda self: len(self.index.volume_epochs()) > 1)
    @rule(choice=choices)
    def die(self, choice: int) -> None:
        volume_epoch = self.volume_epoch(choice)
        self.index.close_volume_epoch(volume_epoch)
        self.nodes.visible -= {volume_epoch}
        self.feed.update_served(self.nodes.visible)

    @rule(choice=choices)
    def turn_silent_or_back(self, choice: int) -> None:
        self.nodes.visible ^= {self.volume_epoch(choice)}
        self.feed.update_served(self.nodes.visible)

    @rule(
        choice=choices, chain=st.sampled_from(CHAINS), start=positions, end=positions, others=st.lists(st.integers(0, LENGTH - 1))
    )
    def store(self, choice: int, chain: Chain, start: int, end: int, others: list[int]) -> None:
        stored = [chain.run(start, end)] if start < end else []
        self.index.publish(self.volume_epoch(choice), stored, [CHAINS[0].keys[at] for at in others])

    @rule(choice=choices, chain=st.sampled_from(CHAINS), start=positions, end=positions)
    def remove(self, choice: int, chain: Chain, start: int, end: int) -> None:
        self.index.publish(self.volume_epoch(choice), [], list(chain.keys[start:end]))

    @rule(choice=choices, chain=st.sampled_from(CHAINS[:2]), start=positions, whose=st.booleans())
    def slip(self, choice: int, chain: Chain, start: int, whose: bool) -> None:
        """A chain without its parent, or with another namespace: ignored now, or replaced later."""
        if start < LENGTH:
            namespace = CHAINS[4].namespace if whose else chain.namespace
            self.index.publish(self.volume_epoch(choice), [BlockRun(namespace, None, 0, chain.keys[start:])], [])

    @rule()
    def sweep(self) -> None:
        self.index.sweep(7)

    @rule()
    def restart_server(self) -> None:
        for subscriber in self.subscribers:
            self.hang_up(subscriber)
        self.index.close()
        self.start_server()

    @rule()
    def lose_the_index(self) -> None:
        for subscriber in self.subscribers:
            self.hang_up(subscriber)
        self.index.close()
        shutil.rmtree(self.folder / "index")
        self.start_server()
        self.nodes.visible = frozenset()
        self.begin()


class SmallRingMachine(FeedMachine):
    """As above, but with a log of few events."""

    ring_bytes = 1_500


@contextmanager
def small_pages() -> Iterator[None]:
    """Snapshots with many pages, so that changes happen between them, and messages with few events."""
    before = watching.PAGE_RECORDS, watching.MESSAGE_BYTES
    watching.PAGE_RECORDS, watching.MESSAGE_BYTES = 3, 400
    try:
        yield
    finally:
        watching.PAGE_RECORDS, watching.MESSAGE_BYTES = before


class TestFeed(FeedMachine.TestCase):
    settings = settings(FeedMachine.TestCase.settings, max_examples=12, stateful_step_count=25, deadline=None)

    def runTest(self) -> None:  # noqa: N802
        with small_pages():
            super().runTest()


class TestSmallRing(SmallRingMachine.TestCase):
    settings = settings(SmallRingMachine.TestCase.settings, max_examples=12, stateful_step_count=25, deadline=None)

    def runTest(self) -> None:  # noqa: N802
        with small_pages():
            super().runTest()


async def test_resume_over_foreign_changes_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that drops the whole ring must not hold the event loop of the server."""
    monkeypatch.setattr(watching, "MESSAGE_BYTES", 1)  # one change per batch
    loop = asyncio.get_running_loop()
    log, nodes, volume = BlockEventLog(loop, 1 << 20, 4, ManualClock()), Nodes(), VolumeEpoch(1)
    nodes.visible = frozenset({volume})
    log.join(list, nodes.visible)
    log.opened(VolumeEpochInfo(volume, VolumeId("n/dram"), NodeId("n"), Tier.DRAM, BootId(bytes(16))))
    begin, mine, other = log.sequence, NamespaceId(b"m" * 16), NamespaceId(b"o" * 16)
    for number in range(100):
        log.published(volume, [BlockRun(other, None, 0, (BlockKey(number.to_bytes(16, "big")),))], [])
    log.published(volume, [BlockRun(mine, None, 0, (BlockKey(b"own".ljust(16)),))], [])
    wanted = pb.WatchBlocksRequest(feed_id=log.feed_id, sequence=begin, namespace_ids=[mine])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task, reads = asyncio.create_task(others()), IndexThread("reads")
    with tempfile.TemporaryDirectory() as folder:
        index = LmdbIndex.open(Path(folder) / "index", map_bytes=1 << 22)
        stream = BlockEventSubscription(wanted, log, index, reads, nodes, Counters()).run()  # type: ignore[arg-type]
        messages = [await anext(stream), await anext(stream)]
        await stream.aclose()
        task.cancel()
        await reads.close()
        index.close()
    assert messages[0].HasField("resumed")
    assert [len(one.stored.runs) for one in messages[1].events.events] == [1]
    assert turns >= 100
