"""A pool's services for the cluster: a control server, a data plane and a registration, like a small node.

Of a node's services a reader needs GetNode, tickets and statistics. All other calls are unimplemented.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.provider import PoolProvider
from kvclient.hbm.volume import HbmVolume
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.errors import KVStoreError, NotFound, Unavailable
from kvstore.core.types import BootId
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_listen_address
from kvstore.rpc.auth.interceptor import require_tenant
from kvstore.rpc.auth.tokens import TokenSource, TokenTable, WatchedFile
from kvstore.rpc.codec import spec_from_proto
from kvstore.rpc.server import BoundServer, build_aio_server
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.tls import server_context

_log = logging.getLogger(__name__)

TICKET_VALID_S = 60.0
MAX_CONNECTIONS = 16
"""Peers that may read at once: the engine's process needs its CPU for other work."""
START_TIMEOUT_S = 10.0
REGISTER_WAIT_S = 5.0
STOP_TIMEOUT_S = 5.0


class PoolNode:
    """One pool as a node of the cluster. Call ``start`` and ``stop`` once each.

    Args:
        node_id: its name among nodes.
        metadata: address of the metadata server.
        listen: address for peers, ``host:port``; port 0 is any free port. The control server uses any port of that host.
        advertise_host: host that peers dial; None: the host of ``listen``.
        allow_insecure_remote: listen beyond this host without TLS.
        tls: for all connections.
        parts: state of the pool.
        replica_log: changes to publish.
        namespaces: namespaces of its clients.
        anti_entropy_interval_s: how often the index is compared with the table.
        token: token for the metadata server; None: none.
        tokens: accepted tokens; None: any caller.

    Raises:
        InvalidArgument: it would listen beyond this host without TLS.
    """

    def __init__(
        self,
        node_id: str,
        metadata: str,
        listen: str,
        *,
        advertise_host: str | None,
        allow_insecure_remote: bool,
        tls: TlsConfig | None,
        parts: PoolState,
        io_engines: Callable[[], Sequence[str]],
        replica_log: ReplicaChangeLog,
        namespaces: NamespaceRegistry,
        anti_entropy_interval_s: float,
        token: TokenSource | None = None,
        tokens: WatchedFile[TokenTable] | None = None,
    ) -> None:
        check_listen_address(listen, "", tls=tls is not None, allow_insecure=allow_insecure_remote)
        self._metadata = metadata
        self._host = listen.rpartition(":")[0]
        self._advertised = advertise_host or self._host
        self._tls = tls
        self._token = token
        self._tokens = tokens
        self._table = parts.table
        self._log = replica_log
        self._volume = parts.volume
        self._counters = parts.counters
        self._clock = parts.clock
        self._anti_entropy_interval_s = anti_entropy_interval_s
        boot_id = BootId(secrets.token_bytes(16))
        authority = TicketAuthority(secrets.token_bytes(32), boot_id, parts.clock)
        self._data = TcpServer(
            PoolProvider(namespaces, parts),
            listen,
            authority=authority,
            tls=server_context(tls) if tls is not None else None,
            counters=parts.counters,
            max_connections=MAX_CONNECTIONS,
        )
        self.info = common_pb2.NodeInfo(node_id=node_id, boot_id=boot_id)
        self._servicer = _PoolServicer(self.info, namespaces, authority, parts.volume, io_engines, parts.counters)
        self._control: _ControlServer | None = None
        self._publisher: IndexPublisher | None = None

    def start(self) -> None:
        """Start serving and register. If the metadata server does not answer, registration continues in the background.

        Raises:
            Unavailable: an address cannot be bound.
            Conflict: the server rejects the registration: a living node has this name.
        """
        try:
            self._data.start()
            register = partial(node_pb2_grpc.add_NodeServicer_to_server, self._servicer)
            self._control = _ControlServer(f"{self._host}:0", register, self._counters, self._tls, self._tokens)
            control = self._control.start()
            self.info.control_address = f"{self._advertised}:{control.rpartition(':')[2]}"
            self.info.data_address = f"{self._advertised}:{self._data.address.rpartition(':')[2]}"
            self.info.volumes.add(
                volume_id=self._volume.volume_id,
                tier=cast("common_pb2.Tier", int(self._volume.tier)),
                capacity_bytes=self._volume.usage().capacity_bytes,
            )
            publisher = IndexPublisher(
                self._metadata,
                self.info,
                self._table,
                self._log,
                self._counters,
                tls=self._tls,
                token=self._token,
                anti_entropy_interval_s=self._anti_entropy_interval_s,
            )
        except BaseException:
            self.stop()
            raise
        self._publisher = publisher
        publisher.start()
        if not publisher.wait_registered(REGISTER_WAIT_S):
            if publisher.refused is not None:
                self.stop()
                raise publisher.refused
            self._counters.add(device_metrics.HBM_NOT_REGISTERED_AT_START)
            _log.warning("pool not published yet: metadata server %s did not answer", self._metadata)

    def stop(self) -> None:
        """Stop serving. Empty the table first: published evictions are hidden at once, other blocks after missed heartbeats."""
        if self._publisher is not None:
            self._log.wait_published([self._volume.volume_id], self._clock.now_s() + STOP_TIMEOUT_S / 5)
            self._publisher.stop(STOP_TIMEOUT_S)
        self._data.stop()
        if self._control is not None:
            self._control.stop()


