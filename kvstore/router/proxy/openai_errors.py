"""Errors in the format of the OpenAI API."""

from __future__ import annotations

import json
from typing import Any

from kvstore.core.errors import ErrorKind, KVStoreError
from kvstore.core.status import STATUS

_TYPES = {
    ErrorKind.INVALID_ARGUMENT: "invalid_request_error",
    ErrorKind.NOT_FOUND: "invalid_request_error",
    ErrorKind.UNSUPPORTED: "invalid_request_error",
    ErrorKind.CAPACITY_EXCEEDED: "rate_limit_error",
    ErrorKind.UNAVAILABLE: "service_unavailable_error",
    ErrorKind.DEADLINE_EXCEEDED: "timeout_error",
}


def http_status(error: KVStoreError) -> int:
    """HTTP status of an error."""
    return STATUS[error.kind].http


def error_fields(error: KVStoreError) -> dict[str, Any]:
    """Error as ``{"error": {"message", "type", "param", "code"}}``."""
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.kind, "server_error"),
            "param": error.fields.get("field"),
            "code": error.kind.value,
        }
    }


def error_body(error: KVStoreError) -> bytes:
    """Error as the body of a response."""
    return json.dumps(error_fields(error)).encode()


def error_event(error: KVStoreError) -> bytes:
    """Error as a server-sent event. Clients raise it; a stream that only ended would look complete."""
    return b"data: " + error_body(error) + b"\n\n"
