"""Hands a node's arena to the engines on its host: a file descriptor over a unix socket, and a connection that says who lives.

The client connects, sends the 16 bytes of its session id (the secret that ``OpenSession`` gave it), and receives the arena's
descriptor (``SCM_RIGHTS``) and size. It keeps the connection for as long as it may touch the arena. When the connection ends (the
kernel sees to that even where the client is killed), the node may use the session's slots again.

Only this user may connect: the socket has mode 0600, and its folder, where it is made here, 0700.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import Conflict, DeadlineExceeded, InvalidArgument, PermissionDenied, Unavailable
from kvstore.core.limits import MAX_SESSIONS
from kvstore.core.types import KEY_BYTES, SessionId
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog

log = logging.getLogger(__name__)
limited = LimitedLog(log)

_REPLY = struct.Struct("<4sIQ")  # magic, 1: granted or 0: refused, size of the arena
_MAGIC = b"KVA1"
_MAX_PATH_BYTES = 107  # what a unix socket's address holds

OnConnect = Callable[[SessionId], tuple[int, int] | None]
OnClose = Callable[[SessionId], None]


class _Caller:
    """One connection at the door."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self.sock = sock
        self.until_s = until_s
        """When it must have named its session."""
        self.said = b""
        self.session: SessionId | None = None


class ArenaDoor:
    """The node's side. One thread watches all connections.

    Args:
        path: of the unix socket; an old one is replaced.
        on_connect: answers the descriptor (which stays the caller's) and size for a session, or None to refuse. Brief.
        on_close: told once for each session that was let in, as soon as its connection has ended, also by ``stop``. Brief.
        max_connections: those beyond are refused.
        handshake_timeout_s: how long a connection may take to name its session.
        counters: where events are counted.
    """

    def __init__(
        self,
        path: Path | str,
        on_connect: OnConnect,
        on_close: OnClose,
        *,
        max_connections: int = MAX_SESSIONS,
        handshake_timeout_s: float = 5.0,
        counters: Counters | None = None,
    ) -> None:
        self.path = Path(path)
        self._on_connect = on_connect
        self._on_close = on_close
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._counters = counters if counters is not None else Counters()
        self._callers: dict[socket.socket, _Caller] = {}
        self._open: set[SessionId] = set()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()

    def start(self) -> None:
        """Listens.

        Raises:
            InvalidArgument: the path is too long for a socket.
            Unavailable: the socket cannot be made.
        """
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise InvalidArgument("too long for the path of a unix socket", path=self.path, limit=_MAX_PATH_BYTES)
        listener = socket.socket(socket.AF_UNIX)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is there is not ours to close
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            self.path.chmod(0o600)  # nobody can connect before: it does not listen yet
            listener.listen(min(self._max_connections, 128))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise Unavailable("cannot open the arena's socket", path=self.path, error=error) from error
        self._thread = threading.Thread(target=self._run, args=(listener,), name="arena-door", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all connections and removes the socket. Idempotent."""
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
            try:
                while True:
                    for key, _ in selector.select(self._patience_s()):
                        if key.fileobj is self._wake_read:
                            return
                        if key.fileobj is listener:
                            self._accept(listener, selector)
                        else:
                            assert isinstance(key.fileobj, socket.socket)
                            self._hear(self._callers[key.fileobj], selector)
                    self._drop_silent(selector)
            finally:
                for caller in list(self._callers.values()):
                    self._end(caller, selector)
                self.path.unlink(missing_ok=True)

    def _patience_s(self) -> float | None:
        """Until the next silent connection has had its time."""
        waiting = [caller.until_s for caller in self._callers.values() if caller.session is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # gone again, or no descriptors left
            self._counters.add("arena_accept_errors_total")
            limited.warning("cannot accept a connection for the arena: %s", error)
            time.sleep(0.01)  # the condition may last: do not spin on it
            return
        if len(self._callers) >= self._max_connections:
            self._counters.add("arena_connections_refused_total")
            limited.warning("refused a connection for the arena: %d are open", self._max_connections)
            sock.close()
            return
        sock.setblocking(False)
        self._callers[sock] = _Caller(sock, time.monotonic() + self._handshake_timeout_s)
        selector.register(sock, selectors.EVENT_READ)

    def _hear(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        """A connection said something, or ended."""
        try:
            said = caller.sock.recv(KEY_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._end(caller, selector)
            return
        caller.said += said
        if caller.session is not None or len(caller.said) > KEY_BYTES:
            self._refuse(caller, selector, "said more than a session id")
        elif len(caller.said) == KEY_BYTES:
            self._let_in(caller, SessionId(caller.said), selector)

    def _let_in(self, caller: _Caller, session: SessionId, selector: selectors.BaseSelector) -> None:
        try:
            arena = self._on_connect(session) if session not in self._open else None
        except Exception:  # the edge of this thread: the door must outlive a bug behind it
            self._counters.add("arena_internal_errors_total")
            log.exception("cannot say whether a session may have the arena")
            arena = None
        if arena is None:
            self._refuse(caller, selector, "named no session that waits for its arena")
            return
        caller.session = session
        self._open.add(session)
        descriptor, size = arena
        try:
            socket.send_fds(caller.sock, [_REPLY.pack(_MAGIC, 1, size)], [descriptor])
        except OSError as error:
            log.info("an engine left before it had its arena: %s", error)
            self._end(caller, selector)

    def _refuse(self, caller: _Caller, selector: selectors.BaseSelector, why: str) -> None:
        self._counters.add("arena_connections_refused_total")
        limited.warning("refused a connection for the arena: it %s", why)
        with contextlib.suppress(OSError):
            caller.sock.send(_REPLY.pack(_MAGIC, 0, 0))
        self._end(caller, selector)

    def _drop_silent(self, selector: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.session is None and caller.until_s <= now_s]:
            self._refuse(caller, selector, "did not name a session in time")

    def _end(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        """Lets go of a connection, and tells of its session."""
        if self._callers.pop(caller.sock, None) is None:
            return
        selector.unregister(caller.sock)
        caller.sock.close()
        if caller.session is not None:
            self._open.discard(caller.session)
            try:
                self._on_close(caller.session)
            except Exception:  # as above
                self._counters.add("arena_internal_errors_total")
                log.exception("the end of a session was not taken in")


class ArenaMapping:
    """An engine's view of its node's arena, and the connection that keeps the session alive.

    Args:
        sock: to the door; owned from now on.
        memory: the mapping; owned from now on.
        size: of the arena.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap, size: int) -> None:
        self._sock = sock
        self._memory = memory
        self.size = size
        self.view = memoryview(memory)
        """The whole arena, writable."""
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the node still holds its end: if not, it has stopped, and nothing in the arena means anything any more."""
        if self._closed:
            return False
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Unmaps, then ends the connection: from then on the node may use the session's slots again. Idempotent.

        Raises:
            Conflict: views of the arena are still held: nothing has changed, for whoever holds them may touch it.
        """
        if self._closed:
            return
        try:
            self.view.release()
            self._memory.close()
        except BufferError as error:
            self.view = memoryview(self._memory)
            raise Conflict("views of the arena are still in use", error=error) from error
        self._closed = True
        self._sock.close()