class _PoolServicer(node_pb2_grpc.NodeServicer):
    """Calls of a reader before it dials the data plane."""

    def __init__(
        self,
        info: common_pb2.NodeInfo,
        namespaces: NamespaceRegistry,
        authority: TicketAuthority,
        volume: HbmVolume,
        io_engines: Callable[[], Sequence[str]],
        counters: Counters,
    ) -> None:
        self._info = info
        self._namespaces = namespaces
        self._authority = authority
        self._volume = volume
        self._io_engines = io_engines
        self._counters = counters

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> common_pb2.NodeInfo:  # noqa: ANN401, N802, ARG002
        return self._info

    async def IssueTicket(  # noqa: N802
        self,
        request: node_pb2.IssueTicketRequest,
        context: Any,  # noqa: ANN401, ARG002
    ) -> node_pb2.IssueTicketResponse:
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        namespace_id = spec.namespace
        if self._namespaces.find(namespace_id) is None:  # a pool has only the namespaces of its engine
            raise NotFound("unknown namespace of this pool", namespace=namespace_id.hex())
        ticket = self._authority.issue(namespace_id, TICKET_VALID_S)
        return node_pb2.IssueTicketResponse(ticket=ticket, boot_id=self._info.boot_id)

    async def GetNodeStats(  # noqa: N802
        self,
        request: node_pb2.GetNodeStatsRequest,  # noqa: ARG002
        context: Any,  # noqa: ANN401, ARG002
    ) -> node_pb2.GetNodeStatsResponse:
        usage = self._volume.usage()
        counters: Mapping[str, int] = self._counters.snapshot()
        answer = node_pb2.GetNodeStatsResponse(node=self._info, counters=counters)
        answer.tiers.add(
            volume_id=self._volume.volume_id,
            tier=cast("common_pb2.Tier", int(self._volume.tier)),
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            blocks=usage.blocks,
        )
        answer.io_engines.extend(self._io_engines())
        return answer


class _ControlServer:
    """The control server: an asyncio server in its own thread, because the engine may have no event loop."""

    def __init__(
        self,
        listen: str,
        register: Callable[[Any], None],
        counters: Counters,
        tls: TlsConfig | None,
        tokens: WatchedFile[TokenTable] | None,
    ) -> None:
        self._listen = listen
        self._register = register
        self._counters = counters
        self._tls = tls
        self._tokens = tokens
        self._ready = threading.Event()
        self._address = ""
        self._failed: KVStoreError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="hbm-control", daemon=True)

    def start(self) -> str:
        """Start serving and return the bound address.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self.stop()
            raise Unavailable("the control server of the pool did not start", listen=self._listen)
        if self._failed is not None:
            raise self._failed
        return self._address

    def stop(self) -> None:
        """Stop accepting calls."""
        if self._loop is not None and self._ending is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except KVStoreError as error:
            self._failed = error
        except Exception as error:  # noqa: BLE001  # edge of this thread: start() raises it, or it is logged
            self._counters.add(device_metrics.HBM_CONTROL_SERVER_FAILED)
            _log.exception("control server of the pool failed: unexpected error")
            self._failed = Unavailable("the control server of the pool did not start", listen=self._listen, error=error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        server: BoundServer = await build_aio_server(
            [self._register],
            addresses=[self._listen],
            services=["kvstore.v1.Node"],
            counters=self._counters,
            tls=self._tls,
            tokens=self._tokens,
        )
        await server.start()
        self._address = server.addresses[0]
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._ending.wait()
        await server.stop(0.2)
