"""One subscriber to block events: a snapshot where it needs one, then what happens, filtered, for as long as it reads.

Between pages of a snapshot it is sent what has happened meanwhile, so that it can fall behind by a page at most, however large
the index and small the ring. A page is newer than all that was told before it and older than all that is told after it, and
later facts win: so once what had happened at the last page is told as well, the subscriber has the truth. Pages leave out
volumes whose opening it has not been told of yet: all that these hold comes as events after it.

Nothing is queued here: the next message is made when gRPC has taken the last, which it does as fast as the subscriber reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Container, Sequence
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.index.contract import IndexedBlock, PrefixIndex, VolumeEpoch
from kvstore.metadata.events.event_log import BlockEventLog, LogPosition
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, check_name, tier_from_proto

logger = logging.getLogger(__name__)

_PAGE_RECORDS: Final = 1_024
"""Records of the index read in one hold of its gate: about a millisecond."""
_MESSAGE_BYTES: Final = 256 << 10
_PROGRESS_S: Final = 1.0
"""A subscriber that wants none of what happens is told at least so often how far it is, so that it can resume from there."""

_RESYNCS: Final = {
    pb.RESYNC_REASON_ASKED: metadata_metrics.WATCH_RESYNCS["asked"],
    pb.RESYNC_REASON_RESTARTED: metadata_metrics.WATCH_RESYNCS["restarted"],
    pb.RESYNC_REASON_GONE: metadata_metrics.WATCH_RESYNCS["gone"],
    pb.RESYNC_REASON_SLOW: metadata_metrics.WATCH_RESYNCS["slow"],
}


def tell_served(feed: BlockEventLog, nodes: NodeTable) -> None:
    """Tells subscribers which volumes can be read as of now."""
    nodes.view()
    feed.serve(nodes.visible)


class BlockEventSubscription:
    """One stream.

    Raises:
        InvalidArgument: a malformed request.
    """

    def __init__(
        self,
        request: pb.WatchBlocksRequest,
        feed: BlockEventLog,
        index: PrefixIndex,
        reads: IndexThread,
        nodes: NodeTable,
        counters: Counters,
    ) -> None:
        self._feed = feed
        self._index = index
        self._reads = reads
        self._nodes = nodes
        self._counters = counters
        self._resume = (check_id(request.feed_id, "feed_id"), request.sequence) if request.feed_id else None
        for wanted in (request.namespace_ids, request.node_ids, request.tiers):
            if len(wanted) > limits.MAX_WATCH_FILTER:
                raise InvalidArgument("a filter names too many", got=len(wanted), limit=limits.MAX_WATCH_FILTER)
        self._namespaces = frozenset(NamespaceId(check_id(one, "namespace_ids")) for one in request.namespace_ids)
        self._node_ids = frozenset(check_name(one, "node_ids") for one in request.node_ids)
        self._tiers: frozenset[int] = frozenset(tier_from_proto(one) for one in request.tiers)
        self._told: set[int] = set()
        """Numbers of the volumes that the subscriber knows."""
        self._sequence = 0
        """The last change that it was told of."""

    async def run(self) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        """Messages, for as long as somebody takes them.

        Raises:
            CapacityExceeded: too many subscribers.
            Unavailable: the server is about to leave.
        """
        self._nodes.view()
        self._feed.join(self._index.volume_epochs, self._nodes.visible)
        self._counters.add(metadata_metrics.WATCHES)
        try:
            reason = self._resumed()
            if reason is None:
                yield pb.WatchBlocksResponse(resumed=pb.WatchResumed(feed_id=self._feed.feed_id))
            while True:
                if reason is not None:
                    self._counters.add(_RESYNCS[reason])
                    if reason is pb.RESYNC_REASON_SLOW:
                        logger.warning("a subscriber to block events reads too slowly: it begins anew with a snapshot")
                    async for message in self._snapshot(reason):
                        yield message
                async for message in self._events():
                    yield message
                reason = pb.RESYNC_REASON_SLOW
        finally:
            self._feed.leave()

    def _resumed(self) -> pb.ResyncReason | None:
        """Goes on where the subscriber left off; else says why that cannot be."""
        if self._resume is None:
            return pb.RESYNC_REASON_ASKED
        feed_id, sequence = self._resume
        if feed_id != self._feed.feed_id:
            return pb.RESYNC_REASON_RESTARTED
        opened = self._feed.resumes(sequence)
        if opened is None:
            return pb.RESYNC_REASON_GONE
        self._begin(opened)
        return None

    def _begin(self, opened: LogPosition) -> list[pb.VolumeOpened]:
        """Takes over where the feed was; returns the volumes that the subscriber wants to know of."""
        wanted = [volume for volume in opened.volumes.values() if self._wants(volume)]
        self._told = {volume.volume for volume in wanted}
        self._sequence = opened.sequence
        return wanted

    async def _snapshot(self, reason: pb.ResyncReason) -> AsyncIterator[pb.WatchBlocksResponse]:
        """All that is to be known; ends early where the ring did not reach back to the page before."""
        yield pb.WatchBlocksResponse(resync=pb.Resync(feed_id=self._feed.feed_id, reason=reason))
        volumes = [pb.BlockEvent(opened=volume) for volume in self._begin(self._feed.state())]
        yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=volumes))
        position: BlockKey | None = None
        while True:
            blocks, position = await self._reads.run(self._index.blocks_from, position, _PAGE_RECORDS)
            goal = self._feed.state().sequence
            if held := _held(blocks, self._told, self._namespaces):
                self._counters.add(metadata_metrics.WATCH_SNAPSHOT_BLOCKS, sum(len(one.held.depths) for one in held))
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=held))
            # the page may already have what these tell, and more of it than they do: what is missing comes with the next ones
            while self._sequence < goal:
                events = self._next()
                if events is None:
                    return
                if events:
                    yield pb.WatchBlocksResponse(events=pb.BlockEvents(events=events))
            if position is None:
                yield pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=self._sequence))
                return

    async def _events(self) -> AsyncIterator[pb.WatchBlocksResponse]:
        """What happens, until it has happened faster than it was taken."""
        now_s = asyncio.get_running_loop().time
        told, told_s = self._sequence, now_s()
        while (events := self._next()) is not None:
            if not events:
                await self._feed.wait(self._sequence, _PROGRESS_S)
            if events or (self._sequence != told and now_s() - told_s >= _PROGRESS_S):
                told, told_s = self._sequence, now_s()
                yield pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=told, events=events))

    def _next(self) -> list[pb.BlockEvent] | None:
        """The next events, those that the subscriber wants; none where nothing has happened; None: they are not remembered."""
        found = self._feed.since(self._sequence, _MESSAGE_BYTES)
        if found is None:
            return None
        events, self._sequence = found
        wanted = [one for one in map(self._filtered, events) if one is not None]
        self._counters.add(metadata_metrics.WATCH_EVENTS, len(wanted))
        return wanted

    # ---- the filter ----
    def _wants(self, volume: pb.VolumeOpened) -> bool:
        return (not self._node_ids or volume.node_id in self._node_ids) and (not self._tiers or volume.tier in self._tiers)

    def _filtered(self, told: pb.BlockEvent) -> pb.BlockEvent | None:
        """What of an event the subscriber wants to know."""
        match told.WhichOneof("what"):
            case "opened":
                if not self._wants(told.opened):
                    return None
                self._told.add(told.opened.volume)
            case "closed":
                # also of a volume that is not known: the subscriber may have been told of it before it came back
                self._told.discard(told.closed.volume)
            case "served":
                return told if told.served.volume in self._told else None
            case "removed":
                wanted = not self._namespaces or told.removed.namespace_id in self._namespaces
                return told if wanted and told.removed.volume in self._told else None
            case "stored":
                if told.stored.volume not in self._told:
                    return None
                if self._namespaces:
                    runs = [run for run in told.stored.runs if run.namespace_id in self._namespaces]
                    if not runs:
                        return None
                    return pb.BlockEvent(stored=pb.BlocksStored(volume=told.stored.volume, runs=runs))
        return told


def _held(blocks: Sequence[IndexedBlock], told: Container[int], namespaces: frozenset[NamespaceId]) -> list[pb.BlockEvent]:
    """A page of the index as events, one a volume and namespace."""
    found: dict[tuple[VolumeEpoch, NamespaceId], tuple[list[BlockKey], list[int]]] = {}
    for key, namespace, depth, volume_epochs in blocks:
        if namespaces and namespace not in namespaces:
            continue
        for volume_epoch in volume_epochs:
            if volume_epoch in told:
                keys, depths = found.setdefault((volume_epoch, namespace), ([], []))
                keys.append(key)
                depths.append(depth)
    return [
        pb.BlockEvent(held=pb.BlocksHeld(volume=volume_epoch, namespace_id=namespace, keys=b"".join(keys), depths=depths))
        for (volume_epoch, namespace), (keys, depths) in found.items()
    ]
