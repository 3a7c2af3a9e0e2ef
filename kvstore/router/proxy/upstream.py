"""HTTP connections to one engine.

A failure before the first byte of the response is returned as an ``AttemptFailure``, because another engine may be tried then.
A failure after the first byte is raised.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx

from kvstore.config.router import RouterConfig
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.router.engines import EngineConfig

KEEP_IDLE_S: Final = 2.0
"""Longer idle connections are closed: servers close theirs after some seconds, and a request must not race with that."""
_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
_TOO_MANY_REQUESTS: Final = 429
_NOT_IMPLEMENTED: Final = 501
_FIRST_REDIRECT: Final = 300
_FIRST_CLIENT_ERROR: Final = 400
_FIRST_SERVER_ERROR: Final = 500
_LAST_STATUS: Final = 599
_MAX_ERROR_BYTES: Final = 1 << 20
_MAX_BYTES: Final = 64 << 20
"""Largest response to a request that the router itself makes."""
_ERROR_BODY_S: Final = 5.0
"""Time to read the body of an error response. After it the router sends its own error instead."""
_UNCOMPRESSED: Final = frozenset({"", "identity"})


class FailureKind(StrEnum):
    """Why an attempt failed."""

    CONNECT = "connect"
    """The connection could not be opened. Nothing was sent."""
    RESET = "reset"
    """The connection ended early, or the response was incomplete or invalid."""
    TIMEOUT = "timeout"
    """The engine sent nothing for too long."""
    GATEWAY = "gateway"
    """Status 502, 503 or 504."""
    SERVER_ERROR = "server_error"
    """Another 5xx status (except 501), or a redirect."""
    RATE_LIMITED = "rate_limited"
    """Status 429."""
    REJECTED = "rejected"
    """A prefill engine answered with another 4xx status, or 501."""

    @property
    def is_gateway_failure(self) -> bool:
        """Whether the error counts as a gateway failure of the engine."""
        return self in {FailureKind.CONNECT, FailureKind.RESET, FailureKind.TIMEOUT, FailureKind.GATEWAY}

    @property
    def is_engine_fault(self) -> bool:
        """Whether outlier detection counts it."""
        return self.is_gateway_failure or self is FailureKind.SERVER_ERROR


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failed attempt on one engine.

    Attributes:
        kind: kind of the failure.
        error: error for the client, unless a later attempt succeeds.
        response: the engine's own error response, if it sent a complete one: status, headers, body.
    """

    kind: FailureKind
    error: KVStoreError
    response: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None


class EngineResponse:
    """A response of an engine whose first piece has arrived.

    Attributes:
        status: HTTP status.
        headers: headers as received.
        first: first piece of the body; may be empty.
    """

    def __init__(self, engine: str, response: httpx.Response, pieces: AsyncIterator[bytes], first: bytes, idle_s: float) -> None:
        self._engine = engine
        self._response = response
        self._pieces = pieces
        self._idle_s = idle_s
        self.status = response.status_code
        self.headers = [pair for pair in response.headers.raw if not self.streams or pair[0].lower() != b"content-encoding"]
        self.first = first

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return self.status < _FIRST_REDIRECT

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return _is_event_stream(self._response)

    @property
    def is_json(self) -> bool:
        """Whether the content type is JSON."""
        return _content_type(self._response).startswith("application/json")

    @property
    def readable(self) -> bool:
        """Whether the bytes are uncompressed. Streams always are: compressed ones are decompressed on arrival."""
        encoding = self._response.headers.get("content-encoding", "").partition(";")[0].strip().lower()
        return self.streams or encoding in _UNCOMPRESSED

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield the pieces after the first as they arrive.

        Raises:
            Unavailable: the connection ended early.
            DeadlineExceeded: the engine sent nothing for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    piece = await anext(self._pieces, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    "the engine stalled within its response", engine=self._engine, seconds=self._idle_s
                ) from None
            except httpx.HTTPError as error:
                raise Unavailable(
                    "the engine closed the connection within its response", engine=self._engine, why=_why(error)
                ) from error
            if piece is None:
                return
            yield piece

    async def body(self, max_bytes: int) -> bytes:
        """Read the whole body.

        Raises:
            Unavailable: as for ``rest``, or the body is longer than ``max_bytes``.
            DeadlineExceeded: as for ``rest``.
        """
        whole = bytearray(self.first)
        async for piece in self.rest():
            whole += piece
            if len(whole) > max_bytes:
                raise Unavailable("the engine's response is too long", engine=self._engine, max_bytes=max_bytes)
        return bytes(whole)

    async def close(self) -> None:
        """Close the response. An incomplete one closes its connection too, so that the engine cancels the request."""
        await self._response.aclose()


