"""TLS of data-plane sockets, made from the same configuration as gRPC's credentials. TLS 1.3 only.

A server uses a plain ``ssl`` context. A client uses a ``PeerTls``, which holds the context together with the name that the client
expects in the server's certificate, so that no connection can have one without the other. Clients connect to addresses, while the
certificates of all hosts carry a common name.
"""

from __future__ import annotations

import socket
import ssl
from typing import Self

from kvstore.core.errors import InvalidArgument
from kvstore.process.tls import TlsConfig, TlsFiles, renew_by_connection


class PeerTls:
    """The client side of TLS: trusted authorities, own certificate, and the expected server name. Thread-safe.

    Args:
        config: the files and the name. New connections use the files as they are then. Without ``ca``, authorities of the host
            are trusted.

    Raises:
        InvalidArgument: a file cannot be read.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._files = TlsFiles(config, _client_side)
        self._server_name = config.server_name

    @classmethod
    def of(cls, config: TlsConfig | None) -> Self | None:
        """Return the client side of a configuration; None (clear text) for None."""
        return None if config is None else cls(config)

    def wrap(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """Return the socket for TLS with the server at ``host``. Its ``do_handshake`` comes next; ``sock`` is detached.

        Raises:
            OSError: the connection was lost.
        """
        self._files.renew()
        return self._files.loaded.wrap_socket(sock, server_hostname=self._server_name or host, do_handshake_on_connect=False)


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """Return the server side of a configuration. New connections get the certificate as its files are then.

    Raises:
        InvalidArgument: the certificate is missing, or a file cannot be read.
    """
    files = TlsFiles(config, _server_side)
    renew_by_connection(files.loaded, files)
    return files.loaded


def _server_side(config: TlsConfig) -> ssl.SSLContext:
    if config.cert is None:
        raise InvalidArgument("a TLS server requires a certificate and its key")
    context = _context(config, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if config.require_client_cert else ssl.CERT_NONE
    context.num_tickets = 0  # session tickets would leave unread bytes on the idle sockets of the pool
    return context


def _client_side(config: TlsConfig) -> ssl.SSLContext:
    context = _context(config, ssl.PROTOCOL_TLS_CLIENT)
    if config.ca is None:
        context.load_default_certs()
    return context


def _context(config: TlsConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if config.ca is not None:
            context.load_verify_locations(cafile=config.ca)
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("cannot use the TLS files", ca=config.ca, cert=config.cert, key=config.key, error=error) from error
    return context
