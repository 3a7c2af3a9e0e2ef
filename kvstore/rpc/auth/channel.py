"""Sends a caller's token, and a node's id, with every call of a channel. A channel without both has no interceptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio

from kvstore.rpc.auth.interceptor import AUTHORIZATION, NODE_ID
from kvstore.rpc.auth.tokens import Shown

# interceptors hand through whatever a stub gives, whose types are the stub's
Given = Any


class _Call:
    """A method of a stub, each call of which carries a channel's metadata."""

    def __init__(self, method: Given, carried: Callable[[Given], Given]) -> None:
        self._method = method
        self._carried = carried

    def __call__(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        return self._method(request, timeout=timeout, metadata=self._carried(metadata), **more)

    def with_call(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        """As gRPC's."""
        return self._method.with_call(request, timeout=timeout, metadata=self._carried(metadata), **more)

    def future(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        """As gRPC's."""
        return self._method.future(request, timeout=timeout, metadata=self._carried(metadata), **more)


class ShowingChannel(grpc.Channel):
    """A synchronous channel that sends a token, and a node's id, with every call.

    gRPC's own interceptors make a method anew for each call, and that ends the process (a segmentation fault) if another thread
    has closed the channel meanwhile. Here methods are made when a stub is, and a call on a closed channel raises ``ValueError``.

    Args:
        channel: the channel; closed with this one.
        token: sent with every call; None: none.
        node_id: of the node that calls; None: no node calls. It proves nothing and only explains refusals.
    """

    def __init__(self, channel: grpc.Channel, token: Shown | None, node_id: str | None = None) -> None:
        self._channel = channel
        self._token = token
        self._fixed = [] if node_id is None else [(NODE_ID, node_id)]

    def _carried(self, metadata: Given) -> list[tuple[str, str]]:
        carried = [*(metadata or ()), *self._fixed]
        if self._token is not None:
            carried.append((AUTHORIZATION, f"Bearer {self._token.get()}"))
        return carried

    def unary_unary(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.unary_unary(*method, **more), self._carried)

    def unary_stream(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.unary_stream(*method, **more), self._carried)

    def stream_unary(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.stream_unary(*method, **more), self._carried)

    def stream_stream(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.stream_stream(*method, **more), self._carried)

    def subscribe(self, callback: Given, try_to_connect: bool = False) -> None:  # gRPC's
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Given) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Aio:
    def __init__(self, token: Shown) -> None:
        self._token = token

    async def _call(self, continuation: Callable[..., Given], details: Given, request: Given) -> Given:
        shown = grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION, f"Bearer {self._token.get()}")),
            details.credentials,
            details.wait_for_ready,
        )
        return await continuation(shown, request)


class _UnaryUnary(_Aio, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _Aio._call  # type: ignore[assignment]


class _UnaryStream(_Aio, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _Aio._call  # type: ignore[assignment]


class _StreamUnary(_Aio, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary = _Aio._call  # type: ignore[assignment]


class _StreamStream(_Aio, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _Aio._call  # type: ignore[assignment]


def shows_token(token: Shown) -> list[grpc.aio.ClientInterceptor]:
    """The same for channels of an event loop, which take one interceptor a kind of call."""
    return [_UnaryUnary(token), _UnaryStream(token), _StreamUnary(token), _StreamStream(token)]  # type: ignore[list-item]
