"""The publish stream of a node: batches arrive in order, are applied in groups, and are acknowledged once they are in the index.

A reader task reads messages, checks them and puts them into a short queue. All batches that are queued when the index thread
becomes free are applied as one group. So a burst of small batches costs few transactions, a slow index slows the node down
(gRPC flow control), and the memory per stream is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio

from kvproto.v1.metadata_pb2 import PublishRequest
from kvstore.core import limits
from kvstore.core.errors import Internal, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import KEY_BYTES, BootId, NodeId, VolumeId
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.indexing.index_mutations import (
    PublishBatch,
    PublishOutcome,
    apply_batches,
)
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, check_name, keys_from_packed, runs_from_proto

logger = logging.getLogger(__name__)

_QUEUED_BATCHES: Final = 8
"""Maximum number of checked messages per stream that are not applied yet."""
_GROUP_KEYS: Final = limits.MAX_KEYS_PER_CALL
"""A group with as many keys is applied: a longer transaction would delay other nodes."""


class PublishStream:
    """One node's stream, from its first message to its end."""

    def __init__(self, index: PrefixIndex, thread: IndexThread, nodes: NodeTable, counters: Counters) -> None:
        self._index = index
        self._thread = thread
        self._nodes = nodes
        self._counters = counters
        self._identity: tuple[NodeId, BootId] | None = None
        self._last: int | None = None
        self._replaced = False
        self._reader: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        # None is the end of the stream; an error follows the batches that arrived before it
        self._queue: asyncio.Queue[PublishBatch | KVStoreError | None] = asyncio.Queue(_QUEUED_BATCHES)

    async def run(self, requests: AsyncIterator[PublishRequest]) -> AsyncIterator[int]:
        """Yield sequence numbers: all batches up to each number are in the index.

        Raises:
            InvalidArgument: a message is malformed, or of another node than the first one.
            NotFound: the boot or the volume is not registered.
            Conflict: a batch is missing before this one.
            Unavailable: the node has registered again.
        """
        reader = self._reader = asyncio.create_task(self._read(requests))
        try:
            ended = False
            while not ended:
                group, ended, refusal = self._gather(await self._queue.get())
                if group and self._replaced:
                    self._counters.add(metadata_metrics.PUBLISH_STREAMS_REPLACED)
                    raise Unavailable("the node has registered again: its batches come in a new stream")
                if group:
                    applied = await self._apply(group)
                    if applied.error is not None:
                        raise applied.error
                    yield applied.sequence
                if refusal is not None:
                    raise refusal
        finally:
            tasks = [reader] if self._end is None else [reader, self._end]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """Stop reading: apply and acknowledge the batches that were read, then end the stream."""
        if self._reader is not None and self._end is None:
            self._reader.cancel()
            self._end = asyncio.create_task(self._queue.put(None))

    def node_registered(self, node_id: NodeId) -> None:
        """A node has registered. Its next stream repeats what was not acknowledged, so this one must apply nothing after that."""
        if self._identity is not None and self._identity[0] == node_id:
            self._replaced = True

    def _gather(self, first: PublishBatch | KVStoreError | None) -> tuple[list[PublishBatch], bool, KVStoreError | None]:
        """Collect a group: the first item and the queued ones after it, up to a limit. Returns (group, end of stream, error)."""
        group: list[PublishBatch] = []
        keys = 0
        item = first
        while isinstance(item, PublishBatch):
            group.append(item)
            keys += item.key_count
            if keys >= _GROUP_KEYS or self._queue.empty():
                return group, False, None
            item = self._queue.get_nowait()
        return group, item is None, item

    async def _apply(self, group: list[PublishBatch]) -> PublishOutcome:
        assert self._identity is not None
        applied = await self._thread.run(apply_batches, self._index, self._identity[0], self._last, group)
        self._last = applied.sequence
        self._counters.add(metadata_metrics.PUBLISH_BATCHES, len(group))
        self._counters.add(metadata_metrics.PUBLISH_GROUPS)
        self._counters.add(metadata_metrics.BLOCKS_PUBLISHED, applied.blocks_stored)
        self._counters.add(metadata_metrics.BLOCKS_UNPUBLISHED, applied.blocks_removed)
        if applied.error is not None:
            self._counters.add(metadata_metrics.PUBLISH_GAPS)
        return applied

    async def _read(self, requests: AsyncIterator[PublishRequest]) -> None:
        try:
            async for request in requests:
                await self._queue.put(await self._check(request))
        except KVStoreError as error:
            await self._queue.put(error)
        except grpc.aio.UsageError as error:  # gRPC raises it if the server has stopped or the call has ended
            logger.info("publish stream ended: %s", error)
            await self._queue.put(None)
        except Exception as error:  # process edge: without an item in the queue the stream would wait forever
            logger.exception("publish stream unreadable")
            await self._queue.put(Internal("the publish stream cannot be read", cause=type(error).__name__))
        else:
            await self._queue.put(None)

    async def _check(self, request: PublishRequest) -> PublishBatch:
        """Check a message: its shape first, then whether the boot has registered the volume."""
        identity = NodeId(check_name(request.node_id, "node_id")), BootId(check_id(request.boot_id, "boot_id"))
        if self._identity is None:
            self._identity = identity
        elif self._identity != identity:
            raise InvalidArgument("node_id and boot_id must not change within a publish stream", node_id=request.node_id)
        if request.sequence < 1:
            raise InvalidArgument("sequence must be at least 1")
        volume_id = VolumeId(check_name(request.volume_id, "volume_id"))
        removed_count = len(request.removed) // KEY_BYTES
        if removed_count > limits.MAX_KEYS_PER_CALL:
            raise InvalidArgument("too many keys in one call", got=removed_count, limit=limits.MAX_KEYS_PER_CALL)
        return PublishBatch(
            sequence=request.sequence,
            volume_id=volume_id,
            volume_epoch=await self._nodes.known_volume_epoch(*identity, volume_id),
            stored=runs_from_proto(request.stored, limits.MAX_KEYS_PER_CALL - removed_count),
            removed=keys_from_packed(request.removed, "removed"),
            sync_end=request.sync_end,
        )
