"""Subscriptions to block events that all servers of an index share (``kvstore.index.valkey.feed``).

The streams name changes of blocks only. Which volumes are open and can be read, each server knows from the index and the nodes,
so it sends a subscriber the changes since the last message. A subscriber that resumes at another server gets the list of
open volumes: all others were closed.

As for one server (``kvstore.metadata.events.subscription``), pages of a snapshot alternate with the changes since the last page,
and the later of two facts about a key and a volume is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import CapacityExceeded, Unavailable
from kvstore.core.types import BlockKey, BlockRun
from kvstore.index.contract import PrefixIndex, RemovedKeys, VolumeEpoch
from kvstore.index.valkey.feed import BlockFeed, FeedPosition, StreamRead, decode_position, encode_position, lowered, reached
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.metadata.events import subscription as messages
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.events.event_filter import EventFilter
from kvstore.metadata.events.event_log import STOPPING, opened_volume
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.auth.interceptor import tenant
from kvstore.rpc.codec import check_id, run_to_proto

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

WAIT_S: Final = 0.1
"""Time after which a subscription looks again for opened, closed, silent and returned volumes."""


def encode_events(volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> bytes:
    """Encode a change: first ``removed``, then ``stored``."""
    events = [
        pb.BlockEvent(removed=pb.BlocksRemoved(volume=holder, namespace_id=namespace, keys=b"".join(keys)))
        for holder, namespace, keys in removed
    ]
    if stored:
        events.append(pb.BlockEvent(stored=pb.BlocksStored(volume=volume_epoch, runs=[run_to_proto(run) for run in stored])))
    return pb.BlockEvents(events=events).SerializeToString()


class SharedFeed(EventSource):
    """The feed of an index, for the subscribers of this server.

    Args:
        index: the index.
        reads: thread for long reads of the index.
        nodes: registrations and liveness.
        counters: counters of this process.
        most_bytes: approximate maximum size of past events.
        max_subscribers: maximum number of subscribers.
    """

    def __init__(
        self,
        index: ValkeyIndex,
        reads: IndexThread,
        nodes: NodeTable,
        counters: Counters,
        *,
        most_bytes: int,
        max_subscribers: int,
    ) -> None:
        super().__init__(max_subscribers)
        self.index: Final = index
        self.feed: Final[BlockFeed] = index.feed
        self._reads = reads
        self._nodes = nodes
        self._counters = counters
        self._subscribers = 0
        self.closed = False
        self.feed.start_recording(encode_events, most_bytes)

    @property
    def subscribers(self) -> int:
        return self._subscribers

    def subscribe(self, request: pb.WatchBlocksRequest) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        return SharedFeedSubscription(request, self, self._reads, self._nodes, self._counters).run()

    async def join(self) -> None:
        """Add a subscriber.

        Raises:
            CapacityExceeded: too many subscribers.
            Unavailable: the server is stopping, or Valkey does not answer.
        """
        if self.closed:
            raise Unavailable(STOPPING)
        if self.subscribers >= self.max_subscribers:
            raise CapacityExceeded("too many subscribers to block events", limit=self.max_subscribers)
        self._subscribers += 1
        try:
            await self.feed.join()
        except BaseException:
            self._subscribers -= 1
            raise

    def leave(self) -> None:
        """Remove a subscriber."""
        self._subscribers -= 1
        self.feed.leave()

    def close(self) -> None:
        self.closed = True


class SharedFeedSubscription:
    """One stream of events.

    Raises:
        InvalidArgument: the request is malformed.
    """

    def __init__(
        self, request: pb.WatchBlocksRequest, shared: SharedFeed, reads: IndexThread, nodes: NodeTable, counters: Counters
    ) -> None:
        self._shared = shared
        self._feed = shared.feed
        self._index: PrefixIndex = shared.index
        self._reads = reads
        self._nodes = nodes
        self._counters = counters
        self._resume = (check_id(request.feed_id, "feed_id"), request.position) if request.feed_id else None
        self._filter = EventFilter(request, confined=tenant() is not None)
        self._feed_id = b""
        self._position: FeedPosition = ()
        self._open: set[VolumeEpoch] = set()
        self._told: dict[VolumeEpoch, bool] = {}
        """Volumes that the subscriber knows, and whether it thinks that they can be read."""
        self._numbers: dict[tuple[int, bytes], int] = {}
        """Number of the last entry by stream and writer."""

    async def run(self) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        """Messages, as long as the caller takes them.

        Raises:
            CapacityExceeded: too many subscribers.
            Unavailable: the server is stopping, or Valkey does not answer.
        """
        await self._shared.join()
        self._counters.add(metadata_metrics.WATCHES)
        try:
            self._feed_id = await self._feed.extend_or_begin()
            reason = await self._try_resume()
            if reason is None:
                await self._shared.index.refresh()
                open_volumes = pb.OpenVolumes(volumes=[info.volume_epoch for info in self._index.volume_epochs()])
                yield pb.WatchBlocksResponse(resumed=pb.WatchResumed(feed_id=self._feed_id, open=open_volumes))
            while True:
                if reason is not None:
                    self._counters.add(messages.RESYNCS[reason])
                    if reason is pb.RESYNC_REASON_SLOW:
                        logger.warning("subscriber to block events too slow: restarted with a snapshot")
                    async for message in self._snapshot(reason):
                        yield message
                async for message in self._events():
                    yield message
                reason = pb.RESYNC_REASON_SLOW if self._feed_id == self._feed.feed_id else pb.RESYNC_REASON_RESTARTED
        finally:
            self._shared.leave()

    async def _try_resume(self) -> pb.ResyncReason | None:
        """Resume at the subscriber's position; else return the reason for a snapshot."""
        if self._resume is None:
            return pb.RESYNC_REASON_ASKED
        feed_id, raw = self._resume
        if feed_id != self._feed_id:
            return pb.RESYNC_REASON_RESTARTED
        position = decode_position(raw)
        if position is None or any(one.position is None for one in await self._feed.read(position, most=1)):
            return pb.RESYNC_REASON_GONE
        self._position = position
        return None

    async def _snapshot(self, reason: pb.ResyncReason) -> AsyncIterator[pb.WatchBlocksResponse]:
        """The whole state. Ends early if the streams no longer have the changes since the last page."""
        self._feed_id = await self._feed.extend_or_begin()
        yield pb.WatchBlocksResponse(resync=pb.Resync(feed_id=self._feed_id, reason=reason))
        await self._feed.settle()
        self._numbers.clear()
        self._told.clear()
        self._position = await self._feed.newest()
        await self._shared.index.refresh()
        yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=self._changes_of_volumes()))
        key: BlockKey | None = None
        while True:
            blocks, key = await self._reads.run(self._index.blocks_from, key, messages.PAGE_RECORDS)
            goal = await self._feed.newest()
            if changed := self._changes_of_volumes():
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=changed))
            if held := self._filter.held(blocks):
                self._counters.add(metadata_metrics.WATCH_SNAPSHOT_BLOCKS, sum(len(one.held.depths) for one in held))
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=held))
            while not reached(self._position, goal):
                self._check_open()
                before = self._position
                events = await self._next()
                if events is None:
                    return
                if events:
                    yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=events))
                if self._position == before:
                    await self._feed.wait(WAIT_S)
                    goal = lowered(goal, await self._feed.newest())
            if key is None:
                end = pb.SnapshotEnd(sequence=self.sequence, position=encode_position(self._position))
                yield pb.WatchBlocksResponse(snapshot_end=end)
                return

    async def _events(self) -> AsyncIterator[pb.WatchBlocksResponse]:
        """Events, until the streams have dropped changes that were not sent, or another feed has begun."""
        now_s = asyncio.get_running_loop().time
        sent, sent_s = self._position, now_s()
        while True:
            self._check_open()
            events = await self._next()
            if events is None or self._feed.feed_id != self._feed_id:
                return
            if not events:
                await self._feed.wait(WAIT_S)
            if events or (self._position != sent and now_s() - sent_s >= messages.PROGRESS_S):
                sent, sent_s = self._position, now_s()
                position = encode_position(sent)
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=self.sequence, events=events, position=position))

    @property
    def sequence(self) -> int:
        """Number of changes before the present position."""
        return sum(one.entries for one in self._position)

    def _check_open(self) -> None:
        if self._shared.closed:
            raise Unavailable(STOPPING)

    async def _next(self) -> list[pb.BlockEvent] | None:
        """The next events that pass the filter; empty: nothing has changed; None: changes were lost or are damaged."""
        found: list[pb.BlockEvent] = []
        position = list(self._position)
        for read in await self._feed.read(self._position):
            if read.position is None or not self._follows(read):
                return None
            position[read.stream] = read.position
            try:
                for entry in read.entries:
                    found += pb.BlockEvents.FromString(entry.encoded).events
            except DecodeError:
                limited.warning("damaged block events: the subscriber begins again with a snapshot (stream=%d)", read.stream)
                return None
        if any(event.stored.volume not in self._open for event in found if event.HasField("stored")):
            await self._shared.index.refresh()  # a volume that was opened a moment ago, or is closed
        events = self._changes_of_volumes()
        events += [one for one in map(self._filter.part, found) if one is not None]
        if self._filter.withheld:
            limited.warning("removals of unknown namespaces withheld from a tenant (keys=%d)", self._filter.withheld)
            self._counters.add(metadata_metrics.WATCH_KEYS_WITHHELD, self._filter.withheld)
            self._filter.withheld = 0
        self._position = tuple(position)
        self._counters.add(metadata_metrics.WATCH_EVENTS, len(events))
        return events

    def _follows(self, read: StreamRead) -> bool:
        """Whether no entry of a writer is missing between the last ones and these."""
        for entry in read.entries:
            writer = (read.stream, entry.writer)
            last = self._numbers.get(writer)
            if last is not None and entry.number > last + 1:
                return False
            self._numbers[writer] = max(entry.number, last or 0)
        return True

    def _changes_of_volumes(self) -> list[pb.BlockEvent]:
        """Volumes that were opened, closed, fell silent or returned since the last call, as far as they pass the filter."""
        self._nodes.view()
        visible, infos = self._nodes.visible, {info.volume_epoch: info for info in self._index.volume_epochs()}
        self._open = set(infos)
        events = [pb.BlockEvent(closed=pb.VolumeClosed(volume=one)) for one in self._told if one not in infos]
        for volume_epoch, info in infos.items():
            served = volume_epoch in visible
            known = self._told.get(volume_epoch)
            if known is None:
                volume = opened_volume(info, served=served)
                if not self._filter.selects(volume):
                    continue
                events.append(pb.BlockEvent(opened=volume))
            elif known != served:
                events.append(pb.BlockEvent(served=pb.VolumeServed(volume=volume_epoch, served=served)))
            self._told[volume_epoch] = served
        self._told = {one: served for one, served in self._told.items() if one in infos}
        self._filter.known_volumes = set(self._told)
        return events
