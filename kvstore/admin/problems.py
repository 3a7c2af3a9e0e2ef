"""Error responses as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel, Field
from starlette.responses import Response

from kvstore.core.errors import Conflict, ErrorKind, InvalidArgument, KVStoreError
from kvstore.core.status import STATUS
from kvstore.observe.tracing import request_id

MEDIA_TYPE: Final = "application/problem+json"
_TYPE: Final = "urn:kvstore:error:"
_MOST_CHARACTERS: Final = 512
PRECONDITION_FAILED: Final = 412
TOO_LONG: Final = 413
PRECONDITION_REQUIRED: Final = 428


class Problem(BaseModel):
    """Error response."""

    type: str = Field(description="the kind as a URN", examples=["urn:kvstore:error:not_found"])
    title: str = Field(description="the kind in words", examples=["not found"])
    status: int = Field(description="the HTTP status", examples=[404])
    detail: str = Field(description="what went wrong and what to do", examples=["no such node"])
    kind: ErrorKind = Field(description="stable name of the error, the same as over gRPC", examples=["not_found"])
    retryable: bool = Field(description="whether the same request may succeed later", examples=[False])
    fields: dict[str, str] = Field(description="values that the detail refers to, by name", examples=[{"node_id": "host-9"}])
    request_id: str = Field(description="id of the request in logs", examples=["9f0c1d2e3a4b5c6d"])


class PreconditionError(Exception):
    """An error with an HTTP status that differs from its kind's: failed preconditions."""

    def __init__(self, status: int, error: KVStoreError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def changed_meanwhile(current: str) -> PreconditionError:
    """The error for an ``If-Match`` that names another state."""
    return PreconditionError(
        PRECONDITION_FAILED, Conflict("it was changed by another request; read it again and retry", current=current)
    )


def missing_precondition() -> PreconditionError:
    """The error for a missing ``If-Match``."""
    error = InvalidArgument("If-Match is required; send the ETag of the state to change", field="If-Match")
    return PreconditionError(PRECONDITION_REQUIRED, error)


def problem(error: KVStoreError, status: int | None = None) -> Response:
    """The response to an error."""
    code = STATUS[error.kind].http if status is None else status
    body = {
        "type": _TYPE + error.kind.value,
        "title": error.kind.value.replace("_", " "),
        "status": code,
        "detail": error.message[:_MOST_CHARACTERS],
        "kind": error.kind.value,
        "retryable": error.retryable,
        "fields": {name: value[:_MOST_CHARACTERS] for name, value in error.fields.items()},
        "request_id": request_id.get() or "",
    }
    headers = {"cache-control": "no-store"}
    if error.retryable:
        headers["retry-after"] = "1"
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = 'Bearer realm="kvstore"'
    return Response(json.dumps(body), code, headers, MEDIA_TYPE)  # ASCII, because names from outside may contain any character
