"""Errors as ``application/problem+json`` (RFC 9457): the one error tree, with its one table of HTTP statuses."""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel, Field
from starlette.responses import Response

from kvstore.core.errors import Conflict, ErrorKind, InvalidArgument, KVStoreError
from kvstore.core.status import STATUS
from kvstore.observe.context import request_id

MEDIA_TYPE: Final = "application/problem+json"
_TYPE: Final = "urn:kvstore:error:"
_MOST_CHARACTERS: Final = 512
PRECONDITION_FAILED: Final = 412
TOO_LONG: Final = 413
PRECONDITION_REQUIRED: Final = 428


class Problem(BaseModel):
    """Why a request was not served."""

    type: str = Field(description="the kind as a URN", examples=["urn:kvstore:error:not_found"])
    title: str = Field(description="the kind in words", examples=["not found"])
    status: int = Field(description="the HTTP status", examples=[404])
    detail: str = Field(description="what went wrong and what to do, for a person", examples=["no such node"])
    kind: ErrorKind = Field(description="stable name of the error, the same as over gRPC", examples=["not_found"])
    retryable: bool = Field(description="the same request may succeed later", examples=[False])
    fields: dict[str, str] = Field(description="what the detail speaks of, by name", examples=[{"node_id": "host-9"}])
    request_id: str = Field(description="names the request in logs", examples=["9f0c1d2e3a4b5c6d"])


class Refused(Exception):  # as the error tree's names
    """An error whose HTTP status says more than its kind: conditional requests, and bodies that are too long."""

    def __init__(self, status: int, error: KVStoreError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def changed_meanwhile(current: str) -> Refused:
    """The tag in ``If-Match`` is not the current one."""
    return Refused(PRECONDITION_FAILED, Conflict("it was changed meanwhile: look at it again", current=current))


def say_which() -> Refused:
    """There is no ``If-Match``."""
    error = InvalidArgument("say which state you are changing: give the ETag that you have seen as If-Match", field="If-Match")
    return Refused(PRECONDITION_REQUIRED, error)


def problem(error: KVStoreError, status: int | None = None) -> Response:
    """An error as an answer."""
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
    return Response(json.dumps(body), code, headers, MEDIA_TYPE)  # ASCII: names from outside may hold anything
