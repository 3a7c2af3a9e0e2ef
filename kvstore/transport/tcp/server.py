"""The data-plane server: sends blocks directly from a provider's views, and receives blocks directly into granted slots.

One thread accepts connections, and each connection has its own thread (at most ``max_connections``), which moves bytes in
long system calls without the interpreter lock. A peer cannot hold pins or slots for longer than the deadline of its request (at
most ``max_request_s``), or for longer than ``stall_timeout_s`` without progress. However a connection ends, parts are released
and grants are committed or aborted exactly once.

Hostile input: every length is checked before memory is allocated (``frames``), and a connection must authenticate with a valid
HELLO within ``handshake_timeout_s``. If ``max_connections`` are open, a new connection replaces another one. If many connections
are unauthenticated, the oldest of these is closed, otherwise the connection that has been idle longest. A client that leaks
connections therefore does not lock out other clients. If no connection is idle, the new one is refused with an error.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from kvstore.core.errors import CapacityExceeded, KVStoreError, Unavailable
from kvstore.core.limits import MAX_DATA_CONNECTIONS
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.addresses import format_address, parse_address
from kvstore.transport.contract import BlockProvider
from kvstore.transport.shaping.traffic import KvTraffic
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.one_sided import OneSidedFactory
from kvstore.transport.tcp.server_connection import ServerConnection, ServerTimeouts
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.wire import PeerGone, PeerStalled, PlainWire, TlsWire, Wire, set_options

log = logging.getLogger(__name__)
limited = LimitedLog(log)

_JOIN_S = 5.0
UNAUTHENTICATED_SHARE = 4
"""If more than 1/n of all connections are unauthenticated, these are closed first."""
_EVICTION_S = 0.5
"""How long to wait until an evicted connection has ended. It ends at once, unless a request has just arrived."""
_BACKLOG = 128
"""Connections that may wait to be accepted. A client beyond them tries again only after 1 s or 3 s."""


class TcpServer:
    """Serves one provider on one TCP port.

    Args:
        provider: source and destination of blocks.
        listen: ``host:port``; port 0 selects a free port (see ``address``).
        authority: verifies tickets. None: every client may access every namespace.
        tls: server-side context. None: clear text.
        counters: counts events.
        max_connections: maximum open connections. A further one replaces an unauthenticated or idle connection, or is refused.
        handshake_timeout_s: timeout for TLS and HELLO of a new connection.
        idle_timeout_s: maximum time between requests.
        stall_timeout_s: maximum time without progress during a request.
        max_request_s: maximum time of a request, even if its deadline is later.
        traffic: marks and caps the sockets. None: unmarked and uncapped.
        one_sided: makes the responder for readers that request one-sided transfers. None: payload goes over the connections.
    """

    def __init__(
        self,
        provider: BlockProvider,
        listen: str = "127.0.0.1:0",
        *,
        authority: TicketAuthority | None = None,
        tls: ssl.SSLContext | None = None,
        counters: Counters | None = None,
        max_connections: int = MAX_DATA_CONNECTIONS,
        handshake_timeout_s: float = 5.0,
        idle_timeout_s: float = 300.0,
        stall_timeout_s: float = 10.0,
        max_request_s: float = 120.0,
        traffic: KvTraffic | None = None,
        one_sided: OneSidedFactory | None = None,
    ) -> None:
        self._provider = provider
        self._listen = parse_address(listen)
        self._authority = authority
        self._tls = tls
        self._counters = counters if counters is not None else Counters()
        self._max_connections = max_connections
        self._timeouts = ServerTimeouts(handshake_timeout_s, idle_timeout_s, stall_timeout_s, max_request_s)
        self._traffic = traffic
        self._one_sided = one_sided
        self._lock = threading.Lock()
        self._stopping = False
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._sockets: dict[threading.Thread, socket.socket] = {}
        self._connections: dict[threading.Thread, ServerConnection] = {}

    @property
    def address(self) -> str:
        """``host:port`` that the server listens on."""
        if self._listener is None:
            raise Unavailable("the data-plane server has not been started")
        return format_address(*self._listener.getsockname()[:2])

    @property
    def busy(self) -> int:
        """Number of connections with a request under way."""
        with self._lock:
            return sum(connection.idle_since_s is None for connection in self._connections.values())

    def start(self) -> None:
        """Listen and accept connections.

        Raises:
            Unavailable: the address cannot be bound.
        """
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            set_options(listener)
            if self._traffic is not None:
                self._traffic.mark(listener)  # marks the answers to SYNs; accepted sockets inherit only a part of the mark
        except OSError as error:
            raise Unavailable("cannot listen for data connections", listen=f"{host}:{port}", error=error) from error
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="data-accept", daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """Close all connections, and wait until their threads have released the provider's parts and grants."""
        with self._lock:
            self._stopping = True
            connections = dict(self._sockets)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        for sock in connections.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        until_s = time.monotonic() + _JOIN_S
        for thread in [*connections, *([self._acceptor] if self._acceptor is not None else [])]:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                self._counters.add(transport_metrics.SERVER_STUCK_THREADS)
                log.warning("data-plane thread did not stop: %s (timeout_s=%s)", thread.name, _JOIN_S)
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, remote = listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                # e.g. out of file descriptors: try again after a short time
                self._counters.add(transport_metrics.ACCEPT_ERRORS)
                limited.warning("data connection not accepted: %s", error)
                time.sleep(0.05)
                continue
            try:
                self._begin_serving(sock, format_address(*remote[:2]))
            except Exception:  # the acceptor must survive a bug
                self._counters.add(transport_metrics.INTERNAL_ERRORS)
                log.exception("data connection not accepted: internal error")
                sock.close()

    def _begin_serving(self, sock: socket.socket, peer: str) -> None:
        """Serve an accepted connection in a thread of its own, or refuse it."""
        self._evict_connection()
        with self._lock:
            no_thread: RuntimeError | None = None
            full = self._stopping or len(self._sockets) >= self._max_connections
            if not full:
                thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"data-{peer}", daemon=True)
                self._sockets[thread] = sock
                try:
                    thread.start()  # under the lock, so that ``stop`` sees only started threads
                except RuntimeError as error:  # the process may start no further thread
                    del self._sockets[thread]
                    no_thread = error
        if full:
            self._counters.add(transport_metrics.CONNECTIONS_REFUSED)
            limited.warning("data connection refused: too many (peer=%s, open=%d)", peer, self._max_connections)
            self._refuse(sock, CapacityExceeded("too many data connections", limit=self._max_connections))
        elif no_thread is not None:
            self._counters.add(transport_metrics.ACCEPT_ERRORS)
            limited.warning("data connection not accepted: %s", no_thread)
            self._refuse(sock, CapacityExceeded("no thread for a further data connection"))
        else:
            self._counters.add(transport_metrics.CONNECTIONS)

    def _evict_connection(self) -> None:
        """Close one connection if ``max_connections`` are open.

        If many connections are unauthenticated, the oldest of these is closed, else the one that has been idle longest. Only the
        receiving side of an idle connection is shut, so that a request that has just arrived is still answered. A client that
        finds its idle connection closed opens another.
        """
        with self._lock:
            if len(self._sockets) < self._max_connections:
                return
            unauthenticated = [
                thread for thread in self._sockets if (one := self._connections.get(thread)) is None or not one.authenticated
            ]
            many = len(unauthenticated) > self._max_connections // UNAUTHENTICATED_SHARE
            idle = [(since, thread) for thread, one in self._connections.items() if (since := one.idle_since_s) is not None]
            if not many and not idle:
                return
            # dicts keep the order of insertion: the first is the oldest
            thread = unauthenticated[0] if many else min(idle, key=lambda entry: entry[0])[1]
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sockets[thread], socket.SHUT_RDWR if many else socket.SHUT_RD)
        state = "unauthenticated" if many else "idle"
        if many:
            self._counters.add(transport_metrics.UNAUTHENTICATED_CONNECTIONS_DROPPED)
        else:
            self._counters.add(transport_metrics.IDLE_CONNECTIONS_DROPPED)
        limited.warning("data connection evicted: %s (state=%s, open=%d)", thread.name, state, self._max_connections)
        thread.join(_EVICTION_S)

    def _refuse(self, sock: socket.socket, reason: CapacityExceeded) -> None:
        with contextlib.suppress(OSError):
            if self._tls is None:  # a TLS client could not read it
                sock.setblocking(False)
                sock.send(frames.encode_error(0, reason))
        sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        """Serve one connection. Runs in the connection's thread."""
        try:
            with self._open_wire(sock, peer) as wire:
                connection = ServerConnection(
                    wire, self._provider, self._authority, self._timeouts, self._counters, self._one_sided
                )
                with self._lock:
                    self._connections[threading.current_thread()] = connection
                connection.run()
        except PeerGone as gone:
            log.debug("data connection ended: %s", gone)
        except PeerStalled as stalled:
            self._counters.add(transport_metrics.STALLED_PEERS)
            limited.warning("data connection closed: peer stalled (%s)", stalled)
        except KVStoreError as error:
            self._counters.add(transport_metrics.REQUESTS_CUT)
            limited.warning("data connection closed: %s", error)
        except Exception:  # the server must survive a bug in one request
            self._counters.add(transport_metrics.INTERNAL_ERRORS)
            log.exception("data connection failed: internal error")
        finally:
            sock.close()
            with self._lock:
                self._connections.pop(threading.current_thread(), None)
                self._sockets.pop(threading.current_thread(), None)

    @contextlib.contextmanager
    def _open_wire(self, sock: socket.socket, peer: str) -> Iterator[Wire]:
        """Open the wire of a connection: mark the socket, perform the TLS handshake, apply the cap."""
        wire: Wire
        if self._traffic is not None:
            self._traffic.mark(sock)
        if self._tls is None:
            wire = PlainWire(sock, self._timeouts.stall_s)
        else:
            sock.settimeout(self._timeouts.handshake_s)
            try:
                secured = self._tls.wrap_socket(sock, server_side=True)
            except OSError as error:  # includes ssl.SSLError and timeouts
                self._counters.add(transport_metrics.TLS_FAILURES)
                limited.warning("data connection refused: TLS handshake failed (peer=%s, reason=%s)", peer, _reason(error))
                raise PeerGone("the TLS handshake failed", error=error) from error
            with self._lock:  # wrapping detached the socket, so ``stop`` must know the new one
                self._sockets[threading.current_thread()] = secured
                stopping = self._stopping
            wire = TlsWire(secured, self._timeouts.stall_s)
            if stopping:
                wire.shut()
            sock = secured
        try:
            yield wire if self._traffic is None else self._traffic.limited(wire, sock)
        finally:
            wire.close()


def _reason(error: OSError) -> str:
    """Why a TLS handshake failed, in a few words."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return "no handshake in time" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
