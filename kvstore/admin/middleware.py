"""What every request passes before anything reads it: bounds, who asks, and what to say where all else fails.

Default deny: a path that is not public takes a token (or, without a file of tokens, a caller on this host), and whatever is not a
question takes the role ``operator``. So a route that is added cannot forget it.

Without tokens this host's browsers are a danger too: a page from anywhere may send requests to loopback, under a name of its own
that it makes point there. So the name asked for must be loopback's, and a request with an origin must come from this server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.admin.page import PATH as PAGE
from kvstore.admin.problems import TOO_LONG, problem
from kvstore.admin.single_flight import SingleFlight
from kvstore.config.admin import AdminConfig
from kvstore.core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
)
from kvstore.observe.context import request_id
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import admin as admin_metrics
from kvstore.rpc.address import stays_on_host
from kvstore.rpc.auth.interceptor import insufficient_role
from kvstore.rpc.auth.tokens import LOCAL, AccessRole, Principal, TokenTable, WatchedFile
from kvstore.rpc.http_server import ABORT

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

PUBLIC: Final = frozenset({PAGE, "/healthz", "/readyz", "/v1/openapi.json"})
QUESTIONS: Final = frozenset({"/v1/blocks/lookup"})
"""POSTs that change nothing: what is asked about does not fit an address."""
SHARED: Final = "/v1/"
"""Prefix of the paths whose concurrent equal GET requests share one execution (``kvstore.admin.single_flight``)."""
MAX_AGE: Final = "private, max-age=1"
"""``Cache-Control`` of successful GET responses below ``SHARED``: a browser asks again after a second."""
ROLE: Final = "x-kvstore-role"
"""Header of answers: the role of the token that the request showed; without tokens, what this host may: ``operator``."""
BODY_S: Final = 10.0
"""How long a client may take to send its request."""
TAKE_S: Final = 10.0
"""How long it may take none of its answer: then its connection ends, with all requests that lie in it."""
_SPARE_S: Final = 5.0
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class _TooLong(Exception):
    """A body above the bound."""


class AdminMiddleware:
    """An ASGI application around another.

    Args:
        app: what is behind it.
        config: bounds.
        tokens: who may do what; None: this host, everything.
        counters: of the process.
    """

    def __init__(self, app: ASGIApp, config: AdminConfig, tokens: WatchedFile[TokenTable] | None, counters: Counters) -> None:
        self._app = app
        self._config = config
        self._tokens = tokens
        self._counters = counters
        self._flights: SingleFlight[tuple[str, bytes], list[Message]] = SingleFlight()
        self._under_way = {True: 0, False: 0}
        """Requests that are served; those of what is public have places of their own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no sockets here, and no lifespan
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        name = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        before = request_id.set(name)
        self._counters.add(admin_metrics.REQUESTS)
        answer = _Answer(send, name, scope.get("state", {}).get(ABORT))
        try:
            await self._pass(scope, receive, answer, headers)
        except _Left:
            if answer.untaken:
                self._counters.add(admin_metrics.ANSWERS_UNTAKEN)
                _limited.warning("ended a connection that takes none of its answer")
                await asyncio.sleep(0)  # the server learns of it first: what ends here is no answer that was forgotten
        finally:
            request_id.reset(before)

    async def _pass(self, scope: Scope, receive: Receive, answer: _Answer, headers: Headers) -> None:
        status = None
        try:
            await self._serve(scope, receive, answer, headers)
        except _TooLong:
            error: KVStoreError = InvalidArgument("the request is too long", most_bytes=self._config.max_body_bytes)
            status = TOO_LONG
        except TimeoutError as late:
            error = late if isinstance(late, KVStoreError) else DeadlineExceeded("the request took too long")
        except KVStoreError as refused:
            error = refused
        except Exception:  # the process edge: nothing may leave as a bare exception
            logger.exception("unexpected error in a handler")
            error = Internal("internal error; the server's log has the details")
        else:
            return
        if not answer.begun:
            self.count(error)
            await problem(error, status)(scope, receive, answer)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer, headers: Headers) -> None:
        # what is public has places of its own and its body is not read: who may ask nothing else takes no place from who may;
        # nor does who is refused
        caller = self._admit(scope, headers)
        scope.setdefault("state", {})["caller"] = caller
        answer.role = "" if caller is None else caller.role.value
        with self._place(public=scope["path"] in PUBLIC):
            await self._serve_admitted(scope, receive, answer, headers)

    @contextmanager
    def _place(self, *, public: bool) -> Iterator[None]:
        """One of those under way.

        Raises:
            CapacityExceeded: there are as many as may be.
        """
        if self._under_way[public] >= self._config.max_inflight:
            raise CapacityExceeded("as many requests are under way as this server takes", most=self._config.max_inflight)
        self._under_way[public] += 1
        try:
            yield
        finally:
            self._under_way[public] -= 1

    async def _serve_admitted(self, scope: Scope, receive: Receive, answer: _Answer, headers: Headers) -> None:
        body = b""
        if scope["path"] not in PUBLIC:
            async with asyncio.timeout(BODY_S):
                body = await self._body(receive, headers)
        if scope["method"] == "GET" and scope["path"].startswith(SHARED) and scope["path"] not in PUBLIC:
            await self._serve_shared(scope, receive, body, answer)
            return
        changes = _changes(scope)
        try:
            if changes:
                self._flights.forget()
            await self._execute(scope, _replayed(body, receive), cast("Send", answer))
        finally:
            if changes:
                self._flights.forget()

    async def _serve_shared(self, scope: Scope, receive: Receive, body: bytes, answer: _Answer) -> None:
        """Serve a query, together with all equal queries that arrive before its response is complete."""

        async def execute() -> list[Message]:
            messages: list[Message] = []

            async def collect(message: Message) -> None:
                messages.append(message)

            await self._execute(scope, _replayed(body, receive), collect)
            return messages

        messages, shared = await self._flights.run((scope["path"], scope["query_string"]), execute)
        if shared:
            self._counters.add(admin_metrics.REQUESTS_SHARED)
        for message in messages:
            copied = _copied(message)
            if copied["type"] == "http.response.start" and copied["status"] == HTTPStatus.OK:
                MutableHeaders(scope=copied).setdefault("cache-control", MAX_AGE)
            await answer(copied)

    async def _execute(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout((self._config.timeout_ms + self._config.change_timeout_ms) / 1000 + _SPARE_S):
            await self._app(scope, receive, send)

    def malformed(self) -> Response:
        """The answer to what is no HTTP: as to all else that cannot be served. Nobody's business is done for it."""
        self._counters.add(admin_metrics.REQUESTS)
        error = InvalidArgument("this is no HTTP request")
        self.count(error)
        name = secrets.token_hex(8)
        before = request_id.set(name)
        try:
            answer = problem(error)
        finally:
            request_id.reset(before)
        _mark(answer.headers, name)
        return answer

    def count(self, error: KVStoreError) -> None:
        """An error is being told."""
        self._counters.add(admin_metrics.REQUEST_ERRORS[error.kind.value])

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> Principal | None:
        """Who asks; None: nobody in particular, for what is public.

        Raises:
            Unauthenticated: a token is missing or nobody's.
            PermissionDenied: the role does not reach, or the request is of a web page from elsewhere.
        """
        path: str = scope["path"]
        if path in PUBLIC:
            return None
        if self._tokens is None:
            _check_local(headers)
            return LOCAL
        scheme, _, token = headers.get("authorization", "").partition(" ")
        caller = self._tokens.get().caller(token.strip()) if scheme.lower() == "bearer" else None
        changes = _changes(scope)
        if caller is None:
            given = bool(headers.get("authorization"))
            why = "the token is not known to this server" if given else "a token is required, and none was given"
            if given or changes:  # the page asks without one each time that it is opened
                _limited.warning("refused a request: %s (request=%s, peer=%s)", why, _what(scope), _peer(scope))
            raise Unauthenticated(why)
        if caller.role is AccessRole.OPERATOR or (caller.role is AccessRole.READ and not changes):
            return caller
        refused = insufficient_role(
            _what(scope), [AccessRole.OPERATOR] if changes else [AccessRole.READ, AccessRole.OPERATOR], caller
        )
        _limited.warning("refused a request: %s (peer=%s)", refused.message, _peer(scope))
        raise refused

    async def _body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        most = self._config.max_body_bytes
        told = headers.get("content-length", "0")
        if not told.isdecimal() or int(told[:20]) > most:
            raise _TooLong
        raw = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            raw += message.get("body", b"")
            if len(raw) > most:
                raise _TooLong
            if not message.get("more_body", False):
                return bytes(raw)


def _changes(scope: Scope) -> bool:
    """Whether a request is no mere question."""
    return scope["method"] not in {"GET", "HEAD"} and scope["path"] not in QUESTIONS


def _what(scope: Scope) -> str:
    """A request in one line, ASCII, and not long."""
    return ascii(f"{scope['method']} {scope['path']}"[:256])[1:-1]


def _peer(scope: Scope) -> str:
    """Where a request came from, for the log."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unknown"


class _Left(BaseException):
    """The client has gone: there is nobody to answer. No handler takes it for an error."""


class _Answer:
    """Adds to every answer what all have, notes that it has begun, and ends the connection of who takes nothing of it."""

    def __init__(self, send: Send, name: str, abort: Callable[[], None] | None) -> None:
        self._send = send
        self._name = name
        self._abort = abort
        self.role = ""
        """Of who asks, told with the answer: a page shows by it what may be changed; empty: nobody in particular."""
        self.begun = False
        self.untaken = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            _mark(headers, self._name)
            if self.role:
                headers[ROLE] = self.role
        waiting = asyncio.timeout(TAKE_S)
        try:
            async with waiting:
                await self._send(message)
        except TimeoutError:
            if not waiting.expired():
                raise  # another time is up, of the whole request
            self.untaken = True
            if self._abort is not None:
                self._abort()
            raise _Left from None


def _copied(message: Message) -> Message:
    """Headers are added to on the way out."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else dict(message)


def _mark(headers: MutableHeaders, name: str) -> None:
    """What all answers have."""
    headers["x-request-id"] = name
    headers["x-content-type-options"] = "nosniff"
    headers.setdefault("cache-control", "no-store")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes."""
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _check_local(headers: Mapping[str, str]) -> None:
    """Refuses what a web page of another server may have sent.

    Raises:
        PermissionDenied: the request was meant for another host's name, or comes from another server's page.
    """
    host = headers.get("host", "")
    try:
        local = stays_on_host(host if host.rpartition(":")[2].isdecimal() else f"{host}:80")
    except InvalidArgument:
        local = False
    if not local:
        raise PermissionDenied("without tokens this server answers to names of loopback only", host=host[:64])
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host:
        raise PermissionDenied("without tokens this server answers to no other server's pages", origin=origin[:64])


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None: it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
