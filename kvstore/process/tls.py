"""Where one process's TLS identity lies: shared by the gRPC and the data-plane sockets.

Pure: only paths and switches. ``kvstore.rpc.tls`` makes gRPC credentials of it, ``kvstore.transport`` an ``ssl`` context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of one side.

    Args:
        ca: certificates that the other side's certificate must descend from.
        cert: this side's certificate chain. A server needs it; a client only where the server asks (mTLS).
        key: the private key of ``cert``.
        require_client_cert: server: refuse clients without a certificate of ``ca``.
        server_name: client: the name expected in the server's certificate, where it is not the host name dialled.

    Raises:
        InvalidArgument: a certificate without its key, or the other way round.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    require_client_cert: bool = False
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("TLS takes a certificate and its key together", cert=self.cert, key=self.key)
        if self.require_client_cert and self.ca is None:
            raise InvalidArgument("asking clients for certificates takes the CA that they must descend from")
