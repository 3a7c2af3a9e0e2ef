"""Why a gRPC server cannot be reached, in words: refused, no answer, TLS on one side only, a certificate that does not fit.

gRPC says "Socket closed" or "failed to connect to all addresses" for most of these. :func:`diagnose` opens separate connections
to the same address, with the same TLS files, and reads the reason from the socket and from Python's ``ssl``. It runs after a
failed call, and in ``kvclient`` to choose among the nodes of a host. It ends within its timeout.

1. A TCP or unix connection distinguishes refused, unreachable, an unknown host name, and a host that does not answer.
2. With TLS configured, a handshake detects a server that speaks plain text, a certificate of another authority or for another
   name, and (TLS 1.3 sends it after the handshake) that the server requires another client certificate.
3. Without TLS, an HTTP/2 preface is sent. A gRPC server answers with SETTINGS; a server that speaks TLS closes the connection.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unauthenticated, Unavailable
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, is_unix
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.failover.addresses import entries_of

TIMEOUT_S: Final = 2.0
"""For all connections of one diagnosis together."""
INTERVAL_S: Final = 30.0
"""Minimum interval between two diagnoses of the same server in a daemon."""
_LEAST_S: Final = 0.05
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: the preface and empty SETTINGS."""
_SETTINGS: Final = 4
_FRAME_HEAD: Final = 9
_TLS_ALERT: Final = 0x15
_MOST_NAMES: Final = 4
_MOST_NAME: Final = 64
# reasons of OpenSSL's alerts and of X509_V_ERR_*
_NO_CERTIFICATE: Final = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_NO_CERTIFICATE"})
_BAD_CERTIFICATE: Final = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "TLSV1_ALERT_ACCESS_DENIED",
    }
)
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAME: Final = frozenset({62, 64})


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how this process reaches it.

    Args:
        server: its role, for people, e.g. ``"the metadata server"``.
        address: its gRPC address, or those of several metadata servers.
        tls: the TLS files in use; None: plain text.
        token: the token that calls carry; None: none.
        tls_settings: where people set ``tls``, e.g. ``"[client.tls]"`` or ``"TlsConfig"``.
        token_setting: where people set the token, e.g. ``"client.token_file"``.
    """

    server: str
    address: str
    tls: TlsConfig | None
    token: TokenSource | None
    tls_settings: str
    token_setting: str

    def explain(self, error: KVStoreError, timeout_s: float = TIMEOUT_S) -> KVStoreError:
        """An error of the same class whose message has the cause and the remedy; unrelated errors are returned unchanged.

        It opens a connection if the server was not reached, so do not call it on hot paths.

        Args:
            error: the error of a call.
            timeout_s: for the diagnosis.
        """
        if isinstance(error, Unauthenticated):
            return self._not_known()
        if not isinstance(error, Unavailable | DeadlineExceeded):
            return error
        reason = self._reason(timeout_s)
        if reason is None and isinstance(error, Unavailable):
            return error  # the server itself may have said so
        if reason is None:
            reason = "it accepts connections, but did not answer in time"
        return type(error)(f"cannot reach {self.server} at {self.address}: {reason}")

    def _reason(self, timeout_s: float) -> str | None:
        """Why no server can be reached. Returns None as soon as one of several is reached."""
        addresses = entries_of(self.address)
        if len(addresses) == 1:
            return diagnose(addresses[0], self.tls, self.tls_settings, timeout_s)
        threads = ThreadPoolExecutor(len(addresses), "kvstore-diagnosis")
        try:
            reasons = {threads.submit(diagnose, one, self.tls, self.tls_settings, timeout_s): one for one in addresses}
            found = {}
            for done in as_completed(reasons):
                reason = done.result()
                if reason is None:
                    return None
                found[reasons[done]] = reason
        finally:
            threads.shutdown(wait=False)
        return "; ".join(f"{one}: {found[one]}" for one in addresses)

    def _not_known(self) -> Unauthenticated:
        if self.token is None:
            return Unauthenticated(f"a token is required by {self.server} at {self.address} ({self.token_setting} is not set)")
        which = "the token given" if self.token.file is None else f"the token in {self.token.file}"
        return Unauthenticated(f"{which} is not known to {self.server} at {self.address}")


class Diagnoser:
    """Explains failures of one server again and again, with a diagnosis at most every ``interval_s``. Thread-safe.

    Args:
        target: the server.
        interval_s: for which a diagnosis holds, while calls keep failing.
        now_s: a monotonic clock.
    """

    def __init__(self, target: Target, interval_s: float = INTERVAL_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self._interval_s = interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._last: tuple[float, type[KVStoreError], KVStoreError] | None = None

    def explain(self, error: KVStoreError, timeout_s: float = TIMEOUT_S) -> KVStoreError:
        """As ``Target.explain``; a failure of the same class shortly after is given the same explanation."""
        if not isinstance(error, Unavailable | DeadlineExceeded):
            return self.target.explain(error)
        with self._lock:  # one diagnosis at a time: concurrent callers share its result
            known = self.known(error)
            if known is error:
                known = self.target.explain(error, timeout_s)
                self._last = (self._now_s(), type(error), known)
            return known

    def known(self, error: KVStoreError) -> KVStoreError:
        """The explanation of a failure of the same class shortly before, or the error itself. Connects nowhere."""
        last = self._last
        if last is None or last[1] is not type(error) or self._now_s() - last[0] >= self._interval_s:
            return error
        return last[2]

    def answered(self) -> None:
        """Record that the server answered: the next failure gets a new explanation."""
        self._last = None


def diagnose(address: str, tls: TlsConfig | None, tls_settings: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Why a gRPC server cannot be reached.

    Args:
        address: ``"host:port"`` or ``"unix:/path"``.
        tls: the TLS files in use; None: plain text.
        tls_settings: where people set them.
        timeout_s: for all of it.

    Returns:
        A clause for people that follows "cannot reach ...: "; None: nothing is wrong with the connection.

    Raises:
        InvalidArgument: no address.
    """
    probe = _Probe(check_address(address), tls, tls_settings, time.monotonic() + timeout_s)
    try:
        return probe.run()
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nothing listens on {address.removeprefix('unix:')}" if is_unix(address) else "connection refused"
    except (socket.gaierror, UnicodeError):  # the latter: an empty or too long label
        return f"the host name {_host_of(address)} is not known"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


