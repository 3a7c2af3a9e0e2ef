"""grpc.aio servers with the store's error mapping, limits, health service, reflection and TLS.

Handlers raise ``KVStoreError``; :class:`ErrorInterceptor` converts it to a gRPC status, for unary and streaming methods. Any
other exception becomes ``Internal``: the server logs the traceback and counts it, and the client gets no internals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # not re-exported for type checkers
from grpc_reflection.v1alpha import reflection

from kvstore.core import limits
from kvstore.core.errors import Internal, InvalidArgument, KVStoreError
from kvstore.observe import tracing
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metrics import Event, TimedEvent
from kvstore.process.fd_limits import connections_allowed
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import cannot_listen, check_address, is_unix
from kvstore.rpc.auth.interceptor import AuthInterceptor, RefusedNode
from kvstore.rpc.auth.tokens import TokenTable, WatchedFile
from kvstore.rpc.errors import abort_arguments
from kvstore.rpc.tls import server_credentials
from kvstore.rpc.tls_connections import TlsConnections

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

METADATA_SERVICE: Final = "kvstore.v1.Metadata"
"""At a node, the health of this service is whether the metadata server accepts the node's reports."""
MAX_CONCURRENT_RPCS: Final = 4_096
"""Concurrent calls. gRPC rejects more with RESOURCE_EXHAUSTED, which clients may retry."""
_KEEPALIVE_TIME_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_MIN_CLIENT_PING_MS: Final = 5_000
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""Time limit of a new connection's TLS and HTTP/2 handshakes."""
_IDLE_CONNECTION_MS: Final = 600_000
"""A connection without calls is closed after this time. Clients reconnect at their next call."""

Context: TypeAlias = Any
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CounterSink(Protocol):
    """Registry of counters: ``kvstore.observe.counters.Counters`` or a fake."""

    def add(self, name: Event, amount: int = 1) -> None:
        """Add to a total."""

    def observe(self, name: TimedEvent, value: float) -> None:
        """Add a value to a histogram."""


