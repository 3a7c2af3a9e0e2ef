"""Our errors as gRPC status with details, and back.

On the wire an error is a ``google.rpc.Status`` whose details hold one ``ErrorDetail`` {kind, retryable, fields}. The other side
makes an error of the same class of it. Where the detail is missing (a proxy, the gRPC library itself, an older peer) or says
a kind that this build does not know, the status code decides.
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
"""Trailing metadata key that the gRPC libraries of all languages agree on."""
_GRPC_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_KINDS: Final = {kind.value: kind for kind in ErrorKind}
# gRPC peers accept about 8 KiB of trailing metadata by default: a status that does not fit would arrive as a bare
# RESOURCE_EXHAUSTED. The message travels twice (once percent-encoded), so everything is cut to fit.
_MAX_MESSAGE_CHARS: Final = 512
_MAX_FIELDS: Final = 16
_MAX_FIELD_CHARS: Final = 96


class FailedCall(Protocol):
    """What ``grpc.RpcError`` offers in practice: the synchronous ones are calls, those of asyncio have the same methods."""

    def code(self) -> grpc.StatusCode | None:
        """How the call ended."""

    def details(self) -> str | None:
        """The message."""

    def trailing_metadata(self) -> object:
        """Pairs of key and value, or None."""


def to_status(error: KVStoreError) -> status_pb2.Status:
    """The status that an error travels as."""
    detail = ErrorDetail(kind=error.kind.value, retryable=error.retryable)
    for name, value in list(error.fields.items())[:_MAX_FIELDS]:
        detail.fields[_text(name, _MAX_FIELD_CHARS)] = _text(value, _MAX_FIELD_CHARS)
    status = status_pb2.Status(code=int(STATUS[error.kind].grpc), message=_text(error.message, _MAX_MESSAGE_CHARS))
    status.details.add().Pack(detail)
    return status


def abort_arguments(error: KVStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """What a servicer context's ``abort`` takes: code, message, trailing metadata."""
    status = to_status(error)
    return _GRPC_CODES[status.code], status.message, ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(failed: FailedCall) -> KVStoreError:
    """The error that a failed call stands for: of the class that the details name, else of the status code's."""
    code = failed.code()
    number: int = code.value[0] if code is not None else grpc.StatusCode.UNKNOWN.value[0]
    message = failed.details() or "the call failed without a message"
    detail = _detail(failed)
    if detail is not None and (kind := _KINDS.get(detail.kind)) is not None:
        return make_error(kind, message, detail.fields)
    if number == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and "larger than max" in message:
        # gRPC's own refusal of an oversized message: the same call can never succeed, so it must not look retryable
        return make_error(ErrorKind.INVALID_ARGUMENT, message, {})
    return make_error(kind_of_grpc(number), message, {})


def _detail(failed: FailedCall) -> ErrorDetail | None:
    """The ErrorDetail of a failed call, if there is one."""
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
            return None  # a mangled detail: the status code still says what kind of failure it was
    return None


def _text(text: str, limit: int) -> str:
    """Cuts, and replaces what UTF-8 cannot carry (a lone surrogate from a hostile name)."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
