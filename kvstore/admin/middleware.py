"""Middleware of the admin server: limits, authentication, authorization and last-resort errors.

Every path is denied by default. A path that is not public requires a token (or, without a tokens file, a local caller), and
every request that may change something requires the role ``operator``. A new route cannot forget these checks.

Without tokens, web pages in a browser on this host are a threat: a page may send requests to loopback, or make its own host name
resolve to loopback. The ``Host`` header must therefore name loopback, and an ``Origin`` must be this server.
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

from kvstore.admin.page import HEALTH_PAGES
from kvstore.admin.page import PATH as PAGE
from kvstore.admin.problems import TOO_LONG, problem
from kvstore.admin.runbook import RUNBOOK
from kvstore.admin.single_flight import SingleFlight
from kvstore.config.admin import AdminConfig
from kvstore.control_api.store_rpc import acting_for
from kvstore.core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
)
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import admin as admin_metrics
from kvstore.observe.tracing import request_id
from kvstore.rpc.address import stays_on_host
from kvstore.rpc.auth.interceptor import insufficient_role
from kvstore.rpc.auth.tokens import LOCAL, AccessRole, Principal, TokenTable, WatchedFile
from kvstore.rpc.http_server import ABORT

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

PUBLIC: Final = frozenset({PAGE, "/healthz", "/readyz", "/v1/openapi.json", RUNBOOK, *HEALTH_PAGES})
READ_ONLY_POSTS: Final = frozenset({"/v1/blocks/lookup"})
"""POST paths that change nothing; their arguments do not fit into a URL."""
SHARED: Final = "/v1/"
"""Prefix of the paths whose concurrent equal GET requests share one execution (``kvstore.admin.single_flight``)."""
MAX_AGE: Final = "private, max-age=1"
"""``Cache-Control`` of successful GET responses below ``SHARED``: a browser asks again after a second."""
ROLE: Final = "x-kvstore-role"
"""Response header with the role of the caller. Without tokens every caller on this host is an operator."""
BODY_S: Final = 10.0
"""Timeout for receiving a request."""
SEND_STALL_S: Final = 10.0
"""How long a client may stop reading a response before its connection is aborted."""
_SPARE_S: Final = 5.0
"""Added to the timeouts of queries and changes, so that a handler ends by its own timeout first, with a better error."""
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class _TooLong(Exception):
    """The request body exceeds the limit."""


class AdminMiddleware:
    """ASGI middleware in front of the application.

    Args:
        app: the application.
        config: limits.
        tokens: roles by token; None: callers on this host may do everything.
        counters: counters of the process.
    """

    def __init__(self, app: ASGIApp, config: AdminConfig, tokens: WatchedFile[TokenTable] | None, counters: Counters) -> None:
        self._app = app
        self._config = config
        self._tokens = tokens
        self._counters = counters
        self._flights: SingleFlight[tuple[str, bytes], list[Message]] = SingleFlight()
        self._inflight = {True: 0, False: 0}
        """Requests in flight, by whether their path is public; each kind has its own limit."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets and lifespan are not supported
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_name = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        before = request_id.set(request_name)
        self._counters.add(admin_metrics.REQUESTS)
        answer = _ResponseSender(send, request_name, scope.get("state", {}).get(ABORT))
        try:
            await self._respond(scope, receive, answer, headers)
        except _Disconnected:
            if answer.stalled:
                self._counters.add(admin_metrics.ANSWERS_UNTAKEN)
                _limited.warning("connection aborted: client stopped reading its response")
                await asyncio.sleep(0)  # let the server see the abort before this request returns without a response
        finally:
            request_id.reset(before)

    async def _respond(self, scope: Scope, receive: Receive, answer: _ResponseSender, headers: Headers) -> None:
        status = None
        try:
            await self._serve(scope, receive, answer, headers)
        except _TooLong:
            error: KVStoreError = InvalidArgument("the request body is too large", limit_bytes=self._config.max_body_bytes)
            status = TOO_LONG
        except TimeoutError as late:
            error = late if isinstance(late, KVStoreError) else DeadlineExceeded("the request took too long")
        except KVStoreError as refused:
            error = refused
        except Exception:  # outermost layer of the process: no exception may reach the server
            logger.exception("request failed: unexpected error in a handler")
            error = Internal("internal error; the server's log has the details")
        else:
            return
        if not answer.begun:
            self.count(error)
            await problem(error, status)(scope, receive, answer)

    async def _serve(self, scope: Scope, receive: Receive, answer: _ResponseSender, headers: Headers) -> None:
        # public paths have a separate limit and their bodies are not read; rejected requests count toward no limit
        caller = self._admit(scope, headers)
        scope.setdefault("state", {})["caller"] = caller
        answer.role = "" if caller is None else caller.role.value
        before = acting_for.set("" if caller is None else caller.name)
        try:
            with self._slot(public=scope["path"] in PUBLIC):
                await self._serve_admitted(scope, receive, answer, headers)
        finally:
            acting_for.reset(before)

    @contextmanager
    def _slot(self, *, public: bool) -> Iterator[None]:
        """Count a request in flight.

        Raises:
            CapacityExceeded: the limit is reached.
        """
        if self._inflight[public] >= self._config.max_inflight:
            raise CapacityExceeded("too many concurrent requests; retry later", limit=self._config.max_inflight)
        self._inflight[public] += 1
        try:
            yield
        finally:
            self._inflight[public] -= 1

    async def _serve_admitted(self, scope: Scope, receive: Receive, answer: _ResponseSender, headers: Headers) -> None:
        body = b""
        if scope["path"] not in PUBLIC:
            async with asyncio.timeout(BODY_S):
                body = await self._body(receive, headers)
        if scope["method"] == "GET" and scope["path"].startswith(SHARED) and scope["path"] not in PUBLIC:
            await self._serve_shared(scope, receive, body, answer)
            return
        changes = _may_change(scope)
        try:
            if changes:
                self._flights.forget()
            await self._execute(scope, _replayed(body, receive), cast("Send", answer))
        finally:
            if changes:
                self._flights.forget()

    async def _serve_shared(self, scope: Scope, receive: Receive, body: bytes, answer: _ResponseSender) -> None:
        """Serve a query, together with all equal queries that arrive before its response is complete."""

        async def execute() -> list[Message]:
            messages: list[Message] = []

            async def collect(message: Message) -> None:
                messages.append(message)

            try:
                await self._execute(scope, _replayed(body, receive), collect)
            except Exception:
                if not messages:
                    raise
                logger.exception("request failed: unexpected error in a handler")  # the handler has sent the response
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
        """The response to bytes that are not an HTTP request."""
        self._counters.add(admin_metrics.REQUESTS)
        error = InvalidArgument("not an HTTP request")
        self.count(error)
        request_name = secrets.token_hex(8)
        before = request_id.set(request_name)
        try:
            answer = problem(error)
        finally:
            request_id.reset(before)
        _add_headers(answer.headers, request_name)
        return answer

    def count(self, error: KVStoreError) -> None:
        """Count an error response."""
        self._counters.add(admin_metrics.REQUEST_ERRORS[error.kind.value])

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> Principal | None:
        """Authenticate and authorize a request.

        Returns:
            The caller; None for a public path.

        Raises:
            Unauthenticated: the token is missing or unknown.
            PermissionDenied: the role is insufficient, or the request is cross-origin.
        """
        path: str = scope["path"]
        if path in PUBLIC:
            return None
        if self._tokens is None:
            _check_local(headers)
            return LOCAL
        scheme, _, token = headers.get("authorization", "").partition(" ")
        caller = self._tokens.get().caller(token.strip()) if scheme.lower() == "bearer" else None
        changes = _may_change(scope)
        if caller is None:
            given = bool(headers.get("authorization"))
            why = "the token is not known to this server" if given else "a token is required, and none was given"
            if given or changes:  # the web page sends its first query without a token
                _limited.warning("request rejected: %s (request=%s, peer=%s)", why, _describe(scope), _peer(scope))
            raise Unauthenticated(why)
        if caller.role is AccessRole.OPERATOR or (caller.role is AccessRole.READ and not changes):
            return caller
        refused = insufficient_role(
            _describe(scope), [AccessRole.OPERATOR] if changes else [AccessRole.READ, AccessRole.OPERATOR], caller
        )
        _limited.warning("request rejected: %s (peer=%s)", refused.message, _peer(scope))
        raise refused

    async def _body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        most = self._config.max_body_bytes
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > most:
            raise _TooLong
        raw = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            raw += message.get("body", b"")
            if len(raw) > most:
                raise _TooLong
            if not message.get("more_body", False):
                return bytes(raw)


