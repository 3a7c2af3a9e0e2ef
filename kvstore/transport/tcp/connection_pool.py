"""A bounded pool of connections to one data-plane address.

One thread acquires a connection for one exchange. It releases the connection if both sides are in step, and drops it otherwise.
Connections that are held while the caller computes are limited separately, so that they never block a read. After several
consecutive failures (failed connects, broken connections, answers that never begin), the circuit breaker refuses new connections
for a short time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import DeadlineExceeded, KVStoreError, PermissionDenied, Unauthenticated, Unavailable
from kvstore.core.limits import MAX_HELD_CONNECTIONS
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.addresses import parse_address
from kvstore.transport.liveness import CircuitBreaker, Wait, WatchedServer
from kvstore.transport.shaping.traffic import KvTraffic
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import FrameKind, Head
from kvstore.transport.tls import PeerTls
from kvstore.transport.wire import PlainWire, TlsWire, Wire, set_options

log = logging.getLogger(__name__)

Ticket = Callable[[], bytes] | bytes
_PROBE_PAUSE_S = 0.25
_TCP_CONNECT_S = 1.3
"""Timeout of the TCP connect without TLS and HELLO. The kernel sends a lost SYN again after one second."""


class Connection:
    """A wire after HELLO and WELCOME, with the ids of its requests."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.held = False
        """Whether the caller holds it for long, because it computes between the frames of its exchange."""
        self.reused = False
        """Whether it was idle before. It may have died while idle, so its first failure is not a failure of the peer."""
        self.waits: list[tuple[WatchedServer, Wait]] = []
        """The registered waits for the peer, while the connection is in use."""
        self._last_id = 0

    def next_id(self) -> int:
        """Return an id for a new request."""
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        return self._last_id

    def answer(self, request_id: int, kind: FrameKind | None, deadline_s: float) -> tuple[Head, bytes]:
        """Receive head and header of the next frame, which must answer ``request_id`` and, unless None, be of ``kind``.

        Raises:
            PeerError: the peer answered with an ERROR frame.
            KVStoreError: the wire broke, or the frame is not the expected answer.
        """
        head = frames.decode_head(self.wire.receive(frames.HEAD_BYTES, deadline_s))
        header = bytes(self.wire.receive(head.header_bytes, deadline_s))
        if head.kind is FrameKind.ERROR:
            raise PeerError(frames.decode_error(header), in_step=head.request_id == request_id != 0)
        if head.request_id != request_id:
            raise frames.BadFrame("answer to another request", request=head.request_id, expected=request_id)
        if kind is not None and head.kind is not kind:
            raise frames.BadFrame("unexpected kind of answer", kind=head.kind.name, expected=kind.name)
        return head, header


