"""An ASGI application as this store serves it: bound first, told when it is ready, stopped gracefully.

Needs uvicorn and Starlette (extras).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvstore.core.errors import InvalidArgument
from kvstore.process.ready_file import write_ready_file_aio
from kvstore.process.tls import TlsConfig, TlsFiles, renew_by_connection
from kvstore.rpc.address import cannot_listen

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2_048
_KEEP_ALIVE_S: Final = 75
_FIRST_REQUEST_S: Final = 30.0
"""Time from the opening of a connection to the end of its first request's headers."""
_UNSENT_BYTES: Final = 64 << 10
"""Limit, per connection, of unsent bytes in the kernel beyond the client's window. Without it megabytes are queued, and the
sender learns late, in steps of megabytes, whether the client reads."""
ABORT: Final = "kvstore.abort"
"""In ``scope["state"]``: a function that closes the request's connection immediately and drops unsent bytes."""


async def serve(
    app: Any,  # noqa: ANN401  # an ASGI application
    listener: socket.socket,
    *,
    tls: TlsConfig | None,
    stop_grace_s: float,
    ready_file: Path | None,
    malformed: Callable[[], Response],
) -> None:
    """Serve until SIGTERM or SIGINT. Return after the running requests have ended, or after ``stop_grace_s``.

    Args:
        app: the ASGI application.
        listener: the result of ``bind``.
        tls: this server's certificate; None: plain HTTP.
        stop_grace_s: time limit for running requests at shutdown.
        ready_file: written as JSON ``{"address", "pid"}`` when requests are answered.
        malformed: makes the response to invalid HTTP, which never reaches the application; its connection is closed.

    Raises:
        InvalidArgument: TLS without a certificate, or files that cannot be read.
    """
    address = "{}:{}".format(*listener.getsockname()[:2])
    await _Server(_config(app, tls, stop_grace_s, malformed), ready_file, address).serve(sockets=[listener])


def bind(listen: str, setting: str) -> socket.socket:
    """The listening socket.

    Args:
        listen: ``host:port``.
        setting: which setting names it.

    Raises:
        Unavailable: it cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    # the protocol is named, or asyncio does not know it for TCP and leaves Nagle's delays on: 40 ms a piece
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)  # its connections inherit it
        listener.bind((host, int(port)))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(listen, setting, error) from error
    return listener


class HttpConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn's best one is chosen as it is imported
    """uvicorn connection that an application can abort (``ABORT``), with the application's response to invalid HTTP.

    ASGI itself defines neither. uvicorn's own response to invalid HTTP is plain text.
    """

    app_state: dict[str, Any]
    malformed: Callable[[], Response]

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the idle timer of a new connection."""
        self.app_state = {**self.app_state, ABORT: transport.abort}
        super().connection_made(transport)
        self._idle = asyncio.get_running_loop().call_later(_FIRST_REQUEST_S, self._end_idle)

    def on_response_complete(self) -> None:
        """Expect the next request in time. uvicorn's own limit ends with the first byte of it."""
        super().on_response_complete()
        self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(_KEEP_ALIVE_S + _FIRST_REQUEST_S, self._end_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the idle timer of a closed connection."""
        self._idle.cancel()
        super().connection_lost(exc)

    def _end_idle(self) -> None:
        """Abort a connection on which no request is in progress: its client sent none, or an incomplete one."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def send_400_response(self, _message: str) -> None:
        """Reject invalid HTTP and close the connection. If a response has begun, nothing is written into it."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            answer = self.malformed()
            lines = [f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()]
            lines += [name + b": " + value for name, value in (*self.server_state.default_headers, *answer.raw_headers)]
            self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        self.transport.close()


class _Server(uvicorn.Server):
    """Announce that requests are answered: in the log, and in the ready file if one is configured."""

    def __init__(self, config: uvicorn.Config, ready_file: Path | None, address: str) -> None:
        super().__init__(config)
        self._ready_file = ready_file
        self._address = address

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop the server gracefully at SIGTERM and SIGINT. Unlike uvicorn, do not raise the signal again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        logger.info("ready on %s", self._address)
        if self._ready_file is not None:
            await write_ready_file_aio(self._ready_file, address=self._address)


def _config(
    app: Any,  # noqa: ANN401  # an ASGI application
    tls: TlsConfig | None,
    stop_grace_s: float,
    malformed: Callable[[], Response],
) -> uvicorn.Config:
    if tls is not None and (tls.cert is None or tls.key is None):
        raise InvalidArgument("a TLS server requires a certificate and its key; set cert and key")
    made = functools.partial(
        uvicorn.Config,
        app,
        http=type("Connection", (HttpConnection,), {"malformed": staticmethod(malformed)}),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(stop_grace_s)),
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
        ssl_ca_certs=None if tls is None or tls.ca is None else str(tls.ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls is not None and tls.require_client_cert else ssl.CERT_NONE,
    )
    config = made()
    config.load()
    if tls is not None and config.ssl is not None:
        renew_by_connection(config.ssl, TlsFiles(tls, lambda _: _context(made())))
    return config


def _context(config: uvicorn.Config) -> ssl.SSLContext:
    config.load()
    assert config.ssl is not None
    return config.ssl
