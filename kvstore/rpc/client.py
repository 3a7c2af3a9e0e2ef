"""Channels and calls that raise our errors.

``call`` and ``call_aio`` add to a bare gRPC call only what turns its failure into a ``KVStoreError``: a try block. Retries are
asked for explicitly, stay inside the deadline, and send the very same request: mutating requests carry an operation id, which
makes the second arrival of a request whose answer was lost harmless.

Measured on loopback with 25.6 KB requests, one after the other: this wrapper, synchronous or asyncio channels, and the options
set below are all within noise of a bare call; nearly all the time is gRPC's own. Work for a named request, or
traced, takes its name along as metadata (``kvstore.observe.context``). Channel options that promise less threading
(``grpc.experimental.single_threaded_unary_stream``) touch server streams only. So: one channel, kept and shared.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

import grpc
import grpc.aio

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.observe.context import outgoing
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, is_unix
from kvstore.rpc.auth.channel import ShowingChannel, shows_token
from kvstore.rpc.auth.tokens import Shown
from kvstore.rpc.errors import FailedCall, from_rpc_error
from kvstore.rpc.tls import channel_credentials

_Request = TypeVar("_Request", contravariant=True)
_Response = TypeVar("_Response", covariant=True)
_Req = TypeVar("_Req")
_Res = TypeVar("_Res")

_KEEPALIVE_TIME_MS: Final = 20_000
_KEEPALIVE_TIMEOUT_MS: Final = 5_000
_RECONNECT_BACKOFF_MS: Final = (50, 1_000)
_CONNECT_TIMEOUT_MS: Final = 3_000
"""A connection is made within this, its handshakes included: a busy machine or a long way take their time, a dead host none."""


class UnaryMethod(Protocol[_Request, _Response]):
    """A unary method of a synchronous stub."""

    def __call__(
        self, request: _Request, timeout: float | None = None, *, metadata: list[tuple[str, str]] | None = None
    ) -> _Response:
        """Calls it."""


class AioUnaryMethod(Protocol[_Request, _Response]):
    """A unary method of an asyncio stub."""

    def __call__(
        self, request: _Request, timeout: float | None = None, *, metadata: list[tuple[str, str]] | None = None
    ) -> Awaitable[_Response]:
        """Calls it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how patiently, a call that failed retryably is sent again. Never past the call's deadline.

    Args:
        attempts: calls in all, the first included.
        first_backoff_s: mean wait before the second attempt; doubles from there.
        max_backoff_s: longest mean wait.
    """

    attempts: int = 3
    first_backoff_s: float = 0.02
    max_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_backoff_s < 0 or self.max_backoff_s < self.first_backoff_s:
            raise InvalidArgument("a retry policy takes at least one attempt and rising waits", policy=self)

    def backoffs_s(self) -> Iterator[float]:
        """Waits between attempts, spread by half either way so that many callers do not come back as one."""
        for attempt in range(self.attempts - 1):
            mean_s = min(self.first_backoff_s * 2**attempt, self.max_backoff_s)
            yield mean_s * random.uniform(0.5, 1.5)  # noqa: S311  # spreads load, guards nothing


NO_RETRY: Final = RetryPolicy(attempts=1)


def connect(
    address: str,
    *,
    tls: TlsConfig | None = None,
    token: Shown | None = None,
    node_id: str | None = None,
    max_message_bytes: int = limits.MAX_CONTROL_MESSAGE_BYTES,
    own_connection: bool = False,
) -> grpc.Channel:
    """A synchronous channel; connects when first used. Thread-safe: share it.

    Args:
        address: ``"host:port"`` or ``"unix:/path"``.
        tls: this side's identity and whom it trusts; None: plain text. Unix sockets are always plain.
        token: shown with every call; None: nothing is.
        node_id: of the node that calls, sent with every call (``kvstore.rpc.auth.interceptor``); None: no node calls.
        max_message_bytes: longest request and response.
        own_connection: use a connection of its own instead of the process's one to that address, so that several
            channels spread over the processes behind one port.

    Raises:
        InvalidArgument: the address is none, or a TLS file cannot be read.
    """
    options = _options(tls, max_message_bytes, own_connection=own_connection)
    if tls is None or is_unix(check_address(address)):
        channel = grpc.insecure_channel(check_address(address), options=options)
    else:
        channel = grpc.secure_channel(address, channel_credentials(tls), options=options)
    if token is None and node_id is None:
        return channel
    return ShowingChannel(channel, token, node_id)


def connect_aio(
    address: str,
    *,
    tls: TlsConfig | None = None,
    token: Shown | None = None,
    max_message_bytes: int = limits.MAX_CONTROL_MESSAGE_BYTES,
    own_connection: bool = False,
) -> grpc.aio.Channel:
    """As :func:`connect`, for the running event loop."""
    options = _options(tls, max_message_bytes, own_connection=own_connection)
    shows = None if token is None else shows_token(token)
    if tls is None or is_unix(check_address(address)):
        return grpc.aio.insecure_channel(check_address(address), options=options, interceptors=shows)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options, interceptors=shows)


def call(method: UnaryMethod[_Req, _Res], request: _Req, timeout_s: float, retry: RetryPolicy = NO_RETRY) -> _Res:
    """Calls a unary method and raises our errors.

    Args:
        method: a stub's method, e.g. ``MetadataStub(channel).Lookup``.
        request: its request; sent again unchanged where the policy retries.
        timeout_s: for all attempts and waits together.
        retry: what to do about retryable failures.

    Raises:
        KVStoreError: of the class that the server raised, or that the failure of the connection stands for.
    """
    deadline_s = time.monotonic() + timeout_s
    backoffs = retry.backoffs_s()
    left_s = timeout_s
    metadata = outgoing()
    while True:
        try:
            return method(request, timeout=left_s) if metadata is None else method(request, timeout=left_s, metadata=metadata)
        except grpc.RpcError as failed:
            error = from_rpc_error(cast("FailedCall", failed))
            wait_s = _wait_before_next(error, backoffs, deadline_s)
            if wait_s is None:
                raise error from failed
        except ValueError as closed:  # how a closed synchronous channel answers
            raise Unavailable("the channel is closed") from closed
        time.sleep(wait_s)
        left_s = deadline_s - time.monotonic()


def call_cancellable(
    method: Any,  # noqa: ANN401 - gRPC's stubs are untyped here
    request: object,
    timeout_s: float,
    scope: Callable[[Callable[[], object]], AbstractContextManager[object]],
    retry: RetryPolicy = NO_RETRY,
) -> Any:  # noqa: ANN401
    """As :func:`call`, but the wait can be ended from another thread. A start costs about 0.05 ms more.

    Args:
        method: as for ``call``.
        request: as for ``call``.
        timeout_s: as for ``call``.
        scope: takes what cancels the wait, and surrounds each attempt. It turns what a cancellation raises into its own error.
        retry: as for ``call``.
    """

    def attempt(request: object, timeout: float | None = None, *, metadata: list[tuple[str, str]] | None = None) -> object:
        future = method.future(request, timeout=timeout, **({} if metadata is None else {"metadata": metadata}))
        with scope(future.cancel):
            return future.result()

    return call(attempt, request, timeout_s, retry)


async def call_aio(method: AioUnaryMethod[_Req, _Res], request: _Req, timeout_s: float, retry: RetryPolicy = NO_RETRY) -> _Res:
    """As :func:`call`, for a stub on an asyncio channel."""
    deadline_s = time.monotonic() + timeout_s
    backoffs = retry.backoffs_s()
    left_s = timeout_s
    metadata = outgoing()
    while True:
        try:
            if metadata is None:
                return await method(request, timeout=left_s)
            return await method(request, timeout=left_s, metadata=metadata)
        except grpc.RpcError as failed:
            error = from_rpc_error(cast("FailedCall", failed))
            wait_s = _wait_before_next(error, backoffs, deadline_s)
            if wait_s is None:
                raise error from failed
        except grpc.aio.UsageError as closed:
            raise Unavailable("the channel is closed") from closed
        await asyncio.sleep(wait_s)
        left_s = deadline_s - time.monotonic()


def _wait_before_next(error: KVStoreError, backoffs: Iterator[float], deadline_s: float) -> float | None:
    """How long to wait before the next attempt; None: give up, because it cannot help or not within the deadline."""
    if not error.retryable:
        return None
    wait_s = next(backoffs, None)
    if wait_s is None or time.monotonic() + wait_s >= deadline_s:
        return None
    return wait_s


def _options(tls: TlsConfig | None, max_message_bytes: int, *, own_connection: bool) -> list[tuple[str, Any]]:
    first_ms, max_ms = _RECONNECT_BACKOFF_MS
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # a server that was restarted is found again soon: the library's own first wait is a second, its last two minutes
        ("grpc.initial_reconnect_backoff_ms", first_ms),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),  # this bounds an attempt, whatever its name says
        ("grpc.max_reconnect_backoff_ms", max_ms),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
        ("grpc.enable_http_proxy", 0),  # the environment's web proxy has no business between our processes
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
