"""A bounded pool of connections to one data-plane address: dials, greets, keeps idle ones, notices broken ones, fails fast.

A connection is taken by one thread for one exchange and given back only if both sides are in step; else it is dropped. Those that
are held while somebody computes have room of their own, so that they never keep a read from its connection. After
``failures`` in a row (dials that fail, connections that break, answers that never begin) the circuit breaker refuses
for a short time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from kvstore.core.errors import DeadlineExceeded, KVStoreError, PermissionDenied, Unauthenticated, Unavailable
from kvstore.core.limits import MAX_HELD_CONNECTIONS
from kvstore.observe.counters import Counters
from kvstore.transport import frames
from kvstore.transport.addresses import parse_address
from kvstore.transport.breaker import CircuitBreaker
from kvstore.transport.frames import FrameKind, Head
from kvstore.transport.liveness import Wait, WatchedServer
from kvstore.transport.tls import PeerTls
from kvstore.transport.traffic import KvTraffic
from kvstore.transport.wire import PlainWire, TlsWire, Wire, set_options

log = logging.getLogger(__name__)

Ticket = Callable[[], bytes] | bytes
_TCP_CONNECT_S = 1.3
"""Bound of a TCP connect alone, without TLS and greeting: a lost SYN is sent again after one second."""


class Connection:
    """A greeted wire, and the ids of the requests on it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.held = False
        """Whether it counts among those that are held while the caller does something else between its frames."""
        self.reused = False
        """Whether it was idle before: then it may have died meanwhile, and its first failure says nothing of the peer."""
        self.wait: Wait | None = None
        """The wait for the server that this exchange is, while it is taken."""
        self._last_id = 0

    def next_id(self) -> int:
        """An id for a new request."""
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        return self._last_id

    def answer(self, request_id: int, kind: FrameKind | None, deadline_s: float) -> tuple[Head, bytes]:
        """Head and header of the next frame, which answers ``request_id``, with a frame of ``kind`` where one is named.

        Raises:
            AnsweredError: the peer answered with an ERROR frame.
            KVStoreError: the wire broke, or this is no such answer.
        """
        head = frames.decode_head(self.wire.receive(frames.HEAD_BYTES, deadline_s))
        header = bytes(self.wire.receive(head.header_bytes, deadline_s))
        if head.kind is FrameKind.ERROR:
            raise AnsweredError(frames.decode_error(header), in_step=head.request_id == request_id != 0)
        if head.request_id != request_id:
            raise frames.BadFrame("an answer to another request", request=head.request_id, expected=request_id)
        if kind is not None and head.kind is not kind:
            raise frames.BadFrame("not the answer expected", kind=head.kind.name, expected=kind.name)
        return head, header


