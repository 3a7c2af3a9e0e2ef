"""The data plane's server: sends blocks straight from a provider's views, receives blocks straight into granted slots.

One thread accepts, and each connection has one thread of its own (at most ``max_connections``): moving bytes is what it does, and
it does so in long system calls without the interpreter lock. Nothing a peer does holds pins or slots for longer than the
request's deadline (at most ``max_request_s``), or than ``stall_timeout_s`` without progress: parts are released and grants
committed or aborted exactly once, however the connection ends.

Hostile input: every length is checked before memory is taken (``frames``), a connection must say a good HELLO within
``handshake_timeout_s``. At ``max_connections`` one gives way to a new one: of strangers, which have not said a good HELLO yet,
the one that came first, where they are many; else the connection that has been idle longest. So a client that leaks connections
locks nobody out, and strangers displace one another; where none is idle, the new one is refused with an error that says so.
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
from kvstore.transport import frames
from kvstore.transport.addresses import format_address, parse_address
from kvstore.transport.contract import BlockProvider
from kvstore.transport.nixl.port import NixlPort
from kvstore.transport.serving import ServerConnection, ServerTimes
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.traffic import KvTraffic
from kvstore.transport.wire import PeerGone, PeerStalled, PlainWire, TlsWire, Wire, set_options

log = logging.getLogger(__name__)
limited = LimitedLog(log)

_JOIN_S = 5.0
STRANGERS_SHARE = 4
"""Connections that have not said a good HELLO may be this fraction (1/n) of all before they make way for one another."""
_GIVE_WAY_S = 0.5
"""A connection told to give way ends at once, unless a request had just come."""


class TcpServer:
    """Serves one provider on one TCP port.

    Args:
        provider: has the blocks.
        listen: ``host:port``; port 0 takes a free one (see ``address``).
        authority: verifies tickets. None: anybody may reach every namespace.
        tls: server-side context. None: clear text.
        counters: where events are counted.
        max_connections: one more takes the place of a stranger or of the one idle longest, or is refused where none is idle.
        handshake_timeout_s: how long a new connection may take for TLS and HELLO.
        idle_timeout_s: how long a connection may wait between requests.
        stall_timeout_s: how long a peer may neither take nor give a byte in the middle of a request.
        max_request_s: the longest a request may take, whatever deadline it names.
        socket_buffer_bytes: fixed socket buffers. None: the kernel sizes them.
        traffic: class of the traffic. None: unmarked and without a cap.
        nixl: moves payload for readers that ask for it; owned by the caller. None: all goes over the connections.
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
        socket_buffer_bytes: int | None = None,
        traffic: KvTraffic | None = None,
        nixl: NixlPort | None = None,
    ) -> None:
        self._provider = provider
        self._listen = parse_address(listen)
        self._authority = authority
        self._tls = tls
        self._counters = counters if counters is not None else Counters()
        self._max_connections = max_connections
        self._times = ServerTimes(handshake_timeout_s, idle_timeout_s, stall_timeout_s, max_request_s)
        self._socket_buffer_bytes = socket_buffer_bytes
        self._traffic = traffic
        self._nixl = nixl
        self._lock = threading.Lock()
        self._stopping = False
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._sockets: dict[threading.Thread, socket.socket] = {}
        self._connections: dict[threading.Thread, ServerConnection] = {}

    @property
    def address(self) -> str:
        """``host:port`` that is listened on."""
        if self._listener is None:
            raise Unavailable("the data-plane server has not been started")
        return format_address(*self._listener.getsockname()[:2])

    @property
    def busy(self) -> int:
        """Connections with a request under way."""
        with self._lock:
            return sum(connection.idle_since_s is None for connection in self._connections.values())

    def start(self) -> None:
        """Listens and accepts.

        Raises:
            Unavailable: the address cannot be had.
        """
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # sockets that are accepted inherit the buffer sizes, and windows are agreed on before accept returns
            listener = socket.create_server((host, port), family=family, backlog=min(self._max_connections, 128))
            set_options(listener, self._socket_buffer_bytes)
            if self._traffic is not None:
                self._traffic.mark(listener)  # what answers the dial; not all of it is inherited
        except OSError as error:
            raise Unavailable("cannot listen for data connections", listen=f"{host}:{port}", error=error) from error
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="data-accept", daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """Ends all connections, and waits until their threads have let go of what the provider gave them."""
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
                self._counters.add("transport_server_stuck_threads_total")
                log.warning("a data-plane thread did not end within %s s: %s", _JOIN_S, thread.name)
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, remote = listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                # e.g. out of file descriptors: the next connection may fare better, but not at once
                self._counters.add("transport_accept_errors_total")
                limited.warning("cannot accept a data connection: %s", error)
                time.sleep(0.05)
                continue
            self._make_room()
            peer = format_address(*remote[:2])
            with self._lock:
                refused = self._stopping or len(self._sockets) >= self._max_connections
                if not refused:
                    thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"data-{peer}", daemon=True)
                    self._sockets[thread] = sock
                    thread.start()  # under the lock, so that ``stop`` only ever meets started threads
            if refused:
                self._refuse(sock)
            else:
                self._counters.add("transport_connections_total")

    def _make_room(self) -> None:
        """Where the bound is reached, ends a connection: of strangers, where they are many, else that idle longest.

        Of an idle one only the receiving side is shut: a request that came in this very moment is still answered, and a client
        that finds an idle connection ended opens another.
        """
        with self._lock:
            if len(self._sockets) < self._max_connections:
                return
            strangers = [thread for thread in self._sockets if (one := self._connections.get(thread)) is None or not one.known]
            many = len(strangers) > self._max_connections // STRANGERS_SHARE
            idle = [(since, thread) for thread, one in self._connections.items() if (since := one.idle_since_s) is not None]
            if not many and not idle:
                return
            # in the order in which they came
            thread = strangers[0] if many else min(idle, key=lambda entry: entry[0])[1]
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sockets[thread], socket.SHUT_RDWR if many else socket.SHUT_RD)
        why = "that has shown no ticket" if many else "idle longest"
        if many:
            self._counters.add("transport_stranger_connections_dropped_total")
        else:
            self._counters.add("transport_idle_connections_dropped_total")
        limited.warning("%d data connections are open: %s, %s, gives way", self._max_connections, thread.name, why)
        thread.join(_GIVE_WAY_S)

    def _refuse(self, sock: socket.socket) -> None:
        self._counters.add("transport_connections_refused_total")
        limited.warning("refused a data connection: %d are open", self._max_connections)
        with contextlib.suppress(OSError):
            if self._tls is None:  # a TLS peer could not read it
                sock.setblocking(False)
                sock.send(frames.encode_error(0, CapacityExceeded("too many data connections", limit=self._max_connections)))
        sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        """The life of one connection; the thread's edge."""
        try:
            with self._secured(sock, peer) as wire:
                connection = ServerConnection(wire, self._provider, self._authority, self._times, self._counters, self._nixl)
                with self._lock:
                    self._connections[threading.current_thread()] = connection
                connection.run()
        except PeerGone as gone:
            log.debug("a data connection ended: %s", gone)
        except PeerStalled as stalled:
            self._counters.add("transport_stalled_peers_total")
            limited.warning("closed a data connection that stalled: %s", stalled)
        except KVStoreError as error:
            self._counters.add("transport_requests_cut_total")
            limited.warning("closed a data connection: %s", error)
        except Exception:  # the edge of this thread: the server must outlive a bug in one request
            self._counters.add("transport_internal_errors_total")
            log.exception("a data connection met a bug")
        finally:
            sock.close()
            with self._lock:
                self._connections.pop(threading.current_thread(), None)
                self._sockets.pop(threading.current_thread(), None)

    @contextlib.contextmanager
    def _secured(self, sock: socket.socket, peer: str) -> Iterator[Wire]:
        """The connection as a wire, after the TLS handshake where there is one."""
        wire: Wire
        if self._traffic is not None:
            self._traffic.mark(sock)
        if self._tls is None:
            wire = PlainWire(sock, self._times.stall_s)
        else:
            sock.settimeout(self._times.handshake_s)
            try:
                secured = self._tls.wrap_socket(sock, server_side=True)
            except OSError as error:  # ssl.SSLError and timeouts are
                self._counters.add("transport_tls_failures_total")
                limited.warning("refused a data connection: TLS handshake failed (peer=%s, reason=%s)", peer, _reason(error))
                raise PeerGone("the TLS handshake failed", error=error) from error
            with self._lock:  # wrapping detached the socket that ``stop`` knew
                self._sockets[threading.current_thread()] = secured
                stopping = self._stopping
            wire = TlsWire(secured, self._times.stall_s)
            if stopping:
                wire.shut()
            sock = secured
        try:
            yield wire if self._traffic is None else self._traffic.paced(wire, sock)
        finally:
            wire.close()


def _reason(error: OSError) -> str:
    """Why a TLS handshake failed, in a few words."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return "no handshake in time" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
