"""A gRPC server that counts the calls of any method and answers as the test says."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvproto.v1 import admin_pb2, metadata_pb2
from kvstore.core.errors import Unavailable
from kvstore.rpc.errors import NOT_EXECUTED, USE_ANOTHER_SERVER, abort_arguments
from kvstore.rpc.failover.rpc_rules import FORWARDED_TO
from kvstore.rpc.health_probe import SHARED_STATE

Behaviour = Callable[["ScriptedServer", grpc.ServicerContext], bytes]
STREAMS = {
    method.full_name.rpartition(".")[2]
    for file in (metadata_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.server_streaming
}


def answer(server: ScriptedServer, _context: grpc.ServicerContext) -> bytes:
    """Answer with the address."""
    return server.address.encode()


def lose_connection(_server: ScriptedServer, context: grpc.ServicerContext) -> bytes:
    """Execute the call and fail as gRPC does if the connection is lost."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    raise AssertionError


def say_unavailable(_server: ScriptedServer, context: grpc.ServicerContext) -> bytes:
    """Answer with the store's own error."""
    code, message, metadata = abort_arguments(Unavailable("the index is closed"))
    context.set_trailing_metadata(metadata)
    context.abort(code, message)
    raise AssertionError


def reject(_server: ScriptedServer, context: grpc.ServicerContext) -> bytes:
    """Answer that the call failed and changed nothing."""
    code, message, metadata = abort_arguments(Unavailable("a shard is away", **{NOT_EXECUTED: "yes"}))
    context.set_trailing_metadata(metadata)
    context.abort(code, message)
    raise AssertionError


def forward(server: ScriptedServer, context: grpc.ServicerContext) -> bytes:
    """Answer as a server that forwarded the call."""
    context.set_trailing_metadata(((FORWARDED_TO, "planner"),))
    return server.address.encode()


def send_elsewhere(_server: ScriptedServer, context: grpc.ServicerContext) -> bytes:
    """Answer that this server cannot serve the caller, while others may."""
    code, message, metadata = abort_arguments(Unavailable("no index", **{USE_ANOTHER_SERVER: "yes"}))
    context.set_trailing_metadata(metadata)
    context.abort(code, message)
    raise AssertionError


def hang(server: ScriptedServer, _context: grpc.ServicerContext) -> bytes:
    """Answer only after ``release``."""
    server.released.wait(30.0)
    return server.address.encode()


class ScriptedServer(grpc.GenericRpcHandler):
    """A server at a fixed address: start, stop and start again.

    Args:
        address: to listen on; port 0: any free port.
        shares_state: whether it shares its whole state with other servers; False: it does not say; None: it does not.
    """

    def __init__(self, address: str = "127.0.0.1:0", *, shares_state: bool | None = None) -> None:
        self.address = address
        self.shares_state = shares_state
        self.behaviour: Behaviour = answer
        self.calls: Counter[str] = Counter()
        self.released = threading.Event()
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._health = health.HealthServicer()
        self.start()

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        self._health = health.HealthServicer()
        if self.shares_state is not None:
            self.say_shared(self.shares_state)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((self,))
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{self._server.add_insecure_port(self.address)}"
        self._server.start()

    def say_shared(self, serving: bool) -> None:
        """Say from now on that it shares its state, or with False do not say whether it does."""
        status = health_pb2.HealthCheckResponse
        self._health.set(SHARED_STATE, status.SERVING if serving else status.NOT_SERVING)

    def stop(self) -> None:
        """Close all connections at once."""
        self.released.set()
        if self._server is not None:
            self._server.stop(0).wait(10.0)
            self._server = None
        if self._threads is not None:
            self._threads.shutdown()

    def service(self, details: Any) -> grpc.RpcMethodHandler[bytes, bytes] | None:  # untyped in gRPC
        name = details.method.rpartition("/")[2]
        if details.method.startswith("/grpc.health"):
            return None
        if name in STREAMS:
            return grpc.stream_stream_rpc_method_handler(self._stream)

        def unary(_request: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls[name] += 1
            return self.behaviour(self, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    def _stream(self, requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer each message with the address."""
        for _ in requests:
            yield self.address.encode()