class AnsweredError(Exception):
    """The peer answered a request with an error. ``in_step``: the connection is still good."""

    def __init__(self, error: KVStoreError, *, in_step: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_step = in_step


class ConnectionPool:
    """Connections to one address. Thread-safe.

    Args:
        address: ``host:port``.
        ticket: shown in HELLO; a callable is asked for each new connection, so that tickets may expire.
        tls: whom it trusts and the name that it expects; None: clear text.
        connect_timeout_s: for the dial, TLS and HELLO together.
        max_connections: in use at once, and idle at once, besides those held.
        max_held: held at once.
        socket_buffer_bytes: fixed socket buffers; None: the kernel sizes them.
        traffic: class of the traffic; None: like any other.
        server: liveness of the process behind the address: if it is hung, exchanges with it are cut off and new ones refused.
        breaker: when to fail fast.
        counters: where events are counted.
    """

    def __init__(
        self,
        address: str,
        *,
        ticket: Ticket,
        tls: PeerTls | None,
        connect_timeout_s: float,
        max_connections: int,
        socket_buffer_bytes: int | None,
        breaker: CircuitBreaker,
        counters: Counters,
        traffic: KvTraffic | None = None,
        server: WatchedServer | None = None,
        max_held: int = MAX_HELD_CONNECTIONS,
    ) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._ticket = ticket
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._socket_buffer_bytes = socket_buffer_bytes
        self._breaker = breaker
        self._counters = counters
        self._traffic = traffic
        self._server = server
        self._lock = threading.Lock()
        self._max_connections = max_connections
        self._room = {False: threading.Semaphore(max_connections), True: threading.Semaphore(max_held)}
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def take(self, deadline_s: float, *, wait: bool = True, fresh: bool = False, held: bool = False) -> Connection | None:
        """A connection, idle or new. None: ``wait`` is False and all are in use.

        Args:
            deadline_s: when to give up.
            wait: whether to wait for one that is in use.
            fresh: dial, even where an idle one could be had.
            held: for an exchange that waits, between its frames, for what the caller does meanwhile.

        Raises:
            Unavailable: cannot be reached, fails fast, or the pool is closed.
            DeadlineExceeded: none came free in time.
            Unauthenticated: the ticket was refused.
        """
        if self._closed:
            raise Unavailable("the data-plane peer is closed", address=self.address)
        room = self._room[held]
        if not room.acquire(blocking=wait, timeout=max(0.0, deadline_s - time.monotonic()) if wait else None):
            if not wait:
                return None
            self._counters.add("transport_peer_pool_timeouts_total")
            raise DeadlineExceeded("no data connection came free in time", address=self.address)
        try:
            if self._server is not None:
                self._server.check()
            connection = None if fresh else self._take_idle()
            if connection is None:
                connection = self._dial(deadline_s)
        except BaseException:
            room.release()
            raise
        connection.held = held
        self._watch(connection)
        return connection

    def _watch(self, connection: Connection) -> None:
        """The exchange is a wait for the server, until the connection is given back or dropped."""
        if self._server is None:
            return
        connection.wait = self._server.waiting(connection.wire.shut)
        try:
            self._server.begin_wait(connection.wait)
        except Unavailable:
            self.drop(connection)
            raise

    def _unwatch(self, connection: Connection) -> None:
        wait, connection.wait = connection.wait, None
        if self._server is not None and wait is not None:
            self._server.end_wait(wait)

    def give_back(self, connection: Connection) -> None:
        """Returns a connection that is in step: nothing asked on it is unanswered."""
        self._unwatch(connection)
        with self._lock:
            self._busy.remove(connection)
            keep, held = not self._closed and len(self._idle) < self._max_connections, connection.held
            if keep:
                connection.reused = True
                self._idle.append(connection)
        if not keep:
            connection.wire.close()
        self._room[held].release()

    def drop(self, connection: Connection) -> None:
        """Ends a connection that is not in step. Idempotent."""
        with self._lock:
            if connection not in self._busy:
                return
            self._busy.remove(connection)
        self._unwatch(connection)
        connection.wire.close()
        self._room[connection.held].release()

    def went_well(self) -> None:
        """An exchange was answered: the breaker closes."""
        self._breaker.succeeded()

    def went_wrong(self) -> None:
        """The peer broke an exchange, or never began to answer: enough of these open the breaker."""
        if self._breaker.failed():
            self._counters.add("transport_peer_breaker_opened_total")
            log.warning("data-plane peer %s failed repeatedly: calls to it fail at once for a short time", self.address)

    def close(self) -> None:
        """Closes idle connections, and ends those in use under the threads that use them. Idempotent."""
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
                connection = self._idle.pop()  # the one used last: its congestion window is still open
                self._busy.add(connection)
            if connection.wire.idle_and_open():
                return connection
            self._counters.add("transport_peer_idle_broken_total")
            with self._lock:
                self._busy.discard(connection)
            connection.wire.close()

    def _dial(self, deadline_s: float) -> Connection:
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded("no time left to connect", address=self.address)
        if not self._breaker.allow():
            self._counters.add("transport_peer_fast_failures_total")
            raise Unavailable("the data-plane peer failed repeatedly: not tried again yet", address=self.address)
        until_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        # asked before the dial: the server's patience with silent connections is short, and a failure here is not the peer's
        ticket = self._ticket if isinstance(self._ticket, bytes) else self._ticket()
        hello = frames.encode_hello(ticket)
        try:
            connection = self._reached(hello, until_s)
        except (Unauthenticated, PermissionDenied):
            self._breaker.succeeded()  # it answers, if not as hoped
            self._counters.add("transport_peer_unauthenticated_total")
            raise
        except (OSError, KVStoreError) as error:
            self._counters.add("transport_peer_connect_failures_total")
            self.went_wrong()
            raise Unavailable("cannot connect to a data-plane peer", address=self.address, error=error) from error
        self._counters.add("transport_peer_connects_total")
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:
            connection.wire.shut()
        return connection

    def _reached(self, hello: bytes, until_s: float) -> Connection:
        """Connects and greets; cut off if the server is hung."""
        if self._server is None:
            return self._greeted(self._connect(until_s, []), hello, until_s)
        dialed: list[socket.socket] = []

        def cut_off() -> None:
            for sock in dialed:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

        with self._server.waiting(cut_off):
            return self._greeted(self._connect(until_s, dialed), hello, until_s)

    def _connect(self, until_s: float, dialed: list[socket.socket]) -> Wire:
        """Connects; ``dialed`` gets the socket as soon as there is one, for whoever cuts it off."""
        left_s = max(until_s - time.monotonic(), 0.001)
        sock = socket.create_connection((self._host, self._port), timeout=min(left_s, _TCP_CONNECT_S))
        sock.settimeout(max(until_s - time.monotonic(), 0.001))
        dialed.append(sock)
        try:
            set_options(sock, self._socket_buffer_bytes)
            if self._traffic is not None:
                self._traffic.mark(sock)
            wire: Wire
            if self._tls is None:
                wire = PlainWire(sock)
            else:
                sock = self._tls.wrap(sock, self._host)
                wire = TlsWire(sock)
            return wire if self._traffic is None else self._traffic.paced(wire, sock)
        except BaseException:
            sock.close()
            raise

    def _greeted(self, wire: Wire, hello: bytes, until_s: float) -> Connection:
        connection = Connection(wire)
        try:
            wire.send((hello,), until_s)
            connection.answer(0, FrameKind.WELCOME, until_s)
        except AnsweredError as answered:
            wire.close()
            raise answered.error from None
        except BaseException:
            wire.close()
            raise
        return connection
