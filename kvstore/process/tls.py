"""TLS settings of a process, for its gRPC and data-plane sockets, and the renewal of its certificate.

Paths and switches only: ``kvstore.rpc.tls`` reads the files for gRPC, ``kvstore.transport`` for an ``ssl`` context.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvstore.core.errors import InvalidArgument

logger = logging.getLogger(__name__)

CHECK_S: Final = 2.0
"""Shortest time between two looks at the files."""
Loaded = TypeVar("Loaded")
_Stamps = tuple[tuple[int, int, int] | None, ...]


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


class TlsFiles(Generic[Loaded]):
    """The files of a ``TlsConfig`` in the form that a library takes, read again after they were replaced. Thread-safe.

    Files are replaced one after another. Until certificate and key fit, the last good ones stay in use.

    Args:
        config: the files.
        load: reads them; raises InvalidArgument or OSError if they cannot be used.
        now_s: a monotonic clock.

    Raises:
        InvalidArgument: the files cannot be used.
    """

    def __init__(
        self, config: TlsConfig, load: Callable[[TlsConfig], Loaded], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._load = load
        self._now_s = now_s
        self._lock = threading.Lock()
        self._checked_s = now_s()
        self._seen = self._used = _stamps(config)
        self.loaded = load(config)
        """The files as last read."""

    def renew(self) -> bool:
        """Read the files again if they were replaced, at most every ``CHECK_S``. Returns whether ``loaded`` is new."""
        with self._lock:
            now_s = self._now_s()
            if now_s - self._checked_s < CHECK_S:
                return False
            self._checked_s = now_s
            stamps = _stamps(self._config)
            if stamps == self._used:
                return False
            try:
                if self._config.cert is not None:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._config.cert, self._config.key)
                self.loaded = self._load(self._config)
            except (OSError, InvalidArgument) as error:  # ssl.SSLError is an OSError
                if stamps != self._seen:
                    logger.warning(
                        "TLS files not reloaded, the previous ones stay in use: %s (error=%s)",
                        self._config.cert or self._config.ca,
                        error,
                    )
                self._seen = stamps
                return False
            self._seen = self._used = stamps
            logger.info("TLS files reloaded: %s", self._config.cert or self._config.ca)
            return True


def renew_by_connection(context: ssl.SSLContext, files: TlsFiles[ssl.SSLContext]) -> None:
    """Let each new connection of a server's context use the files' present context.

    OpenSSL asks at each handshake which of several contexts serves the requested host, also if the client names none.
    """

    def choose(sock: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        files.renew()
        if files.loaded is not context:
            sock.context = files.loaded

    context.sni_callback = choose


def _stamps(config: TlsConfig) -> _Stamps:
    stamps: list[tuple[int, int, int] | None] = []
    for path in (config.ca, config.cert, config.key):
        try:
            found = None if path is None else path.stat()
        except OSError:  # being replaced
            found = None
        stamps.append(None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)
