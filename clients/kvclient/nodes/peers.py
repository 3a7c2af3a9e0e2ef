"""Data planes of other nodes: one peer per node, with its tickets, and threads to read from several nodes at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import grpc

from kvclient.options import ClientOptions
from kvclient.results import NodeRef
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.process.threads.submission import LazyThreadPool
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import RetryPolicy, call, call_in_current_scope, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.transport.contract import BlockPeer
from kvstore.transport.idle_cache import IdleCache
from kvstore.transport.liveness import LivenessMonitor, data_plane
from kvstore.transport.nixl.agent import NixlAgent
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.shaping.traffic import KvTraffic
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tls import PeerTls

_Result = TypeVar("_Result")

MAX_PEERS = 64
"""Nodes with open connections; beyond this, unused ones are closed."""
_TICKET_TIMEOUT_S = 2.0


class PeerPool:
    """Open peers of one client. Thread-safe."""

    def __init__(
        self, spec: CacheSpec, tls: TlsConfig | None, options: ClientOptions, incidents: LimitedLog, liveness: LivenessMonitor
    ) -> None:
        self._liveness = liveness
        self._ticket_request = node_pb2.IssueTicketRequest(spec=spec_to_proto(spec))
        self._tls = tls
        self._peer_tls = PeerTls.of(tls)
        self._options = options
        self._incidents = incidents
        self._lock = threading.Lock()
        self._traffic = KvTraffic(options.traffic_class(), incidents.counters)
        self._open: IdleCache[NodeRef, tuple[BlockPeer, grpc.Channel]] = IdleCache(MAX_PEERS)
        self._readers = LazyThreadPool(options.read_streams, "kvclient-read")
        self._closed = False
        nixl = options.nixl
        if nixl is not None and tls is not None:
            nixl = None
            incidents.report(
                transport_metrics.NIXL_UNAVAILABLE, "NIXL not used: it has no TLS, which is set; blocks move over TCP"
            )
        self._nixl = None if nixl is None else NixlAgent(nixl, name=f"{options.client_name}-reads", counters=incidents.counters)

    def peer(self, node: NodeRef) -> BlockPeer:
        """Return the peer of a node; it connects on first use.

        Raises:
            InvalidArgument: malformed addresses.
            Unavailable: the client is closed.
        """
        return self._entry(node)[0]

    def hung(self, node: NodeRef) -> bool:
        """Whether a node is hung, so that no call should wait for it."""
        return self._liveness.hung(node.control_address) or self._liveness.hung(data_plane(node.data_address))

    @contextmanager
    def watching(self, nodes: Iterable[NodeRef]) -> Iterator[None]:
        """Find out whether some nodes answer while the local node waits for them on the client's behalf.

        Without this, a client that waited until its own node gave a hung one up would then wait for the hung node again itself.
        """
        with ExitStack() as waits:
            for node in set(nodes):
                with suppress(KVStoreError):  # known to be hung, or the client is closed
                    self._entry(node)  # from now on its data plane can be probed
                    for name in (node.control_address, data_plane(node.data_address)):
                        waits.enter_context(self._liveness.server(name).waiting(_nothing))
            yield

    def _entry(self, node: NodeRef) -> tuple[BlockPeer, grpc.Channel]:
        retired = []
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            now_s = time.monotonic()
            entry = self._open.get(node, now_s)
            if entry is None:
                entry = self._connect(node)
                retired = self._open.put(node, entry, now_s)
        for one in retired:
            _close(one)
        return entry

    def abandon_prompt(self, node: NodeRef, transfer_id: str, timeout_s: float) -> int:
        """Tell a node that the rest of a prompt will not come. Return the number of calls that waited for it there.

        Raises:
            KVStoreError: the node did not answer.
        """
        request = node_pb2.AbandonPromptRequest(transfer_id=transfer_id)
        stub = node_pb2_grpc.NodeStub(self._entry(node)[1])
        return int(call(stub.AbandonPrompt, request, timeout_s, RetryPolicy(max_backoff_s=2.0)).awaited)

    def _connect(self, node: NodeRef) -> tuple[BlockPeer, grpc.Channel]:
        channel = connect(node.control_address, tls=self._tls, token=self._options.shown_token())
        stub = node_pb2_grpc.NodeStub(channel)
        server = self._liveness.server(node.control_address)

        def ticket() -> bytes:
            retry = RetryPolicy(attempts=2)
            answer = call_in_current_scope(stub.IssueTicket, self._ticket_request, _TICKET_TIMEOUT_S, server.waiting, retry)
            return bytes(answer.ticket)

        make = TcpPeer if self._nixl is None else partial(NixlPeer, agent=self._nixl)
        peer = make(
            node.data_address,
            ticket=ticket,
            streams=self._options.tcp_streams,
            tls=self._peer_tls,
            counters=self._incidents.counters,
            traffic=self._traffic,
            liveness=self._liveness,
            control_address=node.control_address,
        )
        return peer, channel

    def submit(self, work: Callable[..., _Result], *arguments: object) -> Future[_Result]:
        """Run work in a reading thread. The caller must wait for it: it writes to a caller's buffer.

        Raises:
            Unavailable: the client is closed.
        """
        return self._readers.submit(copy_context().run, work, *arguments)

    def close(self) -> None:
        """Close all connections. Reads under way end with UNAVAILABLE."""
        with self._lock:
            self._closed = True
            entries = self._open.clear()
        for entry in entries:
            _close(entry)
        self._readers.close()
        if self._nixl is not None:
            self._nixl.close()


def _close(entry: tuple[BlockPeer, grpc.Channel]) -> None:
    peer, channel = entry
    peer.close()
    channel.close()


def _nothing() -> None:
    """Cancel nothing: the local node waits, not this client."""