def open_arena(path: Path | str, session_id: SessionId, timeout_s: float) -> ArenaMapping:
    """Maps the arena of the node behind a door.

    Args:
        path: the node's arena socket.
        session_id: what ``OpenSession`` answered.
        timeout_s: for connecting and the answer.

    Raises:
        Unavailable: nobody answers, or the arena cannot be mapped.
        DeadlineExceeded: no answer in time.
        PermissionDenied: the door refused the session, or this user may not connect.
    """
    if len(session_id) != KEY_BYTES:
        raise InvalidArgument("a session id takes 16 bytes", bytes=len(session_id))
    sock = socket.socket(socket.AF_UNIX)
    descriptors: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        sock.sendall(session_id)
        # the answer is one small message on a stream that carries nothing else, so it arrives whole
        answer, descriptors, _, _ = socket.recv_fds(sock, _REPLY.size, 1)
        size = _size_granted(answer, descriptors)
        memory = mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        sock.settimeout(None)
        return ArenaMapping(sock, memory, size)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded("the arena's socket did not answer in time", path=path, timeout_s=timeout_s) from error
        if isinstance(error, PermissionError):
            raise PermissionDenied("this user may not connect to the arena's socket", path=path) from error
        if isinstance(error, (OSError, ValueError)):
            raise Unavailable("cannot map the arena", path=path, error=error) from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)  # the mapping has its own hold on the memory


def _size_granted(answer: bytes, descriptors: list[int]) -> int:
    if len(answer) != _REPLY.size:
        raise Unavailable("the node closed the arena's socket")
    magic, granted, size = _REPLY.unpack(answer)
    if magic != _MAGIC:
        raise Unavailable("not an arena's socket")
    if not granted or not descriptors:
        raise PermissionDenied("the node has no such session, or it has its arena already")
    return int(size)