def _may_change(scope: Scope) -> bool:
    """Whether a request may change something."""
    return scope["method"] not in {"GET", "HEAD"} and scope["path"] not in READ_ONLY_POSTS


def _describe(scope: Scope) -> str:
    """Method and path for logs: ASCII, one line, bounded."""
    return ascii(f"{scope['method']} {scope['path']}"[:256])[1:-1]


def _peer(scope: Scope) -> str:
    """Client address for logs."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unknown"


class _Disconnected(BaseException):
    """The client disconnected. Derived from BaseException so that no handler treats it as an error."""


class _ResponseSender:
    """Sends a response with the common headers, and aborts the connection of a client that stops reading."""

    def __init__(self, send: Send, request_name: str, abort: Callable[[], None] | None) -> None:
        self._send = send
        self._request_name = request_name
        self._abort = abort
        self.role = ""
        """Role of the caller for the response header; the web page enables changes by it. Empty: public path."""
        self.begun = False
        self.stalled = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            _add_headers(headers, self._request_name)
            if self.role:
                headers[ROLE] = self.role
        waiting = asyncio.timeout(SEND_STALL_S)
        try:
            async with waiting:
                await self._send(message)
        except TimeoutError:
            if not waiting.expired():
                raise  # the timeout of the whole request
            self.stalled = True
            if self._abort is not None:
                self._abort()
            raise _Disconnected from None


def _copied(message: Message) -> Message:
    """A copy, because headers are added to messages in place."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else dict(message)


def _add_headers(headers: MutableHeaders, request_name: str) -> None:
    """Add the headers that every response has."""
    headers["x-request-id"] = request_name
    headers["x-content-type-options"] = "nosniff"
    headers.setdefault("cache-control", "no-store")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A receive function that replays the body first."""
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _check_local(headers: Mapping[str, str]) -> None:
    """Reject requests that a web page of another origin may have sent.

    Raises:
        PermissionDenied: the host is not loopback, or the origin is another server.
    """
    host = headers.get("host", "")
    try:
        local = stays_on_host(host if host.rpartition(":")[2].isdecimal() else f"{host}:80")
    except InvalidArgument:
        local = False
    if not local:
        raise PermissionDenied(
            "without tokens only loopback host names are served; use 127.0.0.1 or localhost, or set admin.tokens_file",
            host=host[:64],
        )
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host:
        raise PermissionDenied("cross-origin request rejected", origin=origin[:64])


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