class Upstream:
    """Connections to one engine.

    Args:
        engine: the engine.
        config: timeouts.
        verify: how to verify certificates of ``https`` engines.
    """

    def __init__(self, engine: EngineConfig, config: RouterConfig, verify: ssl.SSLContext | bool) -> None:
        self.engine = engine
        self._first_byte_s = config.first_byte_timeout_ms / 1000
        self._idle_s = config.idle_timeout_ms / 1000
        self._http = httpx.AsyncClient(
            base_url=engine.url,
            verify=verify,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # keeps none: they belong to one of many clients
            trust_env=False,  # engines are reached directly, even if the environment names a proxy
            timeout=httpx.Timeout(None, connect=config.connect_timeout_ms / 1000, write=config.idle_timeout_ms / 1000),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_IDLE_S),
        )

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse | AttemptFailure:
        """Send a request and wait for the first piece of the response. Cancelling the call closes the connection."""
        name = self.engine.name
        response: httpx.Response | None = None
        opened = False
        try:
            async with asyncio.timeout(self._first_byte_s):
                request = self._http.build_request("POST", path, content=body, headers=_raw_headers(headers))
                response = await self._http.send(request, stream=True)
                kind = _failure_kind(response.status_code)
                if kind is not None:
                    return await self._read_error(response, kind)
                pieces = response.aiter_bytes() if _is_event_stream(response) else response.aiter_raw()
                first = await anext(pieces, b"")
            opened = True
            return EngineResponse(name, response, pieces, first, self._idle_s)
        except TimeoutError:
            error = DeadlineExceeded("the engine did not answer in time", engine=name, seconds=self._first_byte_s)
            return AttemptFailure(FailureKind.TIMEOUT, error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as refused:
            unreachable = Unavailable("the engine is unreachable", engine=name, why=_why(refused))
            return AttemptFailure(FailureKind.CONNECT, unreachable)
        except httpx.HTTPError as broken:
            reset = Unavailable("the engine closed the connection before it answered", engine=name, why=_why(broken))
            return AttemptFailure(FailureKind.RESET, reset)
        finally:
            if response is not None and not opened:
                await response.aclose()

    async def get(
        self, path: str, timeout_s: float, headers: Mapping[str, str] | None = None, max_bytes: int = _MAX_BYTES
    ) -> bytes:
        """Send a GET request and return the body.

        Raises:
            Unavailable: the engine is unreachable, or the status is not 200.
            DeadlineExceeded: the timeout expired.
        """
        return await self._call("GET", path, None, timeout_s, max_bytes, headers)

    async def post_json(
        self, path: str, body: bytes, timeout_s: float, headers: Mapping[str, str], max_bytes: int = _MAX_BYTES
    ) -> bytes:
        """Send a POST request with a JSON body and return the response's body. Raises as ``get`` does."""
        return await self._call("POST", path, body, timeout_s, max_bytes, headers)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        name = self.engine.name
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, path, content=body, headers=_raw_headers(headers or {})) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise Unavailable("the engine returned an error", engine=name, path=path, status=response.status_code)
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > max_bytes:
                        raise Unavailable("the engine's response is too long", engine=name, path=path, max_bytes=max_bytes)
                return bytes(content)
        except TimeoutError:
            raise DeadlineExceeded("the engine did not answer in time", engine=name, path=path, seconds=timeout_s) from None
        except httpx.HTTPError as error:
            raise Unavailable("the engine is unreachable", engine=name, path=path, why=_why(error)) from error

    async def _read_error(self, response: httpx.Response, kind: FailureKind) -> AttemptFailure:
        """Read an error response within bounds of time and size."""
        body = bytearray()
        complete = response.is_error and response.status_code <= _LAST_STATUS
        try:
            async with asyncio.timeout(_ERROR_BODY_S):
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > _MAX_ERROR_BYTES:
                        complete = False
                        break
        except (TimeoutError, httpx.HTTPError):
            complete = False
        error = Unavailable("the engine returned an error", engine=self.engine.name, status=response.status_code)
        return AttemptFailure(kind, error, (response.status_code, response.headers.raw, bytes(body)) if complete else None)


def _failure_kind(status: int) -> FailureKind | None:
    """Classify a status; None: the response is passed on to the client unchanged."""
    if status == _TOO_MANY_REQUESTS:
        return FailureKind.RATE_LIMITED
    if status in _GATEWAY_STATUSES:
        return FailureKind.GATEWAY
    redirect = _FIRST_REDIRECT <= status < _FIRST_CLIENT_ERROR
    server_error = status >= _FIRST_SERVER_ERROR and status != _NOT_IMPLEMENTED
    return FailureKind.SERVER_ERROR if redirect or server_error else None


def _content_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).lower()


def _is_event_stream(response: httpx.Response) -> bool:
    return _content_type(response).startswith("text/event-stream")


def _raw_headers(headers: Mapping[str, str]) -> httpx.Headers:
    """Headers with the bytes that the client sent. By default httpx accepts only ASCII."""
    return httpx.Headers(dict(headers), encoding="latin-1")


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
