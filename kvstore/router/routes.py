"""HTTP routes of the router: OpenAI's completions and chat completions, health, metrics, and the state of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
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
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.placement import Placement
from kvstore.router.prompts.prompt_facts import PromptReader
from kvstore.router.prompts.request_body import CHAT, COMPLETIONS, parse_body
from kvstore.router.prompts.session_hints import request_hint
from kvstore.router.proxy.openai_errors import error_fields, http_status
from kvstore.router.proxy.proxy import ProxyRequest

_FORWARDED_HEADERS: Final = (
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "openai-organization",
    "openai-project",
)
"""Headers of a client that are forwarded to engines."""
_MODELS_TIMEOUT_S: Final = 10.0
_BODY_TIMEOUT_S: Final = 60.0
"""Time for a client to send its request."""
_NOT_FOUND: Final = 404
_MAX_ECHOED_CHARS: Final = 256
_CLIENT_CLOSED_REQUEST: Final = 499
"""Status by convention for a client that disconnected; it is not sent."""


def make_app(context: RouterContext, placement: Placement, prompts: PromptReader) -> FastAPI:
    """Return the application of one router."""
    app = FastAPI(title="kvstore router", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _RouterRoutes(context, placement, prompts)
    app.add_api_route(COMPLETIONS, routes.completions, methods=["POST"], response_model=None)
    app.add_api_route(CHAT, routes.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/router/engines", routes.engines, methods=["GET"], response_model=None)
    app.add_exception_handler(KVStoreError, _handle_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    return app


class _RouterRoutes:
    """Handlers of all routes."""

    def __init__(self, context: RouterContext, placement: Placement, prompts: PromptReader) -> None:
        self._context = context
        self._placement = placement
        self._prompts = prompts
        self._inflight = 0
        self._registry = registry_of(StoreCollector([context.counters], [self._gauges], process="router"))

    async def completions(self, request: Request) -> Response:
        """Serve a completion or chat completion."""
        counters = self._context.counters
        counters.add(router_metrics.REQUESTS)
        if self._inflight >= self._context.config.max_inflight:
            counters.add(router_metrics.REFUSED_FULL)
            raise CapacityExceeded("too many requests in flight; retry later", max_inflight=self._inflight)
        try:
            with self._counted():
                raw = await self._read_body(request)
        except ClientDisconnect:  # the client left before its request was complete: no response, and no error of the router
            counters.add(router_metrics.CLIENTS_GONE)
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        if raw is None:
            counters.add(router_metrics.REFUSED_LONG)
            error = InvalidArgument("the request body is too long", max_bytes=self._context.config.max_body_bytes)
            return JSONResponse(error_fields(error), status_code=413)
        body = parse_body(request.url.path, raw)
        hint = request_hint(request.headers, body.fields)
        if hint is not None:
            counters.add(router_metrics.HINTS)
            body = replace(body, hint=hint)
            raw = body.for_engine()
        headers = _engine_headers(request.headers)
        if body.stream:
            headers["accept-encoding"] = "identity"  # the end of a compressed stream cannot be verified without decompression
        proxied = ProxyRequest(self._context, self._placement, self._prompts, body, raw, headers)
        return _ProxyResponse(proxied, self._counted)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request as in flight within the context."""
        self._inflight += 1
        try:
            yield
        finally:
            self._inflight -= 1

    async def models(self, request: Request) -> Response:
        """Return the model list of the first engine that answers; all engines should serve the same models."""
        role = Role.DECODE if self._context.config.pairs else Role.PLAIN
        headers = _engine_headers(request.headers)
        end_s = self._context.now_s() + _MODELS_TIMEOUT_S
        for name in self._context.health.candidates(role):
            if (left_s := end_s - self._context.now_s()) <= 0:
                break
            try:
                models = await self._context.upstreams[name].get("/v1/models", left_s, headers=headers)
            except KVStoreError:
                self._context.counters.add(router_metrics.MODELS_UNKNOWN)
                continue
            return Response(models, media_type="application/json")
        raise Unavailable("no engine returned its models; check the engines' health in /router/engines")

    async def health(self) -> Response:
        """Return 200 while an engine that answers requests is healthy."""
        role = Role.DECODE if self._context.config.pairs else Role.PLAIN
        if self._context.health.in_panic(role):
            return JSONResponse({"status": "no healthy engine"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def engines(self) -> Response:
        """Return state and work of each engine."""
        return JSONResponse({name: self._describe(name) for name in self._context.health.engines})

    async def metrics(self) -> Response:
        """Return counters and gauges in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _gauges(self) -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(router_metrics.REQUESTS_INFLIGHT, self._inflight)
        for name, engine in self._context.health.engines.items():
            work, labels = self._context.work(name), {"engine": name, "role": str(engine.config.role)}
            yield Sample(router_metrics.ENGINE_UP, int(engine.healthy), labels)
            yield Sample(router_metrics.ENGINE_SEQUENCES, work.sequences, labels)
            yield Sample(router_metrics.ENGINE_TOKENS, work.tokens, labels)

    def _describe(self, name: str) -> dict[str, Any]:
        engine, work = self._context.health.engines[name], self._context.work(name)
        return {
            "url": engine.config.url,
            "role": engine.config.role,
            "node": engine.config.node,
            "state": engine.state,
            "reason": engine.reason,
            "ejections": engine.ejections,
            "models": engine.models,
            "sequences": work.sequences,
            "tokens": work.tokens,
        }

    async def _read_body(self, request: Request) -> bytes | None:
        """Read the body within bounds of size and time.

        Returns:
            The body; None if it is too long.

        Raises:
            InvalidArgument: the body did not arrive in time.
            ClientDisconnect: the client disconnected.
        """
        max_bytes = self._context.config.max_body_bytes
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > max_bytes:
            return None
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for piece in request.stream():
                    raw += piece
                    if len(raw) > max_bytes:
                        return None
        except TimeoutError:
            raise InvalidArgument("the request body did not arrive in time", seconds=_BODY_TIMEOUT_S) from None
        return bytes(raw)


class _ProxyResponse(Response):
    """Adapter of a proxied request to FastAPI; counts the request as in flight until it ends."""

    def __init__(self, proxied: ProxyRequest, counted: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._proxied = proxied
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted():
            await self._proxied(scope, receive, send)


def malformed() -> Response:
    """Return the response to bytes that are not HTTP."""
    return _error_response(InvalidArgument("the request is not valid HTTP"))


async def _handle_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KVStoreError)
    return _error_response(error)


def _error_response(error: KVStoreError) -> Response:
    headers = {"retry-after": "1"} if error.retryable else None
    return JSONResponse(error_fields(error), status_code=http_status(error), headers=headers)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Return the framework's errors (unknown path or method) in OpenAI's format."""
    assert isinstance(error, HTTPException)
    fields = {"method": request.method, "path": request.url.path[:_MAX_ECHOED_CHARS]}
    known = NotFound("unknown path", **fields) if error.status_code == _NOT_FOUND else Unsupported(error.detail, **fields)
    return JSONResponse(error_fields(known), status_code=error.status_code, headers=error.headers)


def _engine_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for engines. Responses are compressed only if the client asked for it."""
    forwarded = {name: headers[name] for name in _FORWARDED_HEADERS if name in headers}
    return {**forwarded, "content-type": "application/json", "accept-encoding": headers.get("accept-encoding", "identity")}
