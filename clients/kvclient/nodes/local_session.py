"""The session with the local node, whose arena is mapped here, and the reopening of a lost session.

A session belongs to one boot of the node. Loads and stores *use* it. A retired session is not handed out any more, and its arena
connection is closed when the last user has left: until then an engine thread may be copying into slots. When the connection
ends, the node reuses the slots.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import grpc

from kvclient.memory.arena import ClientArena
from kvclient.memory.device_buffer import ArenaPinner
from kvclient.memory.engine_pool import StoredVolume
from kvclient.nodes.lease_release import LeaseReleaser
from kvclient.options import ClientOptions, Verify
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.clock import Clock
from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, LeaseLost, NotFound, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.core.types import NodeId, SessionId, VolumeId
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import ChannelBroken, RetryPolicy, call, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.rpc.diagnosis import TIMEOUT_S, diagnose
from kvstore.transport.liveness import CircuitBreaker, LivenessMonitor, WatchedServer

_log = logging.getLogger(__name__)

MAX_STORED_VOLUMES = 255
"""Per node; a byte numbers them."""
_LEAST_S = 0.001
_WHILE_CONNECTING = RetryPolicy(attempts=100)
"""The connection to a node that was just restarted may be backing off: try again within the deadline."""


class LocalNodeSearch(Protocol):
    """``NodeFinder.find``."""

    def __call__(self, within_s: float, *, patient: bool) -> str | None:
        """Return the address of the local node; None: this host runs no node. It may raise."""


class Session:
    """One open session. Use it inside ``with session.used():``."""

    def __init__(
        self,
        stub: node_pb2_grpc.NodeStub,
        opened: node_pb2.OpenSessionResponse,
        server: WatchedServer,
        volumes: Sequence[StoredVolume],
        arena: ClientArena,
        options: ClientOptions,
        incidents: LimitedLog,
    ) -> None:
        self.stub = stub
        self.server = server
        """The node's server, and whether it answers."""
        self.session_id = SessionId(opened.session_id)
        self.node_id = NodeId(opened.node.node_id)
        self.lease_s = opened.lease_ms / 1000
        self.arena = arena
        self.volumes = volumes
        """The node's NVMe volumes, if it reports them."""
        self._arena_exposed = opened.arena_exposed
        self.releaser = LeaseReleaser(stub, opened, options, incidents)
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False

    def verifies_copies(self, verify: Verify) -> bool:
        """Whether copies out of the arena are verified here: others than the node may write to some arenas."""
        return verify == "always" or (verify == "auto" and self._arena_exposed)

    def acquire(self) -> None:
        """Begin to use the session; ``release`` ends the use.

        Raises:
            LeaseLost: the session is retired.
        """
        with self._lock:
            if self._retired:
                raise LeaseLost("the session with the local node has ended")
            self._users += 1

    def release(self) -> None:
        """End one use."""
        with self._lock:
            self._users -= 1
            last = self._retired and self._users == 0
        if last:
            self._close_arena()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the arena mapped and its connection open inside the ``with`` statement."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def retire(self) -> None:
        """Hand the session out no more; unmap the arena when its last user has left."""
        with self._lock:
            already, self._retired = self._retired, True
            last = not already and self._users == 0
        if last:
            self._close_arena()

    def _close_arena(self) -> None:
        self.releaser.close()
        self.arena.close()

    @property
    def alive(self) -> bool:
        """Whether the session may be used: not retired, and the node holds its end of the arena connection."""
        return not self._retired and self.arena.alive


