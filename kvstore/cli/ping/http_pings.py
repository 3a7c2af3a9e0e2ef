"""Round trips to the servers that speak HTTP: admin server and router."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from typing import Any, Final, Self
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
        with _Requests(target, timeout_s, secure=secure) as requests:
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
    except (http.client.HTTPException, OSError, ValueError) as error:  # ValueError: the address is impossible
        return result.failed(_without_tls(error, secure=secure))
    return result


class _Requests:
    """Requests over one connection."""

    def __init__(self, target: PingTarget, timeout_s: float, *, secure: bool) -> None:
        parts = urlsplit(target.address if "://" in target.address else f"//{target.address}")
        port = parts.port or (443 if secure else 80)
        self._connection = http.client.HTTPConnection(parts.hostname or "", port, timeout=timeout_s)
        self._sock = socket.create_connection((parts.hostname or "", port), timeout_s)
        if secure:
            try:
                name = (target.tls and target.tls.server_name) or parts.hostname
                self._sock = _context(target.tls).wrap_socket(self._sock, server_hostname=name)
            except BaseException:
                self._sock.close()
                raise
        self._connection.sock = self._sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._sock.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body."""
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        body = response.read(_MOST_BYTES)
        return response.status, body


def _kind(requests: _Requests) -> tuple[ServerKind, str]:
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
