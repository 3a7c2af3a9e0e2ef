"""TLS settings of a process, for its gRPC and data-plane sockets.

Paths and switches only: ``kvstore.rpc.tls`` reads the files for gRPC, ``kvstore.transport`` for an ``ssl`` context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of one process.

    Args:
        ca: certificates of the authorities that sign the peer's certificate.
        cert: certificate chain of this process. Required for a server, and for a client if the server requires one (mTLS).
        key: private key of ``cert``.
        require_client_cert: server only: reject clients without a certificate signed by ``ca``.
        server_name: client only: name in the server's certificate, if it is not the host name of the address.

    Raises:
        InvalidArgument: a certificate without a key, a key without a certificate, or ``require_client_cert`` without ``ca``.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    require_client_cert: bool = False
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(
                "TLS requires both a certificate and its key; set both or neither", cert=self.cert, key=self.key
            )
        if self.require_client_cert and self.ca is None:
            raise InvalidArgument("require_client_cert requires ca, the authority that signs the clients' certificates")
