"""The application: routes, errors, the OpenAPI document, health, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match

import kvstore
from kvstore.admin.middleware import PUBLIC, AdminMiddleware
from kvstore.admin.page import PATH as PAGE
from kvstore.admin.page import WebPage
from kvstore.admin.problems import MEDIA_TYPE, Problem, Refused, problem
from kvstore.admin.routes.read import Reads
from kvstore.admin.routes.retention_rules import Rules
from kvstore.admin.routes.tenants import Tenants
from kvstore.admin.routes.write import Changes
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
What the store does and how to change it. Errors are `application/problem+json`; `kind` is stable. Lists come a page at a time:
`next_cursor` is the `cursor` of the next page. What is edited has an ETag: give it as `If-Match`. Changes are lines of the audit
log, and take the role `operator`; questions take `read`.
"""
_EVERYWHERE: Final = {
    "400": "the request cannot be served as it is",
    "404": "there is nothing at this path",
    "429": "as many requests are under way as this server takes",
    "500": "a bug",
    "503": "the metadata server, or the node, does not answer",
    "504": "no answer in time",
}
_WITH_TOKENS: Final = {"401": "no token, or nobody's", "403": "the role does not reach, or a web page from elsewhere asks"}
_WITH_BODY: Final = {"413": "the request is too long"}
_NOT_FOUND: Final = 404
_NO_METHOD: Final = 405


def make_app(rpc: StoreRpc, config: AdminConfig, tokens: WatchedFile[TokenTable] | None, counters: Counters) -> AdminMiddleware:
    """One admin server's application, behind its gate."""
    app = FastAPI(
        title="kvstore admin",
        version=kvstore.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(Reads(rpc, config).routes())
    app.include_router(Changes(rpc, counters).routes())
    app.include_router(Tenants(rpc, counters).routes())
    app.include_router(Rules(rpc, counters).routes())
    middleware = AdminMiddleware(app, config, tokens, counters)
    routes = _Routes(app, rpc, counters, middleware)
    app.add_api_route("/healthz", routes.healthz, methods=["GET"], tags=["health"], summary="The server answers")
    app.add_api_route(
        "/readyz", routes.readyz, methods=["GET"], tags=["health"], summary="The metadata server answers this server"
    )
    page = WebPage()
    app.add_api_route(PAGE, page.show, methods=["GET"], include_in_schema=False)
    app.add_api_route(OPENAPI, routes.openapi, methods=["GET"], include_in_schema=False)
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], include_in_schema=False)
    for path, door in (("/healthz", routes.healthz), ("/readyz", routes.readyz), (PAGE, page.show)):  # as probes ask
        app.add_api_route(path, door, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(Exception, routes.refused)  # told here; the gate logs it
    app.add_exception_handler(KVStoreError, routes.refused)
    app.add_exception_handler(Refused, routes.refused)
    app.add_exception_handler(RequestValidationError, routes.refused)
    app.add_exception_handler(HTTPException, routes.http_error)
    return middleware


class _Routes:
    """What is beside the routes of ``/v1``."""

    def __init__(self, app: FastAPI, rpc: StoreRpc, counters: Counters, middleware: AdminMiddleware) -> None:
        self._app = app
        self._rpc = rpc
        self._middleware = middleware
        self._registry = registry_of(StoreCollector([counters], [_gauges], process="admin"))
        self._document: dict[str, Any] | None = None

    async def healthz(self) -> models.Health:
        """For liveness probes: nothing else is asked."""
        return models.Health(status="ok")

    async def readyz(self) -> models.Health:
        """For readiness probes: 503 while the metadata server does not answer."""
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

    async def refused(self, _request: Request, error: Exception) -> Response:
        """One of our errors, or a request that does not have the shape."""
        status = None
        match error:
            case Refused():
                told, status = error.error, error.status
            case RequestValidationError():
                told = _of_validation(error)
            case Unauthenticated():  # whoever asks here was let in: it is this server's own token that is refused
                told = Unavailable(error.message)
            case KVStoreError():
                told = error
            case _:
                told = Internal("internal error; the server's log has the details")
        self._middleware.count(told)
        return problem(told, status)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Another path, or another method: what the framework found, said as all else is."""
        assert isinstance(error, HTTPException)
        asked = {"method": request.method, "path": request.url.path}
        if error.status_code == _NOT_FOUND:
            told: KVStoreError = NotFound("no such path", **asked)
        elif error.status_code == 400:  # a body that is no JSON
            told = InvalidArgument(str(error.detail))
        else:
            told = Unsupported(str(error.detail), **asked)
        self._middleware.count(told)
        answer = problem(told, error.status_code)
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        if error.status_code == _NO_METHOD:  # the framework names those of the first route of the path
            routes = [route for route in self._app.routes if isinstance(route, APIRoute)]
            here = [route.methods for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            answer.headers["allow"] = ", ".join(sorted(set().union(*here)))
        return answer


def _gauges() -> Iterator[Sample]:
    yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})


def _of_validation(error: RequestValidationError) -> InvalidArgument:
    """The first thing that is wrong, without what was given: it may be long, or secret."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return InvalidArgument(f"{where}: {first['msg']}", field=where)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application: what FastAPI finds, with our errors and who may ask."""
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
            "description": "a token of the server's file; on loopback without one, none",
        }
    }
    for path, operations in made["paths"].items():
        for operation in operations.values():
            _finish(path, operation)
    return made


def _finish(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would say; ours are 400
    told = dict(_EVERYWHERE)
    if path not in PUBLIC:
        told |= _WITH_TOKENS
        operation["security"] = [{"token": []}, {}]
    if "requestBody" in operation:
        told |= _WITH_BODY
    for status, description in told.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