class _Slots:
    """Number of connections that may still be taken into use. Thread-safe.

    Args:
        count: how many may be in use at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()

    def acquire(self, scope: CancelScope | None, deadline_s: float, *, wait: bool) -> bool:
        """Take a slot. False: none is free, nor became so before the deadline or the end of the scope."""
        with self._changed:
            while not self._free:
                left_s = deadline_s - time.monotonic()
                if not wait or left_s <= 0:
                    return False
                scope = CancelScope() if scope is None else scope
                if scope.ended:
                    return False
                scope.wait(self._changed, left_s)
            self._free -= 1
            return True

    def release(self) -> None:
        """Return a slot."""
        with self._changed:
            self._free += 1
            self._changed.notify()


class _Opening:
    """The sockets of a connection that is being opened. Another thread may cancel it."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._cancelled = False

    def add(self, sock: socket.socket) -> None:
        """Add a socket, which a cancellation shuts.

        Raises:
            Unavailable: cancelled.
        """
        self._sockets.append(sock)
        if self._cancelled:
            raise Unavailable("the connection was cancelled while it was opened")

    def cancel(self) -> None:
        """End the waits for the sockets."""
        self._cancelled = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class PeerError(Exception):
    """The peer answered a request with an ERROR frame. ``in_step``: the connection can still be used."""

    def __init__(self, error: KVStoreError, *, in_step: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_step = in_step


class ConnectionPool:
    """Connections to one address. Thread-safe.

    Args:
        address: ``host:port``.
        ticket: sent in HELLO. A callable is called for each new connection, so that tickets may expire. The current cancel scope
            bounds it.
        tls: client side of TLS; None: clear text.
        connect_timeout_s: timeout for TCP connect, TLS and HELLO together.
        max_connections: maximum connections in use, and maximum idle, in addition to held ones.
        max_held: maximum held connections.
        traffic: marks and caps the sockets; None: unmarked and uncapped.
        servers: liveness of the peer, at each address where it is probed. If one is hung, exchanges are cancelled and new ones
            are refused. ``watch`` adds the data plane itself.
        breaker: decides when to fail fast.
        counters: counts connects and failures.
    """

    def __init__(
        self,
        address: str,
        *,
        ticket: Ticket,
        tls: PeerTls | None,
        connect_timeout_s: float,
        max_connections: int,
        breaker: CircuitBreaker,
        counters: Counters,
        traffic: KvTraffic | None = None,
        servers: Sequence[WatchedServer] = (),
        max_held: int = MAX_HELD_CONNECTIONS,
    ) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._ticket = ticket
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._breaker = breaker
        self._counters = counters
        self._traffic = traffic
        self._servers = tuple(servers)
        self._last_ticket = b""
        self._lock = threading.Lock()
        self._max_connections = max_connections
        self._limits = {False: _Slots(max_connections), True: _Slots(max_held)}
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def acquire(
        self,
        deadline_s: float,
        *,
        wait: bool = True,
        fresh: bool = False,
        held: bool = False,
        scope: CancelScope | None = None,
    ) -> Connection | None:
        """Return an idle or new connection. None: ``wait`` is False and all connections are in use.

        Args:
            deadline_s: when to give up.
            wait: wait for a connection if all are in use.
            fresh: make a new connection, even if one is idle.
            held: the caller computes between the frames of its exchange.
            scope: ends all waits if it is cancelled; None: only the deadline does.

        Raises:
            Unavailable: the server cannot be reached or is hung, the breaker is open, or the pool is closed.
            DeadlineExceeded: no connection became free in time, or the scope was cancelled.
            Unauthenticated: the server refused the ticket.
        """
        if self._closed:
            raise Unavailable("the data-plane peer is closed", address=self.address)
        limit = self._limits[held]
        if not limit.acquire(scope, deadline_s, wait=wait):
            if not wait:
                return None
            if scope is not None and scope.cancelled:
                raise scope.error()
            self._counters.add(transport_metrics.PEER_POOL_TIMEOUTS)
            raise DeadlineExceeded("no data connection became free in time", address=self.address)
        try:
            for server in self._servers:
                server.check()
            connection = None if fresh else self._take_idle()
            if connection is None:
                connection = self._connect_new(deadline_s, scope)
        except BaseException:
            limit.release()
            raise
        connection.held = held
        self._begin_wait(connection)
        return connection

    def _begin_wait(self, connection: Connection) -> None:
        """Register the exchange as a wait for the server, until the connection is released or dropped."""
        try:
            for server in self._servers:
                wait = server.waiting(connection.wire.shut)
                server.begin_wait(wait)
                connection.waits.append((server, wait))
        except BaseException:  # the server is hung, or no thread for its probes can be started
            self.drop(connection)
            raise

    def _end_wait(self, connection: Connection) -> None:
        for server, wait in connection.waits:
            server.end_wait(wait)
        connection.waits.clear()

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool. All its requests must have been answered."""
        self._end_wait(connection)
        with self._lock:
            self._busy.remove(connection)
            keep, held = not self._closed and len(self._idle) < self._max_connections, connection.held
            if keep:
                connection.reused = True
                self._idle.append(connection)
        if not keep:
            connection.wire.close()
        self._limits[held].release()

    def drop(self, connection: Connection) -> None:
        """Close a connection that is not in step. Idempotent."""
        with self._lock:
            if connection not in self._busy:
                return
            self._busy.remove(connection)
        self._end_wait(connection)
        connection.wire.close()
        self._limits[connection.held].release()

    def record_success(self) -> None:
        """Record that an exchange was answered, which closes the breaker."""
        self._breaker.succeeded()

    def record_failure(self) -> None:
        """Record that the peer broke an exchange or never began to answer. Several consecutive failures open the breaker."""
        if self._breaker.failed():
            self._counters.add(transport_metrics.PEER_BREAKER_OPENED)
            log.warning("circuit breaker opened: %s (calls fail fast for a short time)", self.address)

    def close(self) -> None:
        """Close all connections; threads that use one fail with ``PeerGone``. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.wire.close()
        for connection in busy:
            connection.wire.shut()

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()  # the one used last, whose congestion window is still open
                self._busy.add(connection)
            if connection.wire.idle_and_open():
                return connection
            self._counters.add(transport_metrics.PEER_IDLE_BROKEN)
            with self._lock:
                self._busy.discard(connection)
            connection.wire.close()

    def _connect_new(self, deadline_s: float, enclosing: CancelScope | None) -> Connection:
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded("no time left to connect", address=self.address)
        if not self._breaker.allow():
            self._counters.add(transport_metrics.PEER_FAST_FAILURES)
            raise Unavailable("the data-plane peer failed repeatedly; it is tried again after a short time", address=self.address)
        until_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        scope = CancelScope(until_s) if enclosing is None else enclosing.nested(until_s)
        # before the connect: servers close silent connections soon, and a failure to get a ticket is not the peer's failure
        with scope:
            ticket = self._ticket if isinstance(self._ticket, bytes) else self._ticket()
        self._last_ticket = ticket
        hello = frames.encode_hello(ticket)
        try:
            connection = self._connect_and_greet(hello, until_s, scope)
        except (Unauthenticated, PermissionDenied):
            self._breaker.succeeded()  # the peer answers
            self._counters.add(transport_metrics.PEER_UNAUTHENTICATED)
            raise
        except (OSError, KVStoreError) as error:
            if scope.cancelled:  # not a failure of the peer
                raise scope.error() from error
            self._counters.add(transport_metrics.PEER_CONNECT_FAILURES)
            self.record_failure()
            raise Unavailable("cannot connect to a data-plane peer", address=self.address, error=error) from error
        self._counters.add(transport_metrics.PEER_CONNECTS)
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:
            connection.wire.shut()
        return connection

    def _connect_and_greet(self, hello: bytes, until_s: float, scope: CancelScope) -> Connection:
        """Connect and exchange HELLO; cancelled with the scope, or if the server is hung."""
        opening = _Opening()
        with contextlib.ExitStack() as waits:
            for server in self._servers:
                waits.enter_context(server.waiting(opening.cancel))
            waits.enter_context(scope.on_cancel(opening.cancel))
            return self._greet(self._connect(until_s, opening), hello, until_s)

    def watch(self, server: WatchedServer) -> None:
        """Add a server whose liveness counts for later exchanges."""
        self._servers = (*self._servers, server)

    def probe(self, _: str, timeout_s: float, ended: Callable[[bool], None]) -> None:
        """Probe the data plane: connect and exchange HELLO in a separate thread. See ``kvstore.transport.liveness.Probe``."""
        threading.Thread(target=self._probe, args=(timeout_s, ended), name="kvstore-data-probe", daemon=True).start()

    def _probe(self, timeout_s: float, ended: Callable[[bool], None]) -> None:
        began_s = time.monotonic()
        until_s = began_s + timeout_s
        try:
            ticket = self._last_ticket or (self._ticket if isinstance(self._ticket, bytes) else self._ticket())
            self._greet(self._connect(until_s, _Opening()), frames.encode_hello(ticket), until_s).wire.close()
            self._last_ticket = ticket
            answered = True
        except (Unauthenticated, PermissionDenied):
            self._last_ticket = b""
            answered = True
        except (OSError, KVStoreError):
            answered = False
        if not answered:  # a refused connection fails at once, and the next probe follows as soon as this one ends
            time.sleep(max(0.0, began_s + _PROBE_PAUSE_S - time.monotonic()))
        ended(answered)

    def _connect(self, until_s: float, opening: _Opening) -> Wire:
        """Connect, and shake hands with TLS."""
        sock = self._dial(until_s, opening)
        try:
            sock.settimeout(max(until_s - time.monotonic(), 0.001))
            set_options(sock)
            if self._traffic is not None:
                self._traffic.mark(sock)
            wire: Wire
            if self._tls is None:
                wire = PlainWire(sock)
            else:
                sock = secured = self._tls.wrap(sock, self._host)
                opening.add(sock)  # in place of the first one, which is detached
                secured.do_handshake()
                wire = TlsWire(secured)
            return wire if self._traffic is None else self._traffic.limited(wire, sock)
        except BaseException:
            sock.close()
            raise

    def _dial(self, until_s: float, opening: _Opening) -> socket.socket:
        """Connect to the first address of the host that accepts."""
        failed: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                opening.add(sock)
                sock.settimeout(min(max(until_s - time.monotonic(), 0.001), _TCP_CONNECT_S))
                sock.connect(address)
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failed if failed is not None else OSError(f"{self._host} has no address")

    def _greet(self, wire: Wire, hello: bytes, until_s: float) -> Connection:
        connection = Connection(wire)
        try:
            wire.send((hello,), until_s)
            connection.answer(0, FrameKind.WELCOME, until_s)
        except PeerError as answered:
            wire.close()
            raise answered.error from None
        except BaseException:
            wire.close()
            raise
        return connection
