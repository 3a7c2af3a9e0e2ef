"""Shares a node's arena with the engines on its host: a file descriptor over a unix socket.

The client connects, sends the 16 bytes of its session id (the secret that ``OpenSession`` returned), and receives the arena's
descriptor (``SCM_RIGHTS``) and size. It keeps the connection open for as long as it may access the arena. When the connection
ends (the kernel closes it even if the client is killed), the node may reuse the session's slots.

Only the same user may connect: the socket has mode 0600, and its folder, if it is created here, 0700.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.limits import MAX_SESSIONS
from kvstore.core.types import KEY_BYTES, SessionId
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import volumes as volumes_metrics

log = logging.getLogger(__name__)
limited = LimitedLog(log)

REPLY = struct.Struct("<4sIQ")  # magic, 1 (granted) or 0 (refused), size of the arena
MAGIC = b"KVA1"
_MAX_PATH_BYTES = 107  # limit of a unix socket's address
_PAUSE_S = 0.01  # after an error that may persist: avoids a busy loop

OnConnect = Callable[[SessionId], tuple[int, int] | None]
OnClose = Callable[[SessionId], None]


class _ArenaClient:
    """One connection to the arena server."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self.sock = sock
        self.until_s = until_s
        """Deadline for the session id."""
        self.received = b""
        self.session: SessionId | None = None


class ArenaServer:
    """The node's side: serves the arena's descriptor. One thread serves all connections.

    Args:
        path: path of the unix socket; an existing socket is replaced.
        on_connect: returns descriptor and size of the arena for a session, or None to refuse. The descriptor stays open. Must not
            block.
        on_close: called once per accepted session after its connection has ended, also by ``stop``. Must not block.
        max_connections: further connections are refused.
        handshake_timeout_s: maximum time until a connection has sent its session id.
        counters: counts refusals and errors.
    """

    def __init__(
        self,
        path: Path | str,
        on_connect: OnConnect,
        on_close: OnClose,
        *,
        max_connections: int = MAX_SESSIONS,
        handshake_timeout_s: float = 5.0,
        counters: Counters,
    ) -> None:
        self.path = Path(path)
        self._on_connect = on_connect
        self._on_close = on_close
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._counters = counters
        self._clients: dict[socket.socket, _ArenaClient] = {}
        self._open: set[SessionId] = set()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()

    def start(self) -> None:
        """Listen and serve.

        Raises:
            InvalidArgument: the path is too long for a unix socket.
            Unavailable: the socket cannot be created.
        """
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise InvalidArgument("path too long for a unix socket", path=self.path, limit=_MAX_PATH_BYTES)
        listener = socket.socket(socket.AF_UNIX)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode of an existing folder is left unchanged
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            self.path.chmod(0o600)  # before listen, so that no other user can connect
            listener.listen(min(self._max_connections, 128))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise Unavailable("cannot open the arena's socket", path=self.path, error=error) from error
        self._thread = threading.Thread(target=self._run, args=(listener,), name="arena-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and remove the socket. Idempotent."""
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._wake_write.send(b"\0")
            self._thread.join(5.0)
            self._thread = None
        self._wake_read.close()
        self._wake_write.close()

    def _run(self, listener: socket.socket) -> None:
        with listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while self._serve(listener, selector):
                pass
            for client in list(self._clients.values()):
                self._end(client, selector)
            self.path.unlink(missing_ok=True)

    def _serve(self, listener: socket.socket, selector: selectors.BaseSelector) -> bool:
        """Handle what has happened. Returns False after ``stop``.

        No error ends the thread: its end would report the sessions as closed, and their slots would be given to others while
        engines still write to them.
        """
        try:
            for key, _ in selector.select(self._next_timeout_s()):
                if key.fileobj is self._wake_read:
                    return False
                if key.fileobj is listener:
                    self._accept(listener, selector)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(self._clients[key.fileobj], selector)
            self._expire_handshakes(selector)
        except Exception:  # noqa: BLE001  # thread edge, see above
            self._counters.add(volumes_metrics.ARENA_INTERNAL_ERRORS)
            limited.warning("arena connections: unexpected error, trying again\n%s", traceback.format_exc())
            time.sleep(_PAUSE_S)
        return True

    def _next_timeout_s(self) -> float | None:
        """Return the seconds until the next handshake times out; None: no handshake is under way."""
        waiting = [client.until_s for client in self._clients.values() if client.session is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # the client has left, or no descriptors are left
            self._counters.add(volumes_metrics.ARENA_ACCEPT_ERRORS)
            limited.warning("arena connection not accepted: %s", error)
            time.sleep(_PAUSE_S)
            return
        if len(self._clients) >= self._max_connections:
            self._counters.add(volumes_metrics.ARENA_CONNECTIONS_REFUSED)
            limited.warning("arena connection refused: too many (open=%d)", self._max_connections)
            sock.close()
            return
        sock.setblocking(False)
        try:
            selector.register(sock, selectors.EVENT_READ)
        except (OSError, MemoryError) as error:  # no memory, or too many watched descriptors
            self._counters.add(volumes_metrics.ARENA_ACCEPT_ERRORS)
            limited.warning("arena connection not accepted: %s", error)
            sock.close()
            return
        self._clients[sock] = _ArenaClient(sock, time.monotonic() + self._handshake_timeout_s)

    def _receive(self, client: _ArenaClient, selector: selectors.BaseSelector) -> None:
        """Handle bytes from a connection, or its end."""
        try:
            data = client.sock.recv(KEY_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(client, selector)
            return
        client.received += data
        if client.session is not None or len(client.received) > KEY_BYTES:
            self._refuse(client, selector, "more bytes than a session id")
        elif len(client.received) == KEY_BYTES:
            self._accept_session(client, SessionId(client.received), selector)

    def _accept_session(self, client: _ArenaClient, session: SessionId, selector: selectors.BaseSelector) -> None:
        try:
            arena = self._on_connect(session) if session not in self._open else None
        except Exception:  # the thread must survive a bug in the callback
            self._counters.add(volumes_metrics.ARENA_INTERNAL_ERRORS)
            log.exception("arena session check failed")
            arena = None
        if arena is None:
            self._refuse(client, selector, "no such session waits for its arena")
            return
        client.session = session
        self._open.add(session)
        descriptor, size = arena
        try:
            socket.send_fds(client.sock, [REPLY.pack(MAGIC, 1, size)], [descriptor])
        except OSError as error:
            log.info("arena client disconnected before the answer: %s", error)
            self._end(client, selector)

    def _refuse(self, client: _ArenaClient, selector: selectors.BaseSelector, why: str) -> None:
        self._counters.add(volumes_metrics.ARENA_CONNECTIONS_REFUSED)
        limited.warning("arena connection refused: %s", why)
        with contextlib.suppress(OSError):
            client.sock.send(REPLY.pack(MAGIC, 0, 0))
        self._end(client, selector)

    def _expire_handshakes(self, selector: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        for client in [client for client in self._clients.values() if client.session is None and client.until_s <= now_s]:
            self._refuse(client, selector, "no session id in time")

    def _end(self, client: _ArenaClient, selector: selectors.BaseSelector) -> None:
        """Close a connection and report the end of its session."""
        if self._clients.pop(client.sock, None) is None:
            return
        selector.unregister(client.sock)
        client.sock.close()
        if client.session is not None:
            self._open.discard(client.session)
            try:
                self._on_close(client.session)
            except Exception:  # the thread must survive a bug in the callback
                self._counters.add(volumes_metrics.ARENA_INTERNAL_ERRORS)
                log.exception("arena session end not handled")
