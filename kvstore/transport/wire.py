"""One connected socket that moves exact numbers of bytes by a deadline, with TLS or without.

Without TLS the socket stays *blocking*, and the kernel keeps the deadline (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): one ``recv`` with
``MSG_WAITALL`` then takes megabytes in one call that never touches the interpreter lock, where Python's own timeouts would poll
and return every few packets. With TLS the record layer hands out 16 KiB at a time anyway, and Python's timeouts are used.

The kernel's timeout is a length, not a moment, so it is set anew when the last setting has aged: a wait may outlast its
deadline by up to ``REARM_S``.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvstore.core.errors import DeadlineExceeded, Unavailable

IOV_MAX = 1024
"""Most pieces in one ``sendmsg`` or ``recvmsg``: the kernel's ``UIO_MAXIOV``."""
REARM_S = 0.02
JOIN_BELOW_BYTES = 2048
"""Pieces shorter than this on average are joined before they are sent: a copy of 256 bytes costs a third of an I/O vector."""
_TLS_CHUNK = 256 << 10  # bounds the time one call may take under its timeout
_MIN_TIMEOUT_S = 0.001  # zero would mean no timeout
_TIMEVAL = struct.Struct("@ll")

Piece = bytes | memoryview


class PeerGone(Unavailable):
    """The other side closed the connection, or it broke."""


class PeerStalled(Unavailable):
    """The other side took or gave no byte for the longest time this side allows, though the deadline has not passed."""


class Wire(ABC):
    """A connected stream. One thread at a time uses it; ``shut`` may come from any other.

    Args:
        sock: the connection; owned from now on.
        stall_s: the longest time without progress that this side tolerates (None: the deadline alone counts). May be changed
            between two calls.
    """

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        self._sock = sock
        self.stall_s = stall_s

    @abstractmethod
    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        """Sends all bytes of all pieces.

        Raises:
            DeadlineExceeded: the deadline passed; some bytes may be on their way.
            PeerGone, PeerStalled: see there.
        """

    @abstractmethod
    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        """Fills all pieces. Raises as ``send``."""

    def receive(self, size: int, deadline_s: float) -> bytearray:
        """Receives exactly ``size`` bytes into new memory; the caller has checked the size."""
        data = bytearray(size)
        if size:
            self.receive_into((memoryview(data),), deadline_s)
        return data

    @abstractmethod
    def idle_and_open(self) -> bool:
        """Whether an idle connection looks usable: nothing to read, and no end of stream."""

    def shut(self) -> None:
        """Ends the stream both ways at once: a thread that waits in it fails with ``PeerGone``. Idempotent."""
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, which would let a reader go on with the cipher text
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the descriptor; only the thread that uses the wire may call it. Idempotent."""
        self.shut()
        self._sock.close()

    def _wait_s(self, deadline_s: float) -> float:
        """How long the next call may wait."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the data plane's deadline has passed")
        return left_s if self.stall_s is None else min(left_s, self.stall_s)

    def _no_progress(self, deadline_s: float) -> Exception:
        """What a wait without a byte means."""
        if time.monotonic() >= deadline_s - REARM_S:
            return DeadlineExceeded("the data plane's deadline has passed")
        return PeerStalled("the other side of a data connection has stalled", seconds=self.stall_s)


