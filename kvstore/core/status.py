"""Mapping between error kinds, gRPC status codes and HTTP status codes.

Storage code uses error kinds only; the gRPC interceptor and the REST server map them. No gRPC import: codes have the names and
numbers of the gRPC specification, so that ``kvstore.core`` does not depend on it.

The mapping is one to one, so that the kind is known even if a proxy removes the machine-readable detail. Codes that only a
proxy or the gRPC library sends (CANCELLED, UNKNOWN, …) have a nearest kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from kvstore.core import errors
from kvstore.core.errors import ErrorKind, KVStoreError


class GrpcCode(IntEnum):
    """Status codes of the gRPC specification."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(NamedTuple):
    """How one kind of error looks from outside."""

    grpc: GrpcCode
    http: int


STATUS: Mapping[ErrorKind, Status] = MappingProxyType(
    {
        ErrorKind.INVALID_ARGUMENT: Status(GrpcCode.INVALID_ARGUMENT, 400),
        ErrorKind.UNSUPPORTED: Status(GrpcCode.UNIMPLEMENTED, 501),
        ErrorKind.NOT_FOUND: Status(GrpcCode.NOT_FOUND, 404),
        ErrorKind.CONFLICT: Status(GrpcCode.ABORTED, 409),
        ErrorKind.PERMISSION_DENIED: Status(GrpcCode.PERMISSION_DENIED, 403),
        ErrorKind.UNAUTHENTICATED: Status(GrpcCode.UNAUTHENTICATED, 401),
        ErrorKind.LEASE_LOST: Status(GrpcCode.FAILED_PRECONDITION, 410),
        ErrorKind.CAPACITY_EXCEEDED: Status(GrpcCode.RESOURCE_EXHAUSTED, 429),
        ErrorKind.UNAVAILABLE: Status(GrpcCode.UNAVAILABLE, 503),
        ErrorKind.DEADLINE_EXCEEDED: Status(GrpcCode.DEADLINE_EXCEEDED, 504),
        ErrorKind.CORRUPT_BLOCK: Status(GrpcCode.DATA_LOSS, 502),
        ErrorKind.INTERNAL: Status(GrpcCode.INTERNAL, 500),
    }
)

_CLASSES: tuple[type[KVStoreError], ...] = (
    errors.InvalidArgument,
    errors.Unsupported,
    errors.NotFound,
    errors.Conflict,
    errors.PermissionDenied,
    errors.Unauthenticated,
    errors.LeaseLost,
    errors.CapacityExceeded,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.CorruptBlock,
    errors.Internal,
)
ERROR_CLASSES: Mapping[ErrorKind, type[KVStoreError]] = MappingProxyType({cls.kind: cls for cls in _CLASSES})

_KIND_OF_GRPC: Mapping[int, ErrorKind] = MappingProxyType(
    {
        **{int(status.grpc): kind for kind, status in STATUS.items()},
        GrpcCode.CANCELLED: ErrorKind.UNAVAILABLE,  # the channel or the server went away under the call
        GrpcCode.UNKNOWN: ErrorKind.INTERNAL,
        GrpcCode.ALREADY_EXISTS: ErrorKind.CONFLICT,
        GrpcCode.OUT_OF_RANGE: ErrorKind.INVALID_ARGUMENT,
    }
)


def kind_of_grpc(code: int) -> ErrorKind:
    """The nearest kind of a gRPC status code; ``INTERNAL`` for codes outside of the specification.

    Raises:
        ValueError: the code is OK, not an error.
    """
    if code == GrpcCode.OK:
        raise ValueError("OK is not an error status")
    return _KIND_OF_GRPC.get(code, ErrorKind.INTERNAL)  # an IntEnum member hashes as its number


def make_error(kind: ErrorKind, message: str, fields: Mapping[str, str]) -> KVStoreError:
    """An error of the class that the kind names."""
    error = ERROR_CLASSES[kind](message)
    error.fields = dict(fields)  # not as keyword arguments: a field may be called "message"
    return error
