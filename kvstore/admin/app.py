"""Application of the admin server: routes, error handlers, OpenAPI document, health checks and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match

import kvstore
from kvstore.admin.middleware import PUBLIC, AdminMiddleware
from kvstore.admin.page import HEALTH_PAGES, WebPage, show_health_page
from kvstore.admin.page import PATH as PAGE
from kvstore.admin.problems import MEDIA_TYPE, PreconditionError, Problem, problem
from kvstore.admin.routes.hints import Hints
from kvstore.admin.routes.read import Reads
from kvstore.admin.routes.retention_rules import Rules
from kvstore.admin.routes.tenants import Tenants
from kvstore.admin.routes.write import Changes
from kvstore.admin.runbook import RUNBOOK, Runbook
from kvstore.config.admin import AdminConfig
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.core.errors import (
    Internal,
    InvalidArgument,
    KVStoreError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector, registry_of
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.rpc.auth.tokens import TokenTable, WatchedFile

OPENAPI: Final = "/v1/openapi.json"
_ABOUT: Final = """\
State of the store, and changes to it. Errors are `application/problem+json`, and their `kind` is stable. Lists are paginated:
`next_cursor` is the `cursor` of the next page. Editable resources have an ETag; send it as `If-Match`. Queries require the role
`read`. Changes require the role `operator` and are written to the audit log.
"""
_EVERYWHERE: Final = {
    "400": "invalid request",
    "404": "not found",
    "429": "too many concurrent requests",
    "500": "internal error",
    "503": "the metadata server or the node does not answer",
    "504": "timeout",
}
_WITH_TOKENS: Final = {
    "401": "the token is missing or unknown",
    "403": "the role is insufficient, or the request is cross-origin",
}
_WITH_BODY: Final = {"413": "the request body is too large"}
_NOT_FOUND: Final = 404
_NO_METHOD: Final = 405


def make_app(rpc: StoreRpc, config: AdminConfig, tokens: WatchedFile[TokenTable] | None, counters: Counters) -> AdminMiddleware:
    """The application of an admin server, wrapped in its middleware."""
    app = FastAPI(
        title="kvstore admin",
        version=kvstore.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    groups = (Reads(rpc, config), Changes(rpc, counters), Tenants(rpc, counters), Rules(rpc, counters), Hints(rpc, counters))
    for group in groups:
        app.include_router(group.routes(), dependencies=[Depends(_check_query)])
    middleware = AdminMiddleware(app, config, tokens, counters)
    routes = _Routes(app, rpc, counters, middleware)
    app.add_api_route("/healthz", routes.healthz, methods=["GET"], tags=["health"], summary="Liveness")
    app.add_api_route("/readyz", routes.readyz, methods=["GET"], tags=["health"], summary="Readiness")
    page = WebPage()
    app.add_api_route(PAGE, page.show, methods=["GET"], include_in_schema=False)
    for path in HEALTH_PAGES:
        app.add_api_route(path, show_health_page, methods=["GET"], include_in_schema=False)
    app.add_api_route(RUNBOOK, Runbook().show, methods=["GET"], include_in_schema=False)
    app.add_api_route(OPENAPI, routes.openapi, methods=["GET"], include_in_schema=False)
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], include_in_schema=False)
    for path, handler in (("/healthz", routes.healthz), ("/readyz", routes.readyz), (PAGE, page.show)):  # probes may send HEAD
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(Exception, routes.refused)  # answered here, logged by the middleware
    app.add_exception_handler(KVStoreError, routes.refused)
    app.add_exception_handler(PreconditionError, routes.refused)
    app.add_exception_handler(RequestValidationError, routes.refused)
    app.add_exception_handler(HTTPException, routes.http_error)
    return middleware


class _Routes:
    """Routes outside of ``/v1``, and the error handlers."""

    def __init__(self, app: FastAPI, rpc: StoreRpc, counters: Counters, middleware: AdminMiddleware) -> None:
        self._app = app
        self._rpc = rpc
        self._middleware = middleware
        self._registry = registry_of(StoreCollector([counters], [_gauges], process="admin"))
        self._document: dict[str, Any] | None = None

    async def healthz(self) -> models.Health:
        """Liveness probe: answered without asking any other process."""
        return models.Health(status="ok")

    async def readyz(self) -> models.Health:
        """Readiness probe: 503 if the metadata server does not answer."""
        await self._rpc.server()
        return models.Health(status="ok")

    async def metrics(self) -> Response:
        """Counters in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self._document is None:
            self._document = document(self._app)
        return self._document

    async def refused(self, request: Request, error: Exception) -> Response:
        """Respond to an error of a handler or to an invalid request."""
        status = None
        match error:
            case PreconditionError():
                reported, status = error.error, error.status
            case RequestValidationError():
                reported = _of_validation(error, request.headers.get("content-type", ""))
            case Unauthenticated():  # the caller was authenticated: the store rejected this server's own token
                reported = Unavailable(error.message)
            case KVStoreError():
                reported = error
            case _:
                reported = Internal("internal error; the server's log has the details")
        self._middleware.count(reported)
        return problem(reported, status)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Respond to an unknown path, an unsupported method or a malformed body."""
        assert isinstance(error, HTTPException)
        call = {"method": request.method, "path": request.url.path}
        if error.status_code == _NOT_FOUND:
            reported: KVStoreError = NotFound("no such path", **call)
        elif error.status_code == 400:  # the body is not JSON
            reported = InvalidArgument(str(error.detail))
        else:
            reported = Unsupported(str(error.detail), **call)
        self._middleware.count(reported)
        answer = problem(reported, error.status_code)
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        if error.status_code == _NO_METHOD:  # the framework lists only the methods of the first matching route
            routes = [route for route in self._app.routes if isinstance(route, APIRoute)]
            here = [route.methods for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            answer.headers["allow"] = ", ".join(sorted(set().union(*here)))
        return answer


async def _check_query(request: Request) -> None:
    """Reject unknown query parameters: a misspelt filter would select everything.

    Raises:
        InvalidArgument: the path takes no such parameter.
    """
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        expected = ", ".join(sorted(known)) or "none"
        raise InvalidArgument(f"unknown query parameter; this path takes: {expected}", parameter=unknown[0][:64])


def _gauges() -> Iterator[Sample]:
    yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})


def _of_validation(error: RequestValidationError, content_type: str) -> InvalidArgument:
    """The first validation error, without the rejected value, which may be long or secret."""
    first = error.errors()[0]
    if first["loc"] == ("body",) and "json" not in content_type.lower():
        return InvalidArgument("body: send it as JSON, with content-type: application/json", field="body")
    where = ".".join(str(part) for part in first["loc"])
    return InvalidArgument(f"{where}: {first['msg']}", field=where)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, with error responses and authentication added."""
    made = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    schemas = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    shape = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(shape.pop("$defs", {}))
    schemas["Problem"] = shape
    made["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "a token from admin.tokens_file; none is required on loopback if that is unset",
        }
    }
    for path, operations in made["paths"].items():
        for operation in operations.values():
            _finish(path, operation)
    return made


def _finish(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's default; this server responds with 400
    descriptions = dict(_EVERYWHERE)
    if path not in PUBLIC:
        descriptions |= _WITH_TOKENS
        operation["security"] = [{"token": []}, {}]
    if "requestBody" in operation:
        descriptions |= _WITH_BODY
    for status, description in descriptions.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