class LocalNode:
    """Keeps a session with the node on this host, across restarts of the node. Thread-safe.

    Args:
        find: see ``NodeFinder.find``.
        spec: the namespace of the session.
        tls: for nodes that are named by host and port.
        clock: source of time.
        options: bounds.
        incidents: reports losses.
        liveness: finds out whether the node answers.
        pinner: pins each mapped arena.
        advice: what a caller of ``connect`` can do if the node is not reached.
    """

    def __init__(
        self,
        find: LocalNodeSearch,
        spec: CacheSpec,
        tls: TlsConfig | None,
        clock: Clock,
        options: ClientOptions,
        incidents: LimitedLog,
        liveness: LivenessMonitor,
        pinner: ArenaPinner | None = None,
        advice: str = "check that it runs",
    ) -> None:
        self._find = find
        self._advice = advice
        self._liveness = liveness
        self._pinner = pinner
        self._spec = spec
        self._tls = tls
        self._clock = clock
        self._options = options
        self._incidents = incidents
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._channel: grpc.Channel | None = None
        self._channel_address: str | None = None
        self._reopening: threading.Thread | None = None
        self._pause = CircuitBreaker(clock, failures=1, open_s=options.reopen_pause_s)
        self._closed = False

    def session(self) -> Session | None:
        """Return the open session, or None if the node is hung or a session is being opened in the background.

        ``unavailable`` says why. A hung node keeps its session, which is used again when the node answers.
        """
        session = self._session
        if session is not None:
            if session.alive:
                return None if session.server.hung else session
            self.lost(session, None)
        self._reopen_in_background()
        return None

    def unavailable(self) -> Unavailable:
        """Return the error that explains why a session is missing."""
        session = self._session
        if session is not None and session.server.hung:
            return session.server.error()
        return Unavailable("no session with the local node at the moment")

    @property
    def hung_node(self) -> NodeId | None:
        """Id of the node, if it is hung."""
        session = self._session
        return session.node_id if session is not None and session.server.hung else None

    @property
    def is_open(self) -> bool:
        """Whether there is a session that may be used."""
        session = self._session
        return session is not None and session.alive

    @property
    def node_id(self) -> NodeId | None:
        """Id of the node of the session, or None."""
        session = self._session
        return session.node_id if session is not None else None

    def lost(self, session: Session, error: KVStoreError | None) -> None:
        """Drop a session that proved to have ended, or whose channel is broken. Current users may finish."""
        with self._lock:
            if isinstance(error, ChannelBroken):
                self._channel = None  # to close it would hang
            if self._session is not session:
                return
            self._session = None
        effect = "until it is open again, loads read from the nodes directly, and nothing is stored"
        self._incidents.report(client_metrics.SESSION_LOST, f"session with the local node lost: {effect}", error)
        session.retire()

    def open(self, end_s: float | None = None) -> bool:
        """Open a session now. False: this host runs no node.

        Args:
            end_s: deadline of ``connect``, whose error says in words why the node is not reached; None: ``connect_deadline_s``
                from now, without a diagnosis.

        Raises:
            KVStoreError: the node does not answer, or refuses.
        """
        explains = end_s is not None
        end_s = self._clock.now_s() + self._options.connect_deadline_s if end_s is None else end_s
        address = self._find(self._left_s(end_s), patient=not explains or self._options.require_store)
        if address is None:
            return False
        session = self._open_at(address, end_s, explains=explains)
        with self._lock:
            old, self._session = self._session, session
            closed = self._closed
        if old is not None:
            old.retire()
        if closed:
            session.retire()
        return True

    def _open_at(self, address: str, end_s: float, *, explains: bool) -> Session:
        stub = node_pb2_grpc.NodeStub(self._channel_to(address))
        copies = "" if self._pinner is None else f", copies on {self._pinner.describe()}"
        request = node_pb2.OpenSessionRequest(client_name=self._options.client_name + copies, spec=spec_to_proto(self._spec))
        try:
            opened = call(stub.OpenSession, request, self._left_s(end_s), _WHILE_CONNECTING)
        except (Unavailable, DeadlineExceeded) as error:  # from None: gRPC's own traceback says the same at greater length
            why = diagnose(address, self._tls, "TlsConfig", min(TIMEOUT_S, self._left_s(end_s))) if explains else None
            if why is not None and why.startswith("no answer within"):  # of the little time that was left for the diagnosis
                why = "no answer in time"
            raise type(error)(f"cannot reach the local node at {address}: {why or error}; {self._advice}") from None
        if len(opened.session_id) != 16 or opened.arena_bytes == 0 or opened.lease_ms == 0:
            raise Internal(
                "invalid answer to OpenSession: use the same version for client and node",
                arena_bytes=opened.arena_bytes,
                lease_ms=opened.lease_ms,
            )
        volumes = _stored_volumes(opened.stored_volumes)
        arena = ClientArena.open(
            opened.arena_socket,
            SessionId(opened.session_id),
            opened.arena_bytes,
            self._left_s(end_s),
            map_ahead=opened.prefaulted,
            pinner=self._pinner,
        )
        _log.info("session opened: node %s (arena_mib=%d)", opened.node.node_id, opened.arena_bytes >> 20)
        return Session(stub, opened, self._liveness.server(address), volumes, arena, self._options, self._incidents)

    def _left_s(self, end_s: float) -> float:
        return max(_LEAST_S, end_s - self._clock.now_s())

    def _channel_to(self, address: str) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._channel is None or self._channel_address != address:
                if self._channel is not None:
                    self._channel.close()
                self._channel = connect(address, tls=self._tls, token=self._options.shown_token())
                self._channel_address = address
            return self._channel

    def _reopen_in_background(self) -> None:
        with self._lock:
            busy = self._reopening is not None and self._reopening.is_alive()
            if self._closed or busy or not self._pause.allow():
                return
            self._reopening = threading.Thread(target=self._reopen, name="kvclient-reopen", daemon=True)
            try:
                self._reopening.start()
            except RuntimeError as error:  # no more threads: a call after the pause tries again
                self._pause.failed()
                self._incidents.report(client_metrics.SESSION_REFUSED, "session with the local node not opened", error)

    def _reopen(self) -> None:
        self._pause.failed()  # starts the pause before the next attempt, whether or not this one succeeds
        try:
            if self.open():
                self._incidents.counters.add(client_metrics.SESSION_OPENED)
        except KVStoreError as error:
            self._incidents.report(client_metrics.SESSION_REFUSED, "session with the local node not opened", error)

    def close(self) -> None:
        """End the session. Copies under way finish first, in their threads."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
            channel, self._channel = self._channel, None
        if session is not None:
            session.retire()
        if channel is not None:
            channel.close()


def _stored_volumes(answered: Sequence[node_pb2.StoredVolume]) -> tuple[StoredVolume, ...]:
    """Return the volumes of the local node, checked.

    Raises:
        Internal: too many volumes, or a path that is not absolute.
    """
    volumes = tuple(StoredVolume(VolumeId(one.volume_id), Path(one.path)) for one in answered)
    if len(volumes) > MAX_STORED_VOLUMES or any(not one.path.is_absolute() or "\0" in str(one.path) for one in volumes):
        raise Internal("the node answered impossible volumes", volumes=len(volumes))
    return volumes


def is_session_lost(error: KVStoreError) -> bool:
    """Whether to drop the session after an error of one of its calls: it has ended, or its node is unreachable."""
    return isinstance(error, LeaseLost | Unavailable | NotFound)


def new_operation_id() -> bytes:
    """Return 16 random bytes by which a server recognises a retry."""
    return secrets.token_bytes(16)


def local_address(nodes: list[common_pb2.NodeInfo]) -> str | None:
    """Return the gRPC address of the first node whose unix socket is on this host, or None."""
    for node in nodes:
        path = node.local_socket.removeprefix("unix:")
        with suppress(OSError):
            if path and Path(path).is_socket():
                return f"unix:{path}"
    return None
