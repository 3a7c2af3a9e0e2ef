"""Round trips to one gRPC server: its health, its kind, and a small call that is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.core.errors import DeadlineExceeded, KVStoreError, NotFound, PermissionDenied, Unauthenticated, Unavailable
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call, connect
from kvstore.rpc.diagnosis import Target
from kvstore.rpc.server import METADATA_SERVICE

NODE_SERVICE: Final = "kvstore.v1.Node"
CLIENT_TLS: Final = "[client.tls]"
CLIENT_TOKEN: Final = "client.token_file"  # noqa: S105  # the name of a setting


class ServerKind(StrEnum):
    """Kinds of servers that answer a ping."""

    METADATA = "metadata server"
    NODE = "node"
    ADMIN = "admin server"
    ROUTER = "router"
    UNKNOWN = "server"


class PingOutcome(StrEnum):
    """Result of a ping."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The server runs, but rejects the token or the role."""
    FAILED = "failed"
    """No answer, not serving, or another kind of server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingTarget:
    """A server to ping.

    Args:
        address: ``host:port``, ``unix:PATH``, or a URL (``http://…``, ``https://…``).
        kind: the expected kind; ``UNKNOWN``: any.
        name: node id, if known.
        tls: TLS files of this client; None: plain text.
        token: sent with the repeated call; the health check carries none.
        optional: the address is a default; a refused connection then does not count as a failure.
    """

    address: str
    kind: ServerKind = ServerKind.UNKNOWN
    name: str = ""
    tls: TlsConfig | None = None
    token: TokenSource | None = None
    optional: bool = False


@dataclass(slots=True, kw_only=True)
class PingResult:
    """Round trips to one server, and the reason if it did not answer."""

    kind: ServerKind
    name: str
    address: str
    outcome: PingOutcome = PingOutcome.ANSWERED
    detail: str = ""
    connect_s: float | None = None
    """Connection and first health check."""
    round_trips_s: list[float] = field(default_factory=list)

    def failed(self, detail: str, outcome: PingOutcome = PingOutcome.FAILED) -> PingResult:
        """Record a failure and return this result."""
        self.outcome, self.detail = outcome, detail
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in milliseconds, None without a round trip."""
        times = [1000 * one for one in self.round_trips_s]
        return {
            "server": self.kind.value,
            "name": self.name,
            "address": self.address,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "count": len(times),
            "connect_ms": None if self.connect_s is None else round(1000 * self.connect_s, 3),
            "min_ms": round(min(times), 3) if times else None,
            "median_ms": round(median(times), 3) if times else None,
            "max_ms": round(max(times), 3) if times else None,
        }


def ping_grpc(target: PingTarget, count: int, timeout_s: float) -> PingResult:
    """Ping a gRPC server: a health check, then ``count`` small calls. Raises nothing that a server causes.

    Args:
        target: the server.
        count: repeated calls.
        timeout_s: limit of each call, and of the diagnosis of a failure.
    """
    result = PingResult(kind=target.kind, name=target.name, address=target.address)
    explained = Target(_the(target), target.address, target.tls, target.token, CLIENT_TLS, CLIENT_TOKEN)
    try:
        with (
            connect(target.address, tls=target.tls) as plain,
            connect(target.address, tls=target.tls, token=target.token) as channel,
        ):
            started_s = time.perf_counter()
            serving = _serving(plain, "", timeout_s)
            result.connect_s = time.perf_counter() - started_s
            result.kind = _kind(plain, timeout_s)
            if result.kind is ServerKind.UNKNOWN:
                return result.failed("it is a gRPC server, but not of kvstore")
            if target.kind not in (ServerKind.UNKNOWN, result.kind):
                return result.failed(f"it is a {result.kind}, not a {target.kind}")
            if not serving:
                return result.failed("running, but not serving: it starts or stops")
            measure(result, count, lambda: _small_call(result, channel, timeout_s))
    except (PermissionDenied, Unauthenticated) as error:
        return result.failed(str(explained.explain(error)), PingOutcome.REFUSED)
    except (Unavailable, DeadlineExceeded) as error:
        return result.failed(_cause(str(explained.explain(error, timeout_s)), explained))
    except (KVStoreError, OSError) as error:
        return result.failed(str(error))
    if not result.name:
        result.name = target.name
    return result


def measure(result: PingResult, count: int, ask: Callable[[], object]) -> None:
    """Call ``ask`` ``count`` times and record each duration."""
    for _ in range(count):
        started_s = time.perf_counter()
        ask()
        result.round_trips_s.append(time.perf_counter() - started_s)


def _small_call(result: PingResult, channel: grpc.Channel, timeout_s: float) -> None:
    if result.kind is ServerKind.METADATA:
        call(metadata_pb2_grpc.MetadataStub(channel).ListNodes, metadata_pb2.ListNodesRequest(), timeout_s)
    else:
        result.name = call(node_pb2_grpc.NodeStub(channel).GetNode, node_pb2.GetNodeRequest(), timeout_s).node_id


def _kind(channel: grpc.Channel, timeout_s: float) -> ServerKind:
    """Kind of a server by the services whose health it reports. A node reports health of the metadata service too."""
    for service, kind in ((NODE_SERVICE, ServerKind.NODE), (METADATA_SERVICE, ServerKind.METADATA)):
        try:
            _serving(channel, service, timeout_s)
        except NotFound:
            continue
        return kind
    return ServerKind.UNKNOWN


def _serving(channel: grpc.Channel, service: str, timeout_s: float) -> bool:
    answer = call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(service=service), timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _the(target: PingTarget) -> str:
    return f"the {target.kind}{f' {target.name}' if target.name else ''}"


def _cause(message: str, target: Target) -> str:
    """The cause alone: the address has a column of its own."""
    return message.removeprefix(f"cannot reach {target.server} at {target.address}: ")
