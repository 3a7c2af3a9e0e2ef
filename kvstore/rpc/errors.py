"""Conversion of ``KVStoreError`` to a gRPC status, and back.

An error is sent as a ``google.rpc.Status`` with one ``ErrorDetail`` {kind, retryable, fields}, and the receiver creates an error
of the same class. If the detail is missing (sent by a proxy, the gRPC library or an older peer) or has an unknown kind, the
class follows from the status code.
"""

from __future__ import annotations

from typing import Final, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvproto.v1.common_pb2 import ErrorDetail
from kvstore.core.errors import ErrorKind, KVStoreError
from kvstore.core.status import STATUS, kind_of_grpc, make_error

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata key of the status details in all gRPC libraries."""
USE_ANOTHER_SERVER: Final = "use_another_server"
"""Field of the error of a metadata server that cannot serve this caller, while others may."""
NOT_EXECUTED: Final = "not_executed"
"""Field of the error of a server that has changed nothing: another server may execute a call that must not be executed twice."""
_GRPC_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_KINDS: Final = {kind.value: kind for kind in ErrorKind}
# gRPC peers accept about 8 KiB of trailing metadata by default. A larger status would arrive as RESOURCE_EXHAUSTED without
# details. The message is sent twice (once percent-encoded), so everything is truncated.
_MAX_MESSAGE_CHARS: Final = 512
_MAX_FIELDS: Final = 16
_MAX_FIELD_CHARS: Final = 96


class FailedCall(Protocol):
    """Methods of every ``grpc.RpcError``, synchronous or asyncio."""

    def code(self) -> grpc.StatusCode | None:
        """Status code of the call."""

    def details(self) -> str | None:
        """Message of the status."""

    def trailing_metadata(self) -> object:
        """Pairs of key and value, or None."""


def to_status(error: KVStoreError) -> status_pb2.Status:
    """The status of an error."""
    detail = ErrorDetail(kind=error.kind.value, retryable=error.retryable)
    for name, value in list(error.fields.items())[:_MAX_FIELDS]:
        detail.fields[_text(name, _MAX_FIELD_CHARS)] = _text(value, _MAX_FIELD_CHARS)
    status = status_pb2.Status(code=int(STATUS[error.kind].grpc), message=_text(error.message, _MAX_MESSAGE_CHARS))
    status.details.add().Pack(detail)
    return status


def abort_arguments(error: KVStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Arguments of a servicer context's ``abort``: code, message, trailing metadata."""
    status = to_status(error)
    return _GRPC_CODES[status.code], status.message, ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(failed: FailedCall) -> KVStoreError:
    """The error of a failed call: of the kind in its details, else of the status code's kind."""
    code = failed.code()
    number: int = code.value[0] if code is not None else grpc.StatusCode.UNKNOWN.value[0]
    message = failed.details() or "the call failed without a message"
    detail = detail_of(failed)
    if detail is not None and (kind := _KINDS.get(detail.kind)) is not None:
        return make_error(kind, message, detail.fields)
    if number == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and "larger than max" in message:
        # gRPC rejected an oversized message; a retry can never succeed, so the error must not be retryable
        return make_error(ErrorKind.INVALID_ARGUMENT, message, {})
    if number == grpc.StatusCode.UNIMPLEMENTED.value[0]:
        message = f"the server does not know this call: it is a server of another kind or version; check its address ({message})"
    return make_error(kind_of_grpc(number), message, {})


def has_details(failed: FailedCall) -> bool:
    """Whether a server of this store sent the error; else gRPC made it, because no server answered."""
    return any(key == DETAILS_KEY for key, _ in failed.trailing_metadata() or ())  # type: ignore[attr-defined]  # pairs


def detail_of(failed: FailedCall) -> ErrorDetail | None:
    """Return the details of a failed call; None: the server sent none."""
    metadata = failed.trailing_metadata()
    for key, value in metadata or ():  # type: ignore[attr-defined]  # pairs, in both flavours
        if key != DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value)
            for packed in status.details:
                detail = ErrorDetail()
                if packed.Unpack(detail):
                    return detail
        except DecodeError:
            return None  # invalid detail: the kind follows from the status code
    return None


def _text(text: str, limit: int) -> str:
    """Truncate, and replace characters that UTF-8 cannot encode (lone surrogates)."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