class _DisconnectFilter(logging.Filter):
    """Suppress gRPC's log lines about responses whose client has disconnected, and count them.

    gRPC logs each with a traceback, as an error. Any client causes one by disconnecting, and nothing is lost.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        server = _serving.get(None)
        if server is not None:
            server.add(common_metrics.RPC_CALLERS_GONE)
        logger.debug("client disconnected before its response: %s", error)
        return False


_serving: ContextVar[CounterSink] = ContextVar("kvstore_serving")
"""Counters of the server whose call this task handles."""
_DISCONNECT_FILTER: Final = _DisconnectFilter()


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Convert exceptions of handlers to gRPC status, measure the handlers, and extract the request id of each call.

    Wrapped handlers are cached, so that the overhead per call is one dictionary lookup, two stack frames and two clock reads.

    Args:
        counters: registry for errors and durations.
        connections: connections of a TLS port, to record the peers of calls; None: no TLS port.
    """

    def __init__(self, counters: CounterSink, connections: TlsConnections | None = None) -> None:
        self._counters = counters
        self._connections = connections
        self._wrapped: dict[str, Handler] = {}  # only existing methods, so bounded

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # type: ignore[unreachable]  # unknown method: gRPC responds; the stubs do not know None
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            wrapped = self._wrapped[method] = self._wrap(handler, method.rpartition("/")[2])
        # gRPC runs each call, its handler included, in one task with its own context
        _serving.set(self._counters)
        tracing.extract(handler_call_details.invocation_metadata)
        return wrapped

    def _wrap(self, handler: Any, name: str) -> Handler:  # noqa: ANN401  # grpc's handler tuple is untyped
        decode = decoder(handler.request_deserializer, streamed=handler.request_streaming)
        codec = {"request_deserializer": decode, "response_serializer": handler.response_serializer}
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._guard_unary(name, handler.unary_unary), **codec)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._guard_unary(name, handler.stream_unary), **codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._guard_stream(name, handler.unary_stream), **codec)
        return grpc.stream_stream_rpc_method_handler(self._guard_stream(name, handler.stream_stream), **codec)

    def _guard_unary(self, name: str, behaviour: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        timed = common_metrics.RPC_SECONDS.get(name)

        async def guarded(request: object, context: Context) -> object:
            began_s = time.perf_counter()
            if self._connections is not None:
                self._connections.called(context)
            try:
                check_decoded(request)
                if tracing.on():
                    with tracing.server_span(name, context.invocation_metadata()):
                        return await behaviour(request, context)
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise  # health and reflection abort by themselves
            except Exception as error:  # noqa: BLE001  # every exception becomes a status
                await self._abort(name, error, context)
            finally:
                if timed is not None:
                    self._counters.observe(timed, time.perf_counter() - began_s)

        return guarded

    def _guard_stream(self, name: str, behaviour: Callable[..., AsyncIterator[object]]) -> Callable[..., AsyncIterator[object]]:
        timed = common_metrics.RPC_SECONDS.get(name)

        async def guarded(request: object, context: Context) -> AsyncIterator[object]:
            began_s = time.perf_counter()
            if self._connections is not None:
                self._connections.called(context)
            try:
                check_decoded(request)
                with tracing.server_span(name, context.invocation_metadata() if tracing.on() else None):
                    async for response in behaviour(request, context):
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  # as above
                await self._abort(name, error, context)
            finally:
                if timed is not None:
                    self._counters.observe(timed, time.perf_counter() - began_s)

        return guarded

    async def _abort(self, name: str, error: Exception, context: Context) -> NoReturn:
        if not isinstance(error, KVStoreError):
            self._counters.add(common_metrics.RPC_UNEXPECTED_ERRORS)
            logger.error("handler failed: %s", name, exc_info=error)
            error = Internal("internal error; the server's log has the details")
        if isinstance(error, UnreadableRequest):
            self._counters.add(common_metrics.RPC_UNREADABLE_REQUESTS)
            limited.warning("request rejected: %s (method=%s, peer=%s)", error, name, context.peer())
        self._counters.add(common_metrics.RPC_ERRORS[error.kind.value])
        code, message, metadata = abort_arguments(error)
        await context.abort(code, message, metadata)
        raise AssertionError("abort always raises")


@dataclass(frozen=True, slots=True)
class BoundServer:
    """A server with bound addresses that is not started yet.

    Args:
        server: the gRPC server.
        addresses: its addresses in the requested order, with actual port numbers.
        health: the standard health servicer.
    """

    server: grpc.aio.Server
    addresses: tuple[str, ...]
    health: Any

    async def start(self) -> None:
        """Start serving."""
        await self.server.start()

    async def show_serving(self, service: str, *, serving: bool) -> None:
        """Set the health of one service. The health of the server as a whole does not change."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, reject new calls, and wait up to ``grace_s`` for running calls."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def build_aio_server(
    register: Sequence[Callable[[grpc.aio.Server], None]],
    *,
    addresses: Sequence[str],
    services: Sequence[str],
    counters: CounterSink,
    tls: TlsConfig | None = None,
    tokens: WatchedFile[TokenTable] | None = None,
    on_refused_node: Callable[[RefusedNode], None] | None = None,
    max_message_bytes: int = limits.MAX_CONTROL_MESSAGE_BYTES,
) -> BoundServer:
    """Build a server and bind its addresses. Must run on the event loop that will serve.

    Args:
        register: each adds one servicer, e.g. ``functools.partial(add_NodeServicer_to_server, servicer)``.
        addresses: ``"host:port"`` (port 0: any free port) or ``"unix:/path"``.
        services: full names of the services, for health and reflection.
        counters: registry for errors and durations.
        tls: identity for the TCP addresses. Unix sockets do not use TLS; file permissions protect them.
        tokens: the token file (``kvstore.rpc.auth``), checked on unix sockets too; None: every caller has every permission.
        on_refused_node: called with each call refused for its token that claims to come from a node.
        max_message_bytes: maximum size of a request and a response.

    Raises:
        InvalidArgument: an address is invalid, or a TLS file cannot be read.
        Unavailable: an address cannot be bound.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_DISCONNECT_FILTER)  # adding a filter twice has no effect
    connections = None if tls is None else TlsConnections(counters.add)
    authorization = [] if tokens is None else [AuthInterceptor(tokens, counters.add, on_refused_node, connections)]
    server = grpc.aio.server(
        interceptors=[*authorization, ErrorInterceptor(counters, connections)],
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_CLIENT_PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            # a listener closes connections above its share, so that descriptors are left for the others
            ("grpc.max_allowed_incoming_connections", connections_allowed()),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
            ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        ],
    )
    for add in register:
        add(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in ("", *services):
        await health.set(service, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*services, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    try:
        credentials = None if tls is None or connections is None else server_credentials(tls, connections.begun)
        setting = f"{services[0].rpartition('.')[2].lower()}.listen" if services else "listen"
        bound = tuple(_bind(server, address, credentials, setting) for address in addresses)
    except KVStoreError:
        await server.stop(None)  # releases the bound addresses
        raise
    if connections is not None:
        connections.watch(next((int(one.rpartition(":")[2]) for one in bound if not is_unix(one)), 0))
    return BoundServer(server, bound, health)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, setting: str) -> str:
    local = is_unix(check_address(address))
    try:
        if credentials is not None and not local:
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise cannot_listen(address, setting) from error
    if port == 0:
        raise cannot_listen(address, setting)
    return address if local else f"{address.rpartition(':')[0]}:{port}"


class UnreadableRequest(InvalidArgument):
    """The bytes of a request are not a valid message. Sent as an ordinary ``InvalidArgument``.

    gRPC alone would respond with ``UNKNOWN`` and log a traceback for each such request.
    """


def decoder(deserialize: Callable[[bytes], object], *, streamed: bool) -> Callable[[bytes], object]:
    """A deserializer for a handler that the server's error interceptor wraps.

    Args:
        deserialize: the method's deserializer.
        streamed: whether the method has a stream of requests. The handler reads a stream, so the error is raised there and ends
            the handler. gRPC decodes a single request before the handler begins, so the error is returned in its place.
    """

    def decode(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            refused = UnreadableRequest("the request is not a valid message of this method", request_bytes=len(data))
            if streamed:
                raise refused from error
            return refused

    return decode


def check_decoded(request: object) -> None:
    """Check a request before its handler begins.

    Raises:
        UnreadableRequest: the request could not be decoded.
    """
    if isinstance(request, UnreadableRequest):
        raise request
