"""Sessions with nodes of other hosts, which read storage for this engine."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import grpc

from kvclient.nodes.lease_release import LeaseReleaser
from kvclient.options import ClientOptions
from kvclient.results import NodeRef
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.errors import Internal, KVStoreError, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import ChannelBroken, call_cancellable, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.transport.idle_cache import IdleCache
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
        self._open: IdleCache[NodeRef, RemoteSession] = IdleCache(MAX_SESSIONS)
        self._lost: list[RemoteSession] = []  # still to be closed
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
            found = self._open.get(node, time.monotonic())
            lost, self._lost = self._lost, []
        for one in lost:
            _close(one)
        if found is not None:
            return found
        channel = connect(node.control_address, tls=self._tls, token=self._options.shown_token())
        stub = node_pb2_grpc.NodeStub(channel)
        try:
            opened = call_cancellable(stub.OpenSession, self._request, timeout_s, server.waiting)
        except ChannelBroken:  # to close the channel would hang
            raise
        except BaseException:
            channel.close()
            raise
        if len(opened.session_id) != _SESSION_BYTES:
            channel.close()
            raise Internal("invalid answer to OpenSession: use the same version for client and node")
        session = RemoteSession(
            node, stub, opened.session_id, server, channel, LeaseReleaser(stub, opened, self._options, self._incidents)
        )
        with self._lock:
            now_s = time.monotonic()
            other = self._open.get(node, now_s)
            if self._closed or other is not None:
                retired = [session]
                session = other or session
            else:
                retired = self._open.put(node, session, now_s)
        for one in retired:
            _close(one)
        return session

    def holds(self, session: RemoteSession) -> bool:
        """Whether the session is open: no load has reported it as lost."""
        with self._lock:
            return self._open.peek(session.node) is session

    def lost(self, session: RemoteSession, error: KVStoreError) -> None:
        """Drop a session that has ended, whose node does not answer, or whose channel is broken. The next use opens another.

        Callbacks of gRPC calls may call this, which must not close the channel: closing waits for the channel's other calls,
        which end in the very thread that runs the callback. The next call of ``session`` or ``close`` closes it.
        """
        with self._lock:
            if self._open.peek(session.node) is session:
                self._open.pop(session.node)
                if isinstance(error, ChannelBroken):  # to close the channel would hang
                    session.releaser.close()
                else:
                    self._lost.append(session)

    def close(self) -> None:
        """Close all sessions. Loads under way fail."""
        with self._lock:
            self._closed = True
            sessions = [*self._open.clear(), *self._lost]
            self._lost.clear()
        for session in sessions:
            _close(session)


def _close(session: RemoteSession) -> None:
    session.releaser.close()
    session.channel.close()