class PlainWire(Wire):
    """Clear text: the kernel copies between the socket and the caller's pieces, and nothing else does."""

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        super().__init__(sock, stall_s)
        sock.settimeout(None)
        self._armed: dict[int, tuple[float, float]] = {socket.SO_RCVTIMEO: (0.0, 0.0), socket.SO_SNDTIMEO: (0.0, 0.0)}

    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        for start in range(0, len(pieces), IOV_MAX):
            batch: Sequence[Piece] = pieces[start : start + IOV_MAX]
            left = sum(map(len, batch))
            if len(batch) > 8 and left < len(batch) * JOIN_BELOW_BYTES:
                batch = (b"".join(batch),)
            while left:
                self._arm(socket.SO_SNDTIMEO, deadline_s)
                try:
                    sent = self._sock.sendmsg(batch)
                except BlockingIOError:
                    raise self._no_progress(deadline_s) from None
                except OSError as error:
                    raise _gone(error) from error
                left -= sent
                if left:
                    batch = _after(batch, sent)

    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        for start in range(0, len(pieces), IOV_MAX):
            batch: Sequence[memoryview] = pieces[start : start + IOV_MAX]
            left = sum(map(len, batch))
            while left:
                self._arm(socket.SO_RCVTIMEO, deadline_s)
                try:
                    if len(batch) == 1:
                        received = self._sock.recv_into(batch[0], left, socket.MSG_WAITALL)
                    else:
                        received = self._sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
                except BlockingIOError:
                    raise self._no_progress(deadline_s) from None
                except OSError as error:
                    raise _gone(error) from error
                if not received:
                    raise PeerGone("the other side closed a data connection")
                left -= received
                if left:
                    batch = _after(batch, received)

    def idle_and_open(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end of the stream, or bytes that nobody asked for

    def readable(self, wait_s: float = 0.0) -> bool:
        """Whether ``receive`` would not wait for its first byte, also where the stream has ended; looks for at most so long."""
        if wait_s:
            waiting = select.poll()  # unlike select, it takes any descriptor
            waiting.register(self._sock, select.POLLIN)
            return bool(waiting.poll(wait_s * 1000))
        return not self.idle_and_open()

    def ended(self) -> bool:
        """Whether the stream has ended, though nobody is receiving."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _arm(self, option: int, deadline_s: float) -> None:
        armed_for_s, armed_at_s = self._armed[option]
        now_s = time.monotonic()
        if armed_for_s == deadline_s and now_s - armed_at_s < REARM_S and now_s < deadline_s:
            return
        wait_s = max(self._wait_s(deadline_s), _MIN_TIMEOUT_S)
        seconds = int(wait_s)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, int((wait_s - seconds) * 1e6)))
        except OSError as error:
            raise _gone(error) from error
        self._armed[option] = (deadline_s, now_s)


class TlsWire(Wire):
    """TLS: the record layer decrypts into the caller's pieces.

    Args:
        sock: an ``ssl.SSLSocket`` whose handshake is done.
        stall_s: as ``Wire``.
    """

    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, stall_s: float | None = None) -> None:
        super().__init__(sock, stall_s)

    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        # heads and headers go with what follows, or each would become a record of its own
        joined: list[Piece] = []
        small: list[Piece] = []
        for piece in pieces:
            if len(piece) < 8 * JOIN_BELOW_BYTES:
                small.append(piece)
                if len(small) < IOV_MAX:
                    continue
                joined.append(b"".join(small))
            else:
                joined += [b"".join(small), piece] if small else [piece]
            small = []
        if small:
            joined.append(b"".join(small))
        for piece in joined:
            view = memoryview(piece)
            while len(view):
                sent = self._call(self._sock.send, view[:_TLS_CHUNK], deadline_s)
                view = view[sent:]

    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        for piece in pieces:
            view = piece
            while len(view):
                received = self._call(self._sock.recv_into, view, deadline_s)
                if not received:
                    raise PeerGone("the other side closed a data connection")
                view = view[received:]

    def idle_and_open(self) -> bool:
        try:
            self._sock.settimeout(0)  # or Python would wait for bytes before it peeks
            # the raw socket's own method: what counts are bytes before the record layer
            more = socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(more)  # the record layer may have sent something of its own, e.g. a key update

    def _call(self, operation: Callable[[memoryview], int], view: memoryview, deadline_s: float) -> int:
        try:
            self._sock.settimeout(max(self._wait_s(deadline_s), _MIN_TIMEOUT_S))
            return operation(view)
        except TimeoutError:
            raise self._no_progress(deadline_s) from None
        except OSError as error:  # ssl.SSLError is one
            raise _gone(error) from error


def set_options(sock: socket.socket, buffer_bytes: int | None) -> None:
    """Options of every data socket: no delay for small frames, and (where given) socket buffers of a fixed size."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # loads come in bursts; BBR, a common default, paces each at what it believed before the pause: 16 MiB took 15-30 % longer
    with contextlib.suppress(OSError):  # a kernel without cubic: its default is used
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def _after(batch: Sequence[Piece], done: int) -> list[memoryview]:
    """What is left of pieces once ``done`` bytes of them have gone."""
    at = 0
    while done >= len(batch[at]):
        done -= len(batch[at])
        at += 1
    return [memoryview(batch[at])[done:], *(memoryview(piece) for piece in batch[at + 1 :])]


def _gone(error: OSError) -> PeerGone:
    return PeerGone("a data connection broke", error=errno.errorcode.get(error.errno or 0, type(error).__name__))
