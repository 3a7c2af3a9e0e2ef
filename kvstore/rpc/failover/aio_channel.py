"""A gRPC channel over several metadata servers, for an event loop: unary calls only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NoReturn, Self

import grpc
import grpc.aio

from kvstore.core.errors import Unavailable
from kvstore.process.tls import TlsConfig
from kvstore.rpc.failover.attempts import UnaryAttempts, deadline_of
from kvstore.rpc.failover.rpc_rules import rule_of
from kvstore.rpc.failover.servers import MetadataServers

# arguments and results of a stub's methods, passed through
Given = Any

_DROP_GRACE_S: Final = 5.0

OpenAio = Callable[[str, TlsConfig | None], grpc.aio.Channel]
"""Opens a channel to one address."""


class AioFailoverChannel(grpc.aio.Channel):
    """As ``FailoverChannel``, for the running event loop. The metadata server's streams are read by threads only.

    Args:
        servers: the servers; closed with the channel.
        open_channel: opens the channel to one server.
    """

    def __init__(self, servers: MetadataServers, open_channel: OpenAio) -> None:
        self.servers = servers
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def channel_to(self, address: str) -> grpc.aio.Channel:
        """Return the channel to one server."""
        channel = self._channels.get(address)
        if channel is None:
            self._drop_unknown()
            channel = self._channels[address] = self._open_channel(address, self.servers.tls_of(address))
        return channel

    def _drop_unknown(self) -> None:
        """Close the channels to servers that DNS no longer has, after the calls on them."""
        for address in [address for address in self._channels if address not in self.servers.addresses]:
            closing = asyncio.create_task(self._channels.pop(address).close(_DROP_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    # ---- grpc.aio.Channel ----
    def unary_unary(self, method: str, *more: Given, **named: Given) -> Given:
        return _AioUnary(self, method, more, named)

    def unary_stream(self, *_method: Given, **_named: Given) -> Given:
        return _no_stream

    def stream_unary(self, *_method: Given, **_named: Given) -> Given:
        return _no_stream

    def stream_stream(self, *_method: Given, **_named: Given) -> Given:
        return _no_stream

    def get_state(self, try_to_connect: bool = False) -> NoReturn:
        raise NotImplementedError("the state of a channel to several servers is not defined")

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> NoReturn:
        raise NotImplementedError("the state of a channel to several servers is not defined")

    async def channel_ready(self) -> NoReturn:
        raise NotImplementedError("the state of a channel to several servers is not defined")

    async def close(self, grace: float | None = None) -> None:
        await asyncio.to_thread(self.servers.close)
        for channel in self._channels.values():
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _AioUnary:
    """A unary method of a stub: one gRPC method per server, made when it is first called there."""

    def __init__(self, channel: AioFailoverChannel, method: str, more: tuple[Given, ...], named: dict[str, Given]) -> None:
        self._channel = channel
        self._servers = channel.servers
        self._rule = rule_of(method)
        self._given = ((method, *more), named)
        self._made: dict[str, tuple[grpc.aio.Channel, Given]] = {}

    async def __call__(  # as gRPC declares it
        self,
        request: Given,
        timeout: float | None = None,  # noqa: ASYNC109
        metadata: Given = None,
        **more: Given,
    ) -> Given:
        loop = asyncio.get_running_loop()
        deadline_s = deadline_of(timeout)
        if not self._servers.is_ready(self._rule.placement):
            await asyncio.to_thread(self._servers.wait_ready, self._rule.placement, timeout)
        attempts = UnaryAttempts(self._servers, self._rule, deadline_s, wait=False)
        while True:
            method = self._on(attempts.address)
            server = self._servers.watched(attempts.address)
            sent = False
            try:
                server.check()
                call = method(request, timeout=attempts.timeout_s, metadata=metadata, **more)
                sent = True
                with server.waiting(lambda call=call: loop.call_soon_threadsafe(call.cancel)) as wait:  # type: ignore[misc]
                    answer = await _result(call, lambda wait=wait: wait.cut)  # type: ignore[misc]
                trailing = await call.trailing_metadata() if attempts.planner else None
            except grpc.RpcError as error:
                if not attempts.failed(error):
                    raise
            except Unavailable as hung:
                if not attempts.hung(sent=sent):
                    raise attempts.hung_error(hung) from hung
            else:
                attempts.answered(trailing)
                return answer

    def _on(self, address: str) -> Given:
        channel = self._channel.channel_to(address)
        made = self._made.get(address)
        if made is None or made[0] is not channel:
            made = self._made[address] = (channel, channel.unary_unary(*self._given[0], **self._given[1]))
        return made[1]


async def _result(call: Given, cut: Callable[[], bool]) -> Given:
    """Wait for a call. A call that was cancelled because its server is hung raises an error instead of ``CancelledError``."""
    try:
        return await call
    except asyncio.CancelledError:
        if cut() and not _cancelled():
            raise Unavailable("the call was cancelled because its server is hung") from None
        raise


def _cancelled() -> bool:
    """Whether the running task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _no_stream(*_: Given, **_named: Given) -> NoReturn:
    raise NotImplementedError("streams of several metadata servers are read over the synchronous channel")
