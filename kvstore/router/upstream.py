"""One engine's HTTP server, as the router uses it.

What goes wrong before an answer's first byte is a value (``Failure``), for it decides whether another engine may be asked; what
goes wrong later is raised.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import httpx

from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.router.config import EngineConfig, RouterConfig

KEEP_IDLE_S: Final = 2.0
"""Connections idle for longer are not used again: servers close theirs after some seconds, and a request must not meet that."""
_BUSY: Final = frozenset({429, 503})
_REFUSALS: Final = frozenset({401, 403, 404})
"""Of one client, or of everybody: another engine tells which."""
_ANSWERS: Final = frozenset((*range(200, 300), *range(400, 500), 501)) - _REFUSALS
"""501: the engine does not do what is asked of it. Nobody is sent elsewhere, and there is nothing beyond 599."""
_MAX_ERROR_BYTES: Final = 1 << 20
_LAST_STATUS: Final = 599
_REDIRECTS: Final = 300
_PLAIN: Final = frozenset({"", "identity"})
_ERROR_S: Final = 5.0
"""For the words of an engine that does not answer: without all of them there is an error of ours."""
_RETRY_AFTER_S: Final = 1.0
"""Where an engine that has no room does not say for how long."""
_LEAST_RETRY_AFTER_S: Final = 0.1
_MAX_RETRY_AFTER_S: Final = 30.0


class FailureKind(StrEnum):
    """Why there is no answer."""

    REFUSED = "refused"
    """Nobody took the connection: nothing was sent."""
    BUSY = "busy"
    """The engine answered that it has no room, or is not ready."""
    LOST = "lost"
    """The connection ended after the request was sent, before any of the answer came."""
    ERRED = "erred"
    """The engine answered that something went wrong inside of it, or that it takes no such request: because of that, perhaps."""
    LATE = "late"
    """No answer in time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine did not answer.

    Attributes:
        kind: how.
        error: for the client, if nobody else answers.
        answer: the engine's own words, where it spoke: status, headers, body.
        retry_after_s: when it wants to be asked again.
    """

    kind: FailureKind
    error: KVStoreError
    answer: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
    retry_after_s: float = _RETRY_AFTER_S


class Answer:
    """An answer whose first piece is here.

    Attributes:
        status: HTTP status.
        headers: as they came.
        first: the first piece of the body; empty where there is none.
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
    def well(self) -> bool:
        """Whether it is what was asked for, and no refusal."""
        return self.status < _REDIRECTS

    @property
    def streams(self) -> bool:
        """Server-sent events."""
        return _streams(self._response)

    @property
    def is_json(self) -> bool:
        """Says so itself."""
        return _kind(self._response).startswith("application/json")

    @property
    def readable(self) -> bool:
        """Whether its bytes are those of its text. Those of a stream always are: it is unpacked, where it came packed."""
        return self.streams or self._response.headers.get("content-encoding", "").partition(";")[0].strip().lower() in _PLAIN

    async def rest(self) -> AsyncIterator[bytes]:
        """The pieces behind the first, as they come.

        Raises:
            Unavailable: the engine ended in the middle.
            DeadlineExceeded: nothing came for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    piece = await anext(self._pieces, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    "the engine stopped in the middle of its answer", engine=self._engine, seconds=self._idle_s
                ) from None
            except httpx.HTTPError as error:
                raise Unavailable("the engine ended in the middle of its answer", engine=self._engine, why=_why(error)) from error
            if piece is None:
                return
            yield piece

    async def body(self, most: int) -> bytes:
        """All of it.

        Raises:
            Unavailable: see ``rest``; or it is longer than ``most`` bytes.
            DeadlineExceeded: see ``rest``.
        """
        whole = bytearray(self.first)
        async for piece in self.rest():
            whole += piece
            if len(whole) > most:
                raise Unavailable("the engine's answer is too long", engine=self._engine, most=most)
        return bytes(whole)

    async def close(self) -> None:
        """Ends it. Where it was not complete, the connection ends too, by which the engine knows that nobody waits any more."""
        await self._response.aclose()


class Upstream:
    """Connections to one engine.

    Args:
        engine: who it is.
        config: timeouts.
        verify: how certificates of ``https`` engines are checked.
    """

    def __init__(self, engine: EngineConfig, config: RouterConfig, verify: ssl.SSLContext | bool) -> None:
        self.engine = engine
        self._first_s = config.first_byte_timeout_s
        self._idle_s = config.idle_timeout_s
        self._http = httpx.AsyncClient(
            base_url=engine.url,
            verify=verify,
            trust_env=False,  # an engine is reached directly, whatever proxy this machine has for the world
            timeout=httpx.Timeout(None, connect=config.connect_timeout_s, write=config.idle_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_IDLE_S),
        )

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer | Failure:
        """Sends a request and waits for the first piece of the answer. Cancelled, it ends the connection."""
        name = self.engine.name
        response: httpx.Response | None = None
        opened = False
        try:
            async with asyncio.timeout(self._first_s):
                request = self._http.build_request("POST", path, content=body, headers=_as_they_came(headers))
                response = await self._http.send(request, stream=True)
                if response.status_code in _BUSY:
                    return await self._refusal(response, FailureKind.BUSY, "the engine has no room")
                if response.status_code not in _ANSWERS:
                    return await self._refusal(response, FailureKind.ERRED, "the engine failed at the request")
                pieces = response.aiter_bytes() if _streams(response) else response.aiter_raw()
                first = await anext(pieces, b"")
            opened = True
            return Answer(name, response, pieces, first, self._idle_s)
        except TimeoutError:
            late = DeadlineExceeded("the engine did not answer in time", engine=name, seconds=self._first_s)
            return Failure(FailureKind.LATE, late)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Failure(FailureKind.REFUSED, Unavailable("the engine cannot be reached", engine=name, why=_why(error)))
        except httpx.HTTPError as error:
            return Failure(FailureKind.LOST, Unavailable("the engine ended before it answered", engine=name, why=_why(error)))
        finally:
            if response is not None and not opened:
                await response.aclose()

    async def get(self, path: str, timeout_s: float, headers: Mapping[str, str] | None = None, most: int = 16 << 20) -> bytes:
        """A short question.

        Raises:
            Unavailable: no answer, or another status than 200.
            DeadlineExceeded: not in time.
        """
        return await self._ask("GET", path, None, timeout_s, most, headers)

    async def ask(self, path: str, body: bytes, timeout_s: float, headers: Mapping[str, str], most: int = 64 << 20) -> bytes:
        """As ``get``, with a JSON body."""
        return await self._ask("POST", path, body, timeout_s, most, headers)

    async def close(self) -> None:
        """Ends all connections."""
        await self._http.aclose()

    async def _ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float, most: int, headers: Mapping[str, str] | None = None
    ) -> bytes:
        name = self.engine.name
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, path, content=body, headers=_as_they_came(headers or {})) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise Unavailable("the engine answers with an error", engine=name, path=path, status=response.status_code)
                answer = bytearray()
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > most:
                        raise Unavailable("the engine's answer is too long", engine=name, path=path, most=most)
                return bytes(answer)
        except TimeoutError:
            raise DeadlineExceeded("the engine did not answer in time", engine=name, path=path, seconds=timeout_s) from None
        except httpx.HTTPError as error:
            raise Unavailable("the engine cannot be reached", engine=name, path=path, why=_why(error)) from error

    async def _refusal(self, response: httpx.Response, kind: FailureKind, what: str) -> Failure:
        """What an engine said instead of an answer."""
        body = bytearray()
        whole = response.is_error and response.status_code <= _LAST_STATUS
        try:
            async with asyncio.timeout(_ERROR_S):
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > _MAX_ERROR_BYTES:
                        whole = False
                        break
        except (TimeoutError, httpx.HTTPError):
            whole = False
        error = Unavailable(what, engine=self.engine.name, status=response.status_code)
        answer = (response.status_code, response.headers.raw, bytes(body)) if whole else None
        return Failure(kind, error, answer, retry_after_s(response.headers.get("retry-after", "")))


def retry_after_s(text: str) -> float:
    """``Retry-After`` in seconds, within bounds; what is no time counts as none, and so does a date."""
    try:
        after_s = float(text)
    except ValueError:
        after_s = -1.0
    if not math.isfinite(after_s) or after_s < 0:
        return _RETRY_AFTER_S
    return min(max(after_s, _LEAST_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)


def _kind(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).lower()


def _streams(response: httpx.Response) -> bool:
    return _kind(response).startswith("text/event-stream")


def _as_they_came(headers: Mapping[str, str]) -> httpx.Headers:
    """Their values byte by byte, as ASGI read them: httpx itself takes no more than ASCII."""
    return httpx.Headers(dict(headers), encoding="latin-1")


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
