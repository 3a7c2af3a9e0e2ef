"""Round trips to the servers that speak HTTP: admin server and router."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore.cli.ping.round_trips import CLIENT_TLS, PingResult, PingTarget, ServerKind, measure
from kvstore.process.tls import TlsConfig

_OK: Final = http.HTTPStatus.OK
_MOST_BYTES: Final = 1 << 20


def ping_http(target: PingTarget, count: int, timeout_s: float) -> PingResult:
    """Ping an HTTP server: find its kind, then ask for its readiness ``count`` times over one connection.

    Args:
        target: the server; its address may be a URL.
        count: repeated requests.
        timeout_s: limit of each request.
    """
    result = PingResult(kind=target.kind, name=target.name, address=target.address)
    secure = target.address.startswith("https:") or (target.tls is not None and not target.address.startswith("http:"))
    try:
        started_s = time.perf_counter()
        with closing(_Connection(target, timeout_s, secure=secure)) as requests:
            kind, path = _kind(requests)
            result.connect_s = time.perf_counter() - started_s
            if kind is ServerKind.UNKNOWN:
                return result.failed("it is an HTTP server, but neither an admin server nor a router of kvstore")
            if target.kind not in (ServerKind.UNKNOWN, kind):
                return result.failed(f"it is a {kind}, not a {target.kind}")
            result.kind = kind
            status, body = requests.get(path)
            if status != _OK:
                return result.failed(f"running, but not ready: {_reason(status, body)}")
            measure(result, count, lambda: requests.get(path))
    except ConnectionRefusedError:
        return result.failed("connection refused")
    except TimeoutError:
        return result.failed(f"it did not answer within {timeout_s:g} s")
    except ssl.SSLError as error:
        return result.failed(_of_tls(error))
    except (http.client.HTTPException, OSError) as error:
        return result.failed(_without_tls(error, secure=secure))
    except ValueError as error:  # a port above 65535, or a host name that cannot be encoded
        return result.failed(f"it is not an address: {error}")
    return result


class _Connection(http.client.HTTPConnection):
    """Connection to a server, with TLS if the target requires it. A server may close it after each response."""

    def __init__(self, target: PingTarget, timeout_s: float, *, secure: bool) -> None:
        parts = urlsplit(target.address if "://" in target.address else f"//{target.address}")
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout_s)
        self._target = target
        self._secure = secure

    def connect(self) -> None:
        """Connect. ``http.client`` calls this again if the server has closed the connection."""
        super().connect()
        if not self._secure:
            return
        tls = self._target.tls
        try:
            self.sock = _context(tls).wrap_socket(self.sock, server_hostname=(tls and tls.server_name) or self.host)
        except BaseException:
            self.close()
            raise

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body."""
        self.request("GET", path)
        response = self.getresponse()
        body = response.read(_MOST_BYTES)
        return response.status, body


def _kind(requests: _Connection) -> tuple[ServerKind, str]:
    """Kind of a server and the path of its readiness."""
    status, body = requests.get("/healthz")
    if status == _OK and _document(body).get("status") == "ok":
        return ServerKind.ADMIN, "/readyz"
    status, body = requests.get("/router/engines")
    if status == _OK and isinstance(_parsed(body), dict):
        return ServerKind.ROUTER, "/health"
    return ServerKind.UNKNOWN, ""


def _context(tls: TlsConfig | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca if tls is not None else None)
    if tls is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _parsed(body: bytes) -> Any:  # noqa: ANN401  # any JSON
    try:
        return json.loads(body)
    except ValueError:
        return None


def _document(body: bytes) -> dict[str, Any]:
    parsed = _parsed(body)
    return parsed if isinstance(parsed, dict) else {}


def _reason(status: int, body: bytes) -> str:
    document = _document(body)
    said = document.get("detail") or document.get("message") or document.get("status")
    return f"{said} (HTTP {status})" if isinstance(said, str) else f"HTTP {status}"


def _of_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message} ({CLIENT_TLS} ca, server_name)"
    if "ALERT" in (error.reason or ""):
        return f"it does not accept this client's certificate ({CLIENT_TLS} cert, key)"
    return f"it does not speak TLS and {CLIENT_TLS} is set"


def _without_tls(error: Exception, *, secure: bool) -> str:
    text = getattr(error, "strerror", None) or str(error)
    hint = "" if secure else f"; if it speaks TLS, set {CLIENT_TLS} or give https://HOST:PORT"
    return f"it is not an HTTP server of kvstore ({text or type(error).__name__}){hint}"