class _Probe:
    """One diagnosis. Every connection uses what is left of the deadline."""

    def __init__(self, address: str, tls: TlsConfig | None, tls_settings: str, deadline_s: float) -> None:
        self._address = address
        self._tls = None if is_unix(address) else tls
        self._settings = tls_settings
        self._deadline_s = deadline_s

    def run(self) -> str | None:
        return self._over_plain_text() if self._tls is None else self._over_tls(self._tls)

    def _dial(self) -> socket.socket:
        left_s = max(_LEAST_S, self._deadline_s - time.monotonic())
        if is_unix(self._address):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(left_s)
            try:
                sock.connect(self._address.removeprefix("unix:"))
            except OSError:
                sock.close()
                raise
            return sock
        return socket.create_connection((_host_of(self._address), int(self._address.rpartition(":")[2])), left_s)

    # ---- plain text ----
    def _over_plain_text(self) -> str | None:
        said = self._greeting()
        if said[3:4] == bytes((_SETTINGS,)) and len(said) >= _FRAME_HEAD:
            return None
        if said.startswith(b"HTTP/"):
            return "it is an HTTP server, not a gRPC port"
        if not is_unix(self._address) and self._speaks_tls():
            return f"it speaks TLS and {self._settings} is not set"
        return "it is not a gRPC port" if said else "it closed the connection without an answer"

    def _greeting(self) -> bytes:
        """The first bytes that a server answers to an HTTP/2 client; empty: it closes the connection."""
        said = b""
        with self._dial() as sock:
            try:
                sock.sendall(_PREFACE)
                while len(said) < _FRAME_HEAD and (more := sock.recv(_FRAME_HEAD)):
                    said += more
            except ConnectionError:
                return said
        return said

    def _speaks_tls(self) -> bool:
        """Whether the server responds to a TLS handshake. Its certificate is not verified."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            with self._dial() as sock, context.wrap_socket(sock):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:
            return False

    # ---- TLS ----
    def _over_tls(self, tls: TlsConfig) -> str | None:
        expected = tls.server_name or _host_of(self._address)
        sock, greeted = self._dial(), False
        try:
            with sock, _context(tls).wrap_socket(sock, server_hostname=expected) as secured:
                greeted = True
                if secured.recv(1):
                    return None
        except ssl.SSLCertVerificationError as error:
            return self._of_its_certificate(tls, expected, error)
        except ssl.SSLError as error:
            reason = error.reason or ""
            if reason in _NO_CERTIFICATE or (reason in _BAD_CERTIFICATE and tls.cert is None):
                return self._certificate_required()
            if reason in _BAD_CERTIFICATE:
                return self._certificate_refused(tls)
            if "ALERT" not in reason and self._speaks_plain_text():
                return f"it does not speak TLS and {self._settings} is set"
            return f"the TLS handshake failed: {reason.replace('_', ' ').lower() or error}"
        except ConnectionError:
            pass
        # closed without an alert: by a server that ends, before the handshake by one without TLS, after it for a certificate
        with suppress(ConnectionResetError):
            self._dial().close()  # a server that has ended refuses
        if self._speaks_plain_text():
            return f"it does not speak TLS and {self._settings} is set"
        if not greeted:
            return "it closed the connection during the TLS handshake"
        if tls.cert is None:
            return self._certificate_required()
        return self._certificate_refused(tls)

    def _certificate_required(self) -> str:
        return f"it requires a client certificate ({self._settings} cert, key)"

    def _certificate_refused(self, tls: TlsConfig) -> str:
        return f"it does not accept the client certificate {tls.cert} ({self._settings} cert): its own ca must have signed it"

    def _speaks_plain_text(self) -> bool:
        try:
            said = self._greeting()
        except OSError:
            return False
        return bool(said) and said[0] != _TLS_ALERT

    def _of_its_certificate(self, tls: TlsConfig, expected: str, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code in _OTHER_NAME:
            names = self._names(tls)
            its = f"its certificate is for {names}" if names else "its certificate is for another name"
            return f"{its}, expected '{expected}': set {self._settings} server_name"
        if error.verify_code == _EXPIRED:
            return "its certificate has expired, or the clock of this host is wrong"
        if error.verify_code == _NOT_YET_VALID:
            return "its certificate is not valid yet, or the clock of this host is wrong"
        trusted = f"{self._settings} ca {tls.ca}" if tls.ca is not None else f"an authority of this host ({self._settings} ca)"
        return f"its certificate is not signed by {trusted}"

    def _names(self, tls: TlsConfig) -> str:
        """The names in the server's certificate, which the ca has signed."""
        context = _context(tls)
        context.check_hostname = False
        try:
            with self._dial() as sock, context.wrap_socket(sock) as secured:
                certificate = secured.getpeercert() or {}
        except OSError:
            return ""
        names = [str(entry[1]) for entry in certificate.get("subjectAltName", ())]
        shown = [f"'{name[:_MOST_NAME]}'" if name.isprintable() else "(not printable)" for name in names[:_MOST_NAMES]]
        return ", ".join(shown) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _context(tls: TlsConfig) -> ssl.SSLContext:
    """As gRPC would connect.

    Raises:
        OSError: a file cannot be read, which the channel has said before.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if tls.ca is not None:
        context.load_verify_locations(cafile=tls.ca)
    else:
        context.load_default_certs()
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
