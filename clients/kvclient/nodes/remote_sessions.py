"""Sessions with nodes of other hosts, which read storage for this engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import grpc

from kvclient.nodes.lease_release import LeaseReleaser
from kvclient.options import ClientOptions
from kvclient.results import NodeRef
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.errors import Internal, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import call_cancellable, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.transport.liveness import LivenessMonitor, WatchedServer

MAX_SESSIONS = 64
"""Nodes with open sessions; beyond this the least recently used one is closed."""
_SESSION_BYTES = 16


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A session with another host's node."""

    node: NodeRef
    stub: node_pb2_grpc.NodeStub
    session_id: bytes
    server: WatchedServer
    channel: grpc.Channel
    releaser: LeaseReleaser


class RemoteSessionCache:
    """Open sessions of one client with nodes of other hosts. Thread-safe."""

    def __init__(
        self, spec: CacheSpec, tls: TlsConfig | None, options: ClientOptions, incidents: LimitedLog, liveness: LivenessMonitor
    ) -> None:
        self._liveness = liveness
        self._request = node_pb2.OpenSessionRequest(client_name=options.client_name, spec=spec_to_proto(spec), remote=True)
        self._tls = tls
        self._options = options
        self._incidents = incidents
        self._lock = threading.Lock()
        self._open: OrderedDict[NodeRef, RemoteSession] = OrderedDict()
        self._closed = False

    def session(self, node: NodeRef, timeout_s: float) -> RemoteSession:
        """Return the session with a node, opened on first use.

        Raises:
            KVStoreError: the node does not answer, or refuses.
        """
        server = self._liveness.server(node.control_address)
        server.check()
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            found = self._open.get(node)
            if found is not None:
                self._open.move_to_end(node)
                return found
        channel = connect(node.control_address, tls=self._tls, token=self._options.shown_token())
        stub = node_pb2_grpc.NodeStub(channel)
        try:
            opened = call_cancellable(stub.OpenSession, self._request, timeout_s, server.waiting)
        except BaseException:
            channel.close()
            raise
        if len(opened.session_id) != _SESSION_BYTES:
            channel.close()
            raise Internal("the node answered an impossible session")
        session = RemoteSession(
            node, stub, opened.session_id, server, channel, LeaseReleaser(stub, opened, self._options, self._incidents)
        )
        retired = None
        with self._lock:
            if self._closed or node in self._open:
                retired = session
                session = self._open.get(node, session)
            else:
                self._open[node] = session
                retired = self._open.popitem(last=False)[1] if len(self._open) > MAX_SESSIONS else None
        if retired is not None:
            _close(retired)
        return session

    def holds(self, session: RemoteSession) -> bool:
        """Whether the session is open: no load has reported it as lost."""
        with self._lock:
            return self._open.get(session.node) is session

    def lost(self, session: RemoteSession) -> None:
        """Drop a session that has ended or whose node does not answer. The next use opens another."""
        with self._lock:
            if self._open.get(session.node) is session:
                del self._open[session.node]
        _close(session)

    def close(self) -> None:
        """Close all sessions. Loads under way fail."""
        with self._lock:
            self._closed = True
            sessions = list(self._open.values())
            self._open.clear()
        for session in sessions:
            _close(session)


def _close(session: RemoteSession) -> None:
    session.releaser.close()
    session.channel.close()
