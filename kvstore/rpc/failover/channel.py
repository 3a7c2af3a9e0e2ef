"""A synchronous gRPC channel over several metadata servers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, Self

import grpc

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.rpc.failover.attempts import UnaryAttempts, deadline_of, failure_of, unavailable
from kvstore.rpc.failover.rpc_rules import RpcRule, rule_of
from kvstore.rpc.failover.selection import Failure
from kvstore.rpc.failover.servers import MetadataServers, Open
from kvstore.transport.liveness import WatchedServer

# arguments and results of a stub's methods, passed through
Given = Any

_CLOSED: Final = "the channel is closed"


class FailoverChannel(grpc.Channel):
    """Sends each call to the metadata server in use. A unary call that failed is repeated on another one, if its rule allows it.

    A stream stays on its server. If calls change to another server, it ends with UNAVAILABLE, and its caller opens another one.

    Args:
        servers: the servers; closed with the channel.
        open_channel: opens the channel to one server.
    """

    def __init__(self, servers: MetadataServers, open_channel: Open) -> None:
        self.servers = servers
        self._open_channel = open_channel
        self._lock = threading.Lock()
        self._closed = False
        self._channels: dict[str, grpc.Channel] = {}
        self._retired: list[grpc.Channel] = []
        self._streams: weakref.WeakSet[FailoverStream] = weakref.WeakSet()
        servers.on_change = self._on_change

    def channel_to(self, address: str) -> grpc.Channel:
        """Return the channel to one server.

        Raises:
            ValueError: this channel is closed.
        """
        channel = self._channels.get(address)
        if channel is not None:  # the common case needs no lock
            return channel
        with self._lock:
            if self._closed:
                raise ValueError(_CLOSED)
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._open_channel(address, self.servers.tls_of(address))
            return channel

    def add_stream(self, stream: FailoverStream) -> None:
        """Add an open stream, which ends if calls change to another server."""
        with self._lock:
            self._streams.add(stream)

    def _on_change(self) -> None:
        with self._lock:
            known = self.servers.addresses
            retired, self._retired = self._retired, []
            for address in [address for address in self._channels if address not in known]:
                self._retired.append(self._channels.pop(address))  # closed at the next change: calls may be under way
            streams = list(self._streams)
        if retired:  # this may run in the thread of gRPC in which calls of one of them end, and closing waits for these calls
            try:
                threading.Thread(target=_close_all, args=(retired,), name="kvstore-close-channels", daemon=True).start()
            except RuntimeError:  # no more threads: the next change tries again
                with self._lock:
                    self._retired += retired
        for stream in streams:
            stream.leave_unless_current()

    # ---- grpc.Channel ----
    def unary_unary(self, method: str, *more: Given, **named: Given) -> Given:
        return _Unary(self, method, more, named)

    def unary_stream(self, method: str, *more: Given, **named: Given) -> Given:
        return _StreamMethod(self, "unary_stream", method, more, named)

    def stream_stream(self, method: str, *more: Given, **named: Given) -> Given:
        return _StreamMethod(self, "stream_stream", method, more, named)

    def stream_unary(self, *_method: Given, **_named: Given) -> Given:
        raise NotImplementedError("no RPC of the metadata server has this arity")

    def subscribe(self, callback: Given, try_to_connect: bool = False) -> None:  # gRPC's
        raise NotImplementedError("the state of a channel to several servers is not defined")

    def unsubscribe(self, callback: Given) -> None:
        raise NotImplementedError("the state of a channel to several servers is not defined")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = [*self._channels.values(), *self._retired]
            self._channels.clear()
            self._retired.clear()
        self.servers.close()
        _close_all(channels)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_all(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()


class _Method:
    """A method of a stub: one gRPC method per server, made when it is first called there."""

    def __init__(
        self, channel: FailoverChannel, arity: str, method: str, more: tuple[Given, ...], named: dict[str, Given]
    ) -> None:
        self._channel = channel
        self._servers = channel.servers
        self._rule: RpcRule = rule_of(method)
        self._arity = arity
        self._given = ((method, *more), named)
        self._made: dict[str, tuple[grpc.Channel, Given, WatchedServer]] = {}

    def _on(self, address: str) -> tuple[Given, WatchedServer]:
        channel = self._channel.channel_to(address)
        made = self._made.get(address)
        if made is None or made[0] is not channel:
            method = getattr(channel, self._arity)(*self._given[0], **self._given[1])
            made = self._made[address] = (channel, method, self._servers.watched(address))
        return made[1], made[2]


class _Unary(_Method):
    """A unary method."""

    def __init__(self, channel: FailoverChannel, method: str, more: tuple[Given, ...], named: dict[str, Given]) -> None:
        super().__init__(channel, "unary_unary", method, more, named)

    def __call__(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        deadline_s = deadline_of(timeout)
        if not self._servers.is_ready(self._rule.placement):
            self._servers.wait_ready(self._rule.placement, timeout)
        attempts = UnaryAttempts(self._servers, self._rule, deadline_s, wait=bool(more.get("wait_for_ready")))
        while True:
            method, server = self._on(attempts.address)
            sent = False
            try:
                server.check()
                sent = True
                trailing = None
                if attempts.long:
                    ended = self._cancellable(method, server, request, attempts.timeout_s, metadata, more)
                    answer = ended.result()
                    trailing = ended.trailing_metadata() if attempts.planner else None
                elif attempts.planner:
                    with server.waiting(_nothing):
                        answer, ended = method.with_call(request, timeout=attempts.timeout_s, metadata=metadata, **more)
                    trailing = ended.trailing_metadata()
                else:
                    with server.waiting(_nothing):
                        answer = method(request, timeout=attempts.timeout_s, metadata=metadata, **more)
            except grpc.RpcError as error:
                if not attempts.failed(error):
                    raise
            except Unavailable as hung:
                if not attempts.hung(sent=sent):
                    raise attempts.hung_error(hung) from hung
            else:
                attempts.answered(trailing)
                return answer

    @staticmethod
    def _cancellable(
        method: Given, server: WatchedServer, request: Given, timeout_s: float | None, metadata: Given, more: dict[str, Given]
    ) -> Given:
        """Call a method on a server. Returns the successful call; raises ``Unavailable`` if the server becomes hung."""
        future = method.future(request, timeout=timeout_s, metadata=metadata, **more)
        with server.waiting(future.cancel):
            future.result()
        return future

    def future(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        """Start a call on the server in use. It is not repeated."""
        if not self._servers.is_ready(self._rule.placement):
            self._servers.wait_ready(self._rule.placement, timeout)
        route = self._servers.pick(self._rule.placement)
        known = self._servers.addresses
        if route is None and not known:
            raise ValueError(str(self._servers.no_server()))
        address = known[0] if route is None else route.address

        def ended(done: Given) -> None:
            error = done.exception() if not done.cancelled() else None
            failure = failure_of(error) if isinstance(error, grpc.RpcError) else None
            if failure is not None and failure is not Failure.TIMEOUT:
                self._servers.failed(address, failure)

        method, _ = self._on(address)
        started = method.future(request, timeout=timeout, metadata=metadata, **more)
        started.add_done_callback(ended)
        return started


class _StreamMethod(_Method):
    """A method whose answer is a stream."""

    def __call__(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> FailoverStream:
        if not self._servers.is_ready(self._rule.placement):
            self._servers.wait_ready(self._rule.placement, timeout)
        route = self._servers.pick(self._rule.placement)
        if route is None:
            return FailoverStream(self._servers, self._rule, "", None, None)
        method, server = self._on(route.address)
        call = method(request, timeout=timeout, metadata=metadata, **more)
        stream = FailoverStream(self._servers, self._rule, route.address, call, server if self._rule.watched else None)
        self._channel.add_stream(stream)
        stream.leave_unless_current()  # a change between the choice and the registration
        return stream


class FailoverStream:
    """A stream from one server: an iterator over its messages.

    Args:
        servers: the servers.
        rule: rule of the RPC.
        address: address of the server.
        call: gRPC's call; None: no server answers.
        server: to be probed while the caller waits for a message; None: it is not.
    """

    def __init__(self, servers: MetadataServers, rule: RpcRule, address: str, call: Given, server: WatchedServer | None) -> None:
        self._servers = servers
        self._rule = rule
        self._address = address
        self._call = call
        self._server = server
        self._left = False
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Given:
        if self._call is None:
            raise unavailable(str(self._servers.no_server()))
        try:
            with nullcontext() if self._server is None else self._server.waiting(self._call.cancel):
                return next(self._call)
        except StopIteration:
            self._over = True
            raise
        except KVStoreError as hung:
            self._over = True
            self._servers.failed(self._address, Failure.HUNG)
            raise unavailable(str(hung)) from hung
        except grpc.RpcError as error:
            self._over = True
            if self._left:
                raise unavailable(f"the stream from {self._address} ended: calls go to another metadata server") from error
            failure = failure_of(error)
            if failure is not None and failure is not Failure.TIMEOUT:
                self._servers.failed(self._address, failure)
            raise

    def cancel(self) -> object:
        """End the stream."""
        self._over = True
        return None if self._call is None else self._call.cancel()

    def stalled(self) -> None:
        """Record that the server does not acknowledge what this stream sent: calls go to another one, if there is one."""
        if self._call is not None:
            self._servers.failed(self._address, Failure.STALLED)

    def leave_unless_current(self) -> None:
        """End the stream if calls go to another server now."""
        route = self._servers.pick(self._rule.placement)
        if self._call is not None and not self._over and (route is None or route.address != self._address):
            self._left = True
            self._call.cancel()


def _nothing() -> None:
    """Cancel nothing: the call has a short timeout."""
