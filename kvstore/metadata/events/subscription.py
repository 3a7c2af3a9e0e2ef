"""One subscription to block events: a snapshot if needed, then filtered events as long as the subscriber reads.

Between pages of a snapshot the subscriber gets the changes since the last page. So it can fall behind by one page at most,
however large the index and small the ring. A page is newer than all events that were sent before it and older than all events
that follow, and later facts win. Once the changes up to the time of the last page are sent as well, the subscriber has the true
state. Pages leave out volumes whose opening was not sent yet: all their blocks follow as events.

Nothing is queued here. The next message is made after gRPC has taken the last one, which it does as fast as the subscriber reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.types import BlockKey
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.events.event_filter import EventFilter
from kvstore.metadata.events.event_log import BlockEventLog, LogPosition
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.auth.interceptor import tenant
from kvstore.rpc.codec import check_id

logger = logging.getLogger(__name__)

PAGE_RECORDS: int = 1_024
"""Index records per page of a snapshot: about a millisecond of reading."""
MESSAGE_BYTES: int = 256 << 10
"""Approximate maximum size of events per message."""
PROGRESS_S: Final = 1.0
"""Maximum time between messages while changes pass that the filter drops, so that the subscriber can resume from near the end."""

RESYNCS: Final = {
    pb.RESYNC_REASON_ASKED: metadata_metrics.WATCH_RESYNCS["asked"],
    pb.RESYNC_REASON_RESTARTED: metadata_metrics.WATCH_RESYNCS["restarted"],
    pb.RESYNC_REASON_GONE: metadata_metrics.WATCH_RESYNCS["gone"],
    pb.RESYNC_REASON_SLOW: metadata_metrics.WATCH_RESYNCS["slow"],
}


def report_served(log: BlockEventLog, nodes: NodeTable) -> None:
    """Report to subscribers which volumes can be read now."""
    nodes.view()
    log.update_served(nodes.visible)


class LoggedEvents(EventSource):
    """Events of the log of this process.

    Args:
        log: the log.
        index: the index that the log listens to.
        reads: thread for long reads of the index.
        nodes: registrations and liveness.
        counters: counters of this process.
    """

    def __init__(self, log: BlockEventLog, index: PrefixIndex, reads: IndexThread, nodes: NodeTable, counters: Counters) -> None:
        super().__init__(log.max_subscribers)
        self._parts = log, index, reads, nodes, counters

    @property
    def subscribers(self) -> int:
        return self._parts[0].subscribers

    def subscribe(self, request: pb.WatchBlocksRequest) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        return BlockEventSubscription(request, *self._parts).run()

    def close(self) -> None:
        self._parts[0].close()


class BlockEventSubscription:
    """One stream of events.

    Raises:
        InvalidArgument: the request is malformed.
    """

    def __init__(
        self,
        request: pb.WatchBlocksRequest,
        log: BlockEventLog,
        index: PrefixIndex,
        reads: IndexThread,
        nodes: NodeTable,
        counters: Counters,
    ) -> None:
        self._log = log
        self._index = index
        self._reads = reads
        self._nodes = nodes
        self._counters = counters
        self._resume = (check_id(request.feed_id, "feed_id"), request.sequence) if request.feed_id else None
        self._filter = EventFilter(request, confined=tenant() is not None)
        self.sequence = 0
        """Number of the last change that was sent or filtered."""

    async def run(self) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        """Messages, as long as the caller takes them.

        Raises:
            CapacityExceeded: too many subscribers.
            Unavailable: the server is stopping.
        """
        self._nodes.view()
        self._log.join(self._index.volume_epochs, self._nodes.visible)
        self._counters.add(metadata_metrics.WATCHES)
        try:
            reason = self._try_resume()
            if reason is None:
                yield pb.WatchBlocksResponse(resumed=pb.WatchResumed(feed_id=self._log.feed_id))
            while True:
                if reason is not None:
                    self._counters.add(RESYNCS[reason])
                    if reason is pb.RESYNC_REASON_SLOW:
                        logger.warning("subscriber to block events too slow: restarted with a snapshot")
                    async for message in self._snapshot(reason):
                        yield message
                async for message in self._events():
                    yield message
                reason = pb.RESYNC_REASON_SLOW
        finally:
            self._log.leave()

    def _try_resume(self) -> pb.ResyncReason | None:
        """Resume at the subscriber's position; else return the reason for a snapshot."""
        if self._resume is None:
            return pb.RESYNC_REASON_ASKED
        feed_id, sequence = self._resume
        if feed_id != self._log.feed_id:
            return pb.RESYNC_REASON_RESTARTED
        position = self._log.resume(sequence)
        if position is None:
            return pb.RESYNC_REASON_GONE
        self._start_at(position)
        return None

    def _start_at(self, position: LogPosition) -> list[pb.VolumeOpened]:
        """Continue from a position of the log; return its volumes that pass the filter."""
        selected = [volume for volume in position.volumes.values() if self._filter.selects(volume)]
        self._filter.known_volumes = {volume.volume for volume in selected}
        self.sequence = position.sequence
        return selected

    async def _snapshot(self, reason: pb.ResyncReason) -> AsyncIterator[pb.WatchBlocksResponse]:
        """The whole state. Ends early if the ring no longer contains the changes since the last page."""
        yield pb.WatchBlocksResponse(resync=pb.Resync(feed_id=self._log.feed_id, reason=reason))
        volumes = [pb.BlockEvent(opened=volume) for volume in self._start_at(self._log.position())]
        yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=volumes))
        key: BlockKey | None = None
        while True:
            blocks, key = await self._reads.run(self._index.blocks_from, key, PAGE_RECORDS)
            goal = self._log.sequence
            if held := self._filter.held(blocks):
                self._counters.add(metadata_metrics.WATCH_SNAPSHOT_BLOCKS, sum(len(one.held.depths) for one in held))
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=held))
            # the page may already include these changes, and later ones; missing parts follow with later events
            while self.sequence < goal:
                events = await self._next()
                if events is None:
                    return
                if events:
                    yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=events))
            if key is None:
                yield pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=self.sequence))
                return

    async def _events(self) -> AsyncIterator[pb.WatchBlocksResponse]:
        """Events, until the ring has dropped changes that were not sent."""
        now_s = asyncio.get_running_loop().time
        sent, sent_s = self.sequence, now_s()
        while (events := await self._next()) is not None:
            if not events:
                await self._log.wait(self.sequence, PROGRESS_S)
            if events or (self.sequence != sent and now_s() - sent_s >= PROGRESS_S):
                sent, sent_s = self.sequence, now_s()
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=sent, events=events))

    async def _next(self) -> list[pb.BlockEvent] | None:
        """The next events that pass the filter; empty: nothing has changed; None: changes were dropped.

        Other tasks run before each batch: if a filter drops the whole ring, nothing else awaits.
        """
        await asyncio.sleep(0)
        found = self._log.since(self.sequence, MESSAGE_BYTES)
        if found is None:
            return None
        events, self.sequence = found
        selected = [one for one in map(self._filter.part, events) if one is not None]
        self._counters.add(metadata_metrics.WATCH_EVENTS, len(selected))
        return selected
