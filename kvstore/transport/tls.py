"""``ssl`` contexts for data-plane sockets, from the same configuration that gRPC's credentials are made of."""

from __future__ import annotations

import ssl

from kvstore.core.errors import InvalidArgument
from kvstore.core.tls import TlsConfig


def ssl_context(config: TlsConfig, *, server_side: bool) -> ssl.SSLContext:
    """A context that speaks TLS 1.3 only and always knows whom it trusts.

    Args:
        config: PEM files. A server needs ``cert``; a client without ``ca`` trusts the system's authorities.
        server_side: which side of the connection it is for.

    Raises:
        InvalidArgument: a server without a certificate, or files that cannot be read.
    """
    if server_side and config.cert is None:
        raise InvalidArgument("a TLS server takes a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if config.ca is not None:
            context.load_verify_locations(cafile=config.ca)
        elif not server_side:
            context.load_default_certs()
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("cannot use the TLS files", ca=config.ca, cert=config.cert, key=config.key, error=error) from error
    if server_side:
        context.verify_mode = ssl.CERT_REQUIRED if config.require_client_cert else ssl.CERT_NONE
        context.num_tickets = 0  # connections are pooled: resumption would only leave unread bytes on idle sockets
    return context
