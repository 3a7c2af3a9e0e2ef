"""A stream of block events and the mirror that is built from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from metadata_harness import TIMEOUT_S

from kvclient.events import BlockMirror
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.rpc.errors import from_rpc_error
from support.chains import chain

KEYS = chain("a", 40)


class Watch:
    """One stream and the mirror built from it."""

    def __init__(self, channel: grpc.aio.Channel, request: pb.WatchBlocksRequest | None = None) -> None:
        self.mirror = BlockMirror()
        self.events: list[pb.BlockEvent] = []
        self.reasons: list[int] = []
        self.call = metadata_pb2_grpc.MetadataStub(channel).WatchBlocks(request or pb.WatchBlocksRequest(), timeout=60)
        self.messages: AsyncIterator[pb.WatchBlocksResponse] = aiter(self.call)

    async def read(self) -> pb.WatchBlocksResponse:
        try:
            message = await asyncio.wait_for(anext(self.messages), TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self.mirror.apply(message)
        if message.WhichOneof("what") == "resync":
            self.reasons.append(message.resync.reason)
        self.events += message.events.events
        return message

    async def complete(self) -> None:
        while not self.mirror.complete:
            await self.read()

    async def held(self, expected: Sequence[bytes]) -> None:
        """Read until the mirror has exactly these keys."""
        while set(self.mirror) != set(expected):
            await self.read()

    async def served(self, volume: str, *, served: bool) -> None:
        while {one.volume_id: one.served for one in self.mirror.volumes}[volume] != served:
            await self.read()

    def resumed(self, **more: object) -> pb.WatchBlocksRequest:
        mirror = self.mirror
        return pb.WatchBlocksRequest(feed_id=mirror.feed_id, sequence=mirror.sequence, position=mirror.position, **more)
