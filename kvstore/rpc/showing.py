"""Sends a caller's token, and a node's id, with every call of a channel. A channel without both has no interceptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from kvstore.rpc.access import AUTHORIZATION, NODE_ID
from kvstore.rpc.tokens import Shown

# interceptors hand through whatever a stub gives, whose types are the stub's
Given = Any


class _Details(NamedTuple):
    """A call's details with other metadata. gRPC reads these by name."""

    method: Given
    timeout: Given
    metadata: Given
    credentials: Given
    wait_for_ready: Given
    compression: Given


class ShowsToken(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]  # generic in the stubs alone, all of these
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """For synchronous channels.

    Args:
        token: what to show; None: nothing.
        node_id: of the node that calls. It proves nothing: a server that refuses the call says in its figures whose it may be.
    """

    def __init__(self, token: Shown | None, node_id: str | None = None) -> None:
        self._token = token
        self._fixed = [] if node_id is None else [(NODE_ID, node_id)]

    def _call(self, continuation: Callable[..., Given], details: Given, request: Given) -> Given:
        metadata = [*(details.metadata or ()), *self._fixed]
        if self._token is not None:
            metadata.append((AUTHORIZATION, f"Bearer {self._token.get()}"))
        shown = _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )
        return continuation(shown, request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _call  # type: ignore[assignment]


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
