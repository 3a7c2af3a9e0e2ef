"""One connected socket that moves exact numbers of bytes before a deadline, with or without TLS.

Without TLS the socket stays *blocking*, and the kernel enforces the deadline (``SO_RCVTIMEO``, ``SO_SNDTIMEO``). One ``recv``
with ``MSG_WAITALL`` then receives megabytes in one call without the interpreter lock, while Python's own timeouts would poll
and return every few packets. With TLS the record layer delivers 16 KiB at a time anyway, so Python's timeouts are used.

The kernel's timeout is a duration, so it is set again if the last setting is older than ``REARM_S``. A wait may therefore exceed
its deadline by up to ``REARM_S``.
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
"""Maximum pieces in one ``sendmsg`` or ``recvmsg``: the kernel's ``UIO_MAXIOV``."""
REARM_S = 0.02
JOIN_BELOW_BYTES = 2048
"""Pieces with a shorter average are joined before they are sent: copying 256 bytes costs a third of an I/O vector."""
_TLS_CHUNK = 256 << 10  # bounds the time that one call may take
_MIN_TIMEOUT_S = 0.001  # zero means no timeout
_TIMEVAL = struct.Struct("@ll")

Piece = bytes | memoryview


class PeerGone(Unavailable):
    """The peer closed the connection, or the connection broke."""


class PeerStalled(Unavailable):
    """The peer neither took nor sent a byte for ``stall_s``, although the deadline has not passed."""


class Wire(ABC):
    """A connected stream. One thread at a time uses it; any other thread may call ``shut``.

    Args:
        sock: the connection; owned from now on.
        stall_s: maximum time without progress before ``PeerStalled``; None: only the deadline counts. May be changed between two
            calls.
    """

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        self._sock = sock
        self.stall_s = stall_s

    @abstractmethod
    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        """Send all bytes of all pieces.

        Raises:
            DeadlineExceeded: the deadline passed; some bytes may have been sent.
            PeerGone: the connection is closed or broken.
            PeerStalled: no progress for ``stall_s``.
        """

    @abstractmethod
    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        """Fill all pieces with received bytes. Raises as ``send``."""

    def receive(self, size: int, deadline_s: float) -> bytearray:
        """Receive exactly ``size`` bytes into new memory. The caller has checked the size."""
        data = bytearray(size)
        if size:
            self.receive_into((memoryview(data),), deadline_s)
        return data

    @abstractmethod
    def idle_and_open(self) -> bool:
        """Return whether an idle connection looks usable: no bytes to read, and no end of stream."""

    def shut(self) -> None:
        """End the stream in both directions at once. A thread that waits in the wire fails with ``PeerGone``. Idempotent."""
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, after which a reader would receive cipher text
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. Only the thread that uses the wire may call this. Idempotent."""
        self.shut()
        self._sock.close()

    def _wait_s(self, deadline_s: float) -> float:
        """Return how long the next call may wait."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("data-plane deadline exceeded")
        return left_s if self.stall_s is None else min(left_s, self.stall_s)

    def _no_progress(self, deadline_s: float) -> Exception:
        """Return the error for a wait without progress: the deadline passed, or the peer stalled."""
        if time.monotonic() >= deadline_s - REARM_S:
            return DeadlineExceeded("data-plane deadline exceeded")
        return PeerStalled("the peer of a data connection stalled", seconds=self.stall_s)


class PlainWire(Wire):
    """A wire without TLS: the kernel copies directly between the socket and the caller's pieces."""

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        super().__init__(sock, stall_s)
        sock.settimeout(None)
        self._armed: dict[int, tuple[tuple[float, float | None], float]] = {
            socket.SO_RCVTIMEO: ((0.0, None), 0.0),
            socket.SO_SNDTIMEO: ((0.0, None), 0.0),
        }

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
                    raise PeerGone("the peer closed a data connection")
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
        return False  # end of stream, or unexpected bytes

    def readable(self, wait_s: float = 0.0) -> bool:
        """Wait up to ``wait_s`` until bytes or the end of the stream can be received; return whether they can."""
        if wait_s:
            poller = select.poll()  # unlike select, poll accepts any descriptor
            poller.register(self._sock, select.POLLIN)
            return bool(poller.poll(wait_s * 1000))
        return not self.idle_and_open()

    def ended(self) -> bool:
        """Return whether the stream has ended, without receiving."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _arm(self, option: int, deadline_s: float) -> None:
        armed_for, armed_at_s = self._armed[option]
        limits_s = (deadline_s, self.stall_s)
        now_s = time.monotonic()
        if armed_for == limits_s and now_s - armed_at_s < REARM_S and now_s < deadline_s:
            return
        wait_s = max(self._wait_s(deadline_s), _MIN_TIMEOUT_S)
        seconds = int(wait_s)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, int((wait_s - seconds) * 1e6)))
        except OSError as error:
            raise _gone(error) from error
        self._armed[option] = (limits_s, now_s)


class TlsWire(Wire):
    """A wire with TLS: the record layer decrypts into the caller's pieces.

    Args:
        sock: an ``ssl.SSLSocket`` whose handshake is done.
        stall_s: as ``Wire``.
    """

    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, stall_s: float | None = None) -> None:
        super().__init__(sock, stall_s)

    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        # short pieces are joined, because each call makes a separate TLS record
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
                    raise PeerGone("the peer closed a data connection")
                view = view[received:]

    def idle_and_open(self) -> bool:
        try:
            self._sock.settimeout(0)  # else Python waits for bytes before it peeks
            # the raw socket's method sees bytes before the record layer
            more = socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(more)  # the record layer may have sent a control message, e.g. a key update

    def _call(self, operation: Callable[[memoryview], int], view: memoryview, deadline_s: float) -> int:
        try:
            self._sock.settimeout(max(self._wait_s(deadline_s), _MIN_TIMEOUT_S))
            return operation(view)
        except TimeoutError:
            raise self._no_progress(deadline_s) from None
        except OSError as error:  # includes ssl.SSLError
            raise _gone(error) from error


def set_options(sock: socket.socket) -> None:
    """Set the options of every data socket: no delay for small frames, keepalive, and cubic."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # loads come in bursts; BBR, a common default, starts each burst at the rate before the pause: 16 MiB took 15-30 % longer
    with contextlib.suppress(OSError):  # a kernel without cubic uses its default
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _after(batch: Sequence[Piece], done: int) -> list[memoryview]:
    """Return the rest of ``batch`` after ``done`` bytes have been moved."""
    at = 0
    while done >= len(batch[at]):
        done -= len(batch[at])
        at += 1
    return [memoryview(batch[at])[done:], *(memoryview(piece) for piece in batch[at + 1 :])]


def _gone(error: OSError) -> PeerGone:
    return PeerGone("data connection broke", error=errno.errorcode.get(error.errno or 0, type(error).__name__))
