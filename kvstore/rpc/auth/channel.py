"""Client side of authentication: send a token, and the calling node's id, with every call of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio

from kvstore.rpc.auth.interceptor import AUTHORIZATION, NODE_ID
from kvstore.rpc.auth.tokens import TokenSource

# arguments and results of a stub's methods, passed through
Given = Any


class _Call:
    """A method of a stub that adds a channel's metadata to each call."""

    def __init__(self, method: Given, metadata_of: Callable[[Given], Given]) -> None:
        self._method = method
        self._with_metadata = metadata_of

    def __call__(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        return self._method(request, timeout=timeout, metadata=self._with_metadata(metadata), **more)

    def with_call(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        """As the method of the same name in gRPC."""
        return self._method.with_call(request, timeout=timeout, metadata=self._with_metadata(metadata), **more)

    def future(self, request: Given, timeout: float | None = None, metadata: Given = None, **more: Given) -> Given:
        """As the method of the same name in gRPC."""
        return self._method.future(request, timeout=timeout, metadata=self._with_metadata(metadata), **more)


class TokenChannel(grpc.Channel):
    """Synchronous channel that sends a token, and a node's id, with every call.

    gRPC's client interceptors create the method for each call. If another thread has closed the channel, that is a segmentation
    fault. Here methods are created with the stub, and a call on a closed channel raises ``ValueError``.

    Args:
        channel: the channel; closed with this one.
        token: sent with every call; None: no token.
        node_id: id of the calling node; None: the caller is not a node. It is not authenticated and only explains refused calls.
    """

    def __init__(self, channel: grpc.Channel, token: TokenSource | None, node_id: str | None = None) -> None:
        self._channel = channel
        self._token = token
        self._fixed = [] if node_id is None else [(NODE_ID, node_id)]

    def _with_metadata(self, metadata: Given) -> list[tuple[str, str]]:
        metadata_of = [*(metadata or ()), *self._fixed]
        if self._token is not None:
            metadata_of.append((AUTHORIZATION, f"Bearer {self._token.get()}"))
        return metadata_of

    def unary_unary(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.unary_unary(*method, **more), self._with_metadata)

    def unary_stream(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.unary_stream(*method, **more), self._with_metadata)

    def stream_unary(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.stream_unary(*method, **more), self._with_metadata)

    def stream_stream(self, *method: Given, **more: Given) -> Given:
        return _Call(self._channel.stream_stream(*method, **more), self._with_metadata)

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
    def __init__(self, token: TokenSource) -> None:
        self._token = token

    async def call(self, continuation: Callable[..., Given], details: Given, request: Given) -> Given:
        shown = grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION, f"Bearer {self._token.get()}")),
            details.credentials,
            details.wait_for_ready,
        )
        return await continuation(shown, request)


class _UnaryUnary(_Aio, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _Aio.call  # type: ignore[assignment]


class _UnaryStream(_Aio, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _Aio.call  # type: ignore[assignment]


class _StreamUnary(_Aio, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary = _Aio.call  # type: ignore[assignment]


class _StreamStream(_Aio, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _Aio.call  # type: ignore[assignment]


def token_interceptors(token: TokenSource) -> list[grpc.aio.ClientInterceptor]:
    """Interceptors that send the token, one per arity, for ``grpc.aio`` channels."""
    return [_UnaryUnary(token), _UnaryStream(token), _StreamUnary(token), _StreamStream(token)]  # type: ignore[list-item]
