"""One connection to a Valkey server, shared by any number of callers: requests are pipelined, replies arrive in order."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import hiredis

from kvstore.core.errors import CapacityExceeded, PermissionDenied, Unauthenticated, Unavailable
from kvstore.index.valkey.address import Credentials

Reply: TypeAlias = "bytes | int | list[Reply] | hiredis.ReplyError | None"

MAX_OUTSTANDING: Final = 1 << 20
"""Maximum number of commands without a reply on one connection."""
UNACKNOWLEDGED_S: Final = 2.0
"""Time after which the kernel closes a connection whose peer acknowledges nothing. TCP tries again after pauses that double, so
after a cut of the network, the connection would stay away for about as long again."""
_NO_REPLY: Final = object()


def pack(*words: bytes | str | int) -> bytes:
    """Encode one command."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub has a tuple of one type
    return packed


def _hello(credentials: Credentials) -> bytes:
    """The first command on a connection; empty: none is needed."""
    if not credentials.password:
        return b""
    return pack("AUTH", *filter(None, (credentials.user, credentials.password)))


Done: TypeAlias = "Callable[[list[Reply] | None], None]"
"""Receives the replies to one request; None: the connection was lost before."""


class ValkeyConnection(asyncio.Protocol):
    """A connection of one event loop. Make it with ``connect``."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=_NO_REPLY)
        self._waiting: deque[tuple[int, list[Reply], Done]] = deque()
        self._outstanding = 0
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._lost is None and self._transport is not None

    def send(self, packed: bytes, count: int, done: Done) -> None:
        """Send ``count`` encoded commands. ``done`` gets their replies in order; errors of single commands are replies.

        Raises:
            Unavailable: the connection is closed.
            CapacityExceeded: too many commands wait for replies.
        """
        if self._transport is None or self._lost is not None:
            raise Unavailable(self._lost or "not connected to Valkey")
        if self._outstanding + count > MAX_OUTSTANDING:
            raise CapacityExceeded("too many commands wait for replies of Valkey", limit=MAX_OUTSTANDING)
        self._waiting.append((count, [], done))
        self._outstanding += count
        self._transport.write(packed)

    async def ask(self, packed: bytes, count: int = 1) -> list[Reply]:
        """Send commands and wait for their replies.

        Raises:
            Unavailable: the connection is closed or lost.
        """
        replies: asyncio.Future[list[Reply] | None] = asyncio.get_running_loop().create_future()

        def done(received: list[Reply] | None) -> None:
            if not replies.done():
                replies.set_result(received)

        self.send(packed, count, done)
        received = await replies
        if received is None:
            raise Unavailable(self._lost or "not connected to Valkey")
        return received

    def close(self) -> None:
        """Close the connection. Requests without replies end with None."""
        self._fail("the connection to Valkey was closed")

    # ---- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNACKNOWLEDGED_S * 1000))
        if self._lost is not None:  # closed while it was connecting
            transport.abort()

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while waiting:
                count, received, done = waiting[0]
                while len(received) < count:
                    reply = reader.gets()
                    if reply is _NO_REPLY:
                        return
                    received.append(reply)
                waiting.popleft()
                self._outstanding -= count
                done(received)
        except hiredis.ProtocolError as error:
            self._fail(f"the Valkey sent an invalid reply ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection to Valkey was lost ({exc or 'closed by the server'})")

    def _fail(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
        if self._transport is not None:
            self._transport.abort()
        self._outstanding = 0
        while self._waiting:
            self._waiting.popleft()[2](None)


async def connect(address: str, credentials: Credentials, tls: ssl.SSLContext | None, timeout_s: float) -> ValkeyConnection:
    """Open a connection and authenticate.

    Args:
        address: ``host:port``.
        credentials: identity.
        tls: None: no TLS.
        timeout_s: deadline of the whole.

    Raises:
        Unavailable: no server answers at the address, or its certificate is not trusted.
        Unauthenticated: the server rejects the user or the password, or requires one.
        PermissionDenied: the user may not use the cluster's commands.
    """
    host, _, port = address.rpartition(":")
    connection = ValkeyConnection()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: connection, host.strip("[]"), int(port), ssl=tls)
            first = _hello(credentials)
            answers = await connection.ask(first + pack("PING"), 2 if first else 1)
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise Unavailable(
            "the certificate of the Valkey server is not trusted: see metadata.valkey_ca",
            address=address,
            cause=error.verify_message,
        ) from error
    except (OSError, TimeoutError) as error:
        connection.close()
        raise Unavailable("no Valkey server answers", address=address, cause=_cause(error, timeout_s, tls)) from error
    except Unavailable as error:
        hint = "is it the port for clients of a Valkey server?" if tls is not None else "is it a Valkey server, and without TLS?"
        raise Unavailable("no Valkey server answers", address=address, cause=f"{error}; {hint}") from None
    except BaseException:  # cancelled: no caller will close the connection
        connection.close()
        raise
    for answer in answers:  # a server that rejects the password may still accept the default user
        if isinstance(answer, hiredis.ReplyError):
            connection.close()
            if ("AUTH" in str(answer) and "without any password" in str(answer)) or "no password is set" in str(answer):
                raise Unauthenticated(
                    "the Valkey server has no password: leave metadata.valkey_password_file unset, or give it one",
                    address=address,
                )
            raise refusal(answer, address) or Unavailable("Valkey is not ready", address=address, reply=str(answer))
    return connection


def _cause(error: OSError | TimeoutError, timeout_s: float, tls: ssl.SSLContext | None) -> str:
    """Why a connection failed, for people."""
    match error:
        case socket.gaierror():
            return "the host name is not known"
        case ssl.SSLError():
            return "it does not speak TLS: use valkey:// instead of valkeys://"
        case TimeoutError():
            return silence(timeout_s, tls)
    return os.strerror(error.errno).lower() if error.errno is not None else str(error)


def silence(timeout_s: float, tls: ssl.SSLContext | None) -> str:
    """The cause of a timeout. A server without TLS waits for the end of a handshake."""
    return f"no answer within {timeout_s:g} s" + ("" if tls is None else "; it may not speak TLS: use valkey://")


def refusal(reply: hiredis.ReplyError, address: str) -> Unauthenticated | PermissionDenied | None:
    """The error that a rejected command means, if it is about this client's identity."""
    code = str(reply).partition(" ")[0]
    if code == "NOAUTH":
        return Unauthenticated("Valkey requires a password, and none is sent: set metadata.valkey_password_file", address=address)
    if code == "WRONGPASS":
        return Unauthenticated("Valkey rejects the user or the password", address=address, reply=str(reply))
    if code == "NOPERM":
        return PermissionDenied("the Valkey user may not run a command", address=address, reply=str(reply))
    return None
