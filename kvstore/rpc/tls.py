"""gRPC credentials from a ``TlsConfig``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from kvstore.core.errors import InvalidArgument
from kvstore.process.tls import TlsConfig, TlsFiles


def server_credentials(tls: TlsConfig, begun: Callable[[], None]) -> grpc.ServerCredentials:
    """Credentials of a server. New connections get the certificate as its files are now.

    Args:
        tls: the server's certificate and trusted authorities.
        begun: called at the start of each handshake, from a thread of gRPC.

    Raises:
        InvalidArgument: the certificate is not set, or a file cannot be read.
    """
    if tls.cert is None or tls.key is None:
        raise InvalidArgument("a TLS server requires a certificate and its key; set cert and key")
    files = TlsFiles(tls, _server_files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        begun()
        return files.loaded if files.renew() else None  # None keeps the certificate

    return grpc.dynamic_ssl_server_credentials(
        files.loaded,
        fetch,  # type: ignore[arg-type]  # the stubs omit None
        require_client_authentication=tls.require_client_cert,
    )


def _server_files(tls: TlsConfig) -> grpc.ServerCertificateConfiguration:
    assert tls.cert is not None
    assert tls.key is not None
    return grpc.ssl_server_certificate_configuration(
        [(_read(tls.key), _read(tls.cert))], root_certificates=_read(tls.ca) if tls.ca is not None else None
    )


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials of a client, as the files are now. Without ``ca`` it trusts the authorities of the host.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca) if tls.ca is not None else None,
        private_key=_read(tls.key) if tls.key is not None else None,
        certificate_chain=_read(tls.cert) if tls.cert is not None else None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument("cannot read a TLS file", path=path, reason=error.strerror or error) from error
