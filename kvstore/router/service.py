"""The router's HTTP doors: OpenAI's completions and chat completions, and what tells how the router is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import kvstore
from kvstore.core.errors import CapacityExceeded, InvalidArgument, KVStoreError, NotFound, Unavailable, Unsupported
from kvstore.observe.exposition import Sample, StoreCollector, registry_of
from kvstore.router.body import CHAT, COMPLETIONS, parse_body
from kvstore.router.config import Role
from kvstore.router.errors import error_fields, http_status
from kvstore.router.exchange import Exchange
from kvstore.router.parts import Parts, Placement
from kvstore.router.prompts import PromptReader

_PASSED: Final = ("authorization", "x-request-id", "traceparent", "tracestate", "openai-organization", "openai-project")
"""Headers of a client that engines get to see."""
_MODELS_S: Final = 10.0
_BODY_S: Final = 60.0
"""How long a client may take to send its request."""
_NOT_FOUND: Final = 404
_MOST_ECHOED: Final = 256
_CLIENT_GONE: Final = 499
"""What proxies note where the client left; nobody gets to see it."""


def make_app(parts: Parts, placement: Placement, prompts: PromptReader) -> FastAPI:
    """The application of one router."""
    app = FastAPI(title="kvstore router", docs_url=None, redoc_url=None, openapi_url=None)
    doors = _Doors(parts, placement, prompts)
    app.add_api_route(COMPLETIONS, doors.completions, methods=["POST"], response_model=None)
    app.add_api_route(CHAT, doors.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", doors.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", doors.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", doors.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/router/engines", doors.engines, methods=["GET"], response_model=None)
    app.add_exception_handler(KVStoreError, _refused)
    app.add_exception_handler(HTTPException, _no_door)
    return app


class _Doors:
    """What each path answers."""

    def __init__(self, parts: Parts, placement: Placement, prompts: PromptReader) -> None:
        self._parts = parts
        self._placement = placement
        self._prompts = prompts
        self._inflight = 0
        self._registry = registry_of(StoreCollector([parts.counters], [self._gauges], process="router"))

    async def completions(self, request: Request) -> Response:
        """A completion, or a chat completion."""
        counters = self._parts.counters
        counters.add("router_requests_total")
        if self._inflight >= self._parts.config.max_inflight:
            counters.add("router_refused_full_total")
            raise CapacityExceeded("the router has as many requests under way as it takes", most=self._inflight)
        try:
            with self._counted():
                raw = await self._body(request)
        except ClientDisconnect:  # in the middle of its request: there is nobody to answer, and nothing went wrong here
            counters.add("router_clients_gone_total")
            return Response(status_code=_CLIENT_GONE)
        if raw is None:
            counters.add("router_refused_long_total")
            error = InvalidArgument("the request is too long", most_bytes=self._parts.config.max_body_bytes)
            return JSONResponse(error_fields(error), status_code=413)
        body = parse_body(request.url.path, raw)
        headers = _passed(request.headers)
        if body.stream:
            headers["accept-encoding"] = "identity"  # whether a compressed stream is whole cannot be seen
        exchange = Exchange(self._parts, self._placement, self._prompts, body, raw, headers)
        return _Served(exchange, self._counted)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """While it lasts, one request more is under way."""
        self._inflight += 1
        try:
            yield
        finally:
            self._inflight -= 1

    async def models(self, request: Request) -> Response:
        """What an engine that is in says of its models; all are expected to serve the same."""
        role = Role.DECODE if self._parts.config.pairs else Role.PLAIN
        for name in self._parts.pool.candidates(role, self._parts.now_s()):
            try:
                answer = await self._parts.upstreams[name].get("/v1/models", _MODELS_S, headers=_passed(request.headers))
            except KVStoreError:
                self._parts.counters.add("router_models_unknown_total")
                continue
            return Response(answer, media_type="application/json")
        raise Unavailable("no engine says what it serves")

    async def health(self) -> Response:
        """200 while requests can be served."""
        pool, now_s = self._parts.pool, self._parts.now_s()
        role = Role.DECODE if self._parts.config.pairs else Role.PLAIN
        well = bool(pool.candidates(role, now_s))
        return JSONResponse({"status": "ok" if well else "no engine is there"}, status_code=200 if well else 503)

    async def engines(self) -> Response:
        """How each engine is and what it has to do, for people and tests."""
        return JSONResponse({name: self._engine(name) for name in self._parts.pool.engines})

    async def metrics(self) -> Response:
        """Counters and gauges in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _gauges(self) -> Iterator[Sample]:
        yield Sample("build_info", 1, {"version": kvstore.__version__})
        yield Sample("router_requests_inflight", self._inflight)
        for name, health in self._parts.pool.engines.items():
            load, labels = self._parts.load(name), {"engine": name, "role": str(health.config.role)}
            yield Sample("router_engine_up", int(health.up), labels)
            yield Sample("router_engine_sequences", load.sequences, labels)
            yield Sample("router_engine_tokens", load.tokens, labels)

    def _engine(self, name: str) -> dict[str, Any]:
        health, load = self._parts.pool.engines[name], self._parts.load(name)
        return {
            "url": health.config.url,
            "role": health.config.role,
            "node": health.config.node,
            "up": health.up,
            "why": health.why,
            "busy": health.busy_until_s > self._parts.now_s(),
            "models": health.models,
            "sequences": load.sequences,
            "tokens": load.tokens,
        }

    async def _body(self, request: Request) -> bytes | None:
        """The body, within the bounds of size and time; None: it is too long.

        Raises:
            InvalidArgument: it did not come in time.
            ClientDisconnect: the client left before all of it was here.
        """
        most = self._parts.config.max_body_bytes
        told = request.headers.get("content-length", "0")
        if not told.isdecimal() or int(told) > most:
            return None
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.stream():
                    raw += piece
                    if len(raw) > most:
                        return None
        except TimeoutError:
            raise InvalidArgument("the request did not come in time", seconds=_BODY_S) from None
        return bytes(raw)


class _Served(Response):
    """An exchange as FastAPI wants it, counted as long as it lasts."""

    def __init__(self, exchange: Exchange, counted: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted():
            await self._exchange(scope, receive, send)


def malformed() -> Response:
    """The answer to what is no HTTP."""
    return _told(InvalidArgument("this is no HTTP request"))


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KVStoreError)
    return _told(error)


def _told(error: KVStoreError) -> Response:
    return JSONResponse(
        error_fields(error), status_code=http_status(error), headers={"retry-after": "1"} if error.retryable else None
    )


async def _no_door(request: Request, error: Exception) -> Response:
    """Another path, or another method: what the framework found, said as all else is."""
    assert isinstance(error, HTTPException)
    asked = {"method": request.method, "path": request.url.path[:_MOST_ECHOED]}
    told = NotFound("no such path", **asked) if error.status_code == _NOT_FOUND else Unsupported(error.detail, **asked)
    return JSONResponse(error_fields(told), status_code=error.status_code, headers=error.headers)


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for engines: those of the client that concern them; answers are not to be compressed unless it said so."""
    passed = {name: headers[name] for name in _PASSED if name in headers}
    return {**passed, "content-type": "application/json", "accept-encoding": headers.get("accept-encoding", "identity")}
