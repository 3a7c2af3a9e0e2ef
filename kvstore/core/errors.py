"""Errors of the store, grouped by the caller's reaction.

::

    KVStoreError
    ├── InvalidArgument     correct the call: a retry fails again
    ├── Unsupported         this build, volume or peer does not support it
    ├── NotFound            the named object does not exist (a missing *block* is an outcome, never an error)
    ├── Conflict            it exists already, with other properties
    ├── PermissionDenied    the caller may not do this
    ├── Unauthenticated     the token is missing or invalid
    ├── LeaseLost           the lease has expired: begin again
    ├── CapacityExceeded    no space, or a limit is reached: retry later    (retryable)
    ├── Unavailable         the peer cannot be reached now                  (retryable)
    ├── DeadlineExceeded    no answer in time                               (retryable)
    ├── CorruptBlock        bytes do not match their checksum: treat as a miss
    └── Internal            a bug in the store

``kind`` is append-only: user code matches on it. Storage code uses no gRPC or HTTP status codes; the mapping is in
``kvstore.core.status``.
"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from typing import ClassVar


class ErrorKind(StrEnum):
    """Stable names of the errors, as they travel. New ones may appear; none is renamed or removed."""

    INVALID_ARGUMENT = "invalid_argument"
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    PERMISSION_DENIED = "permission_denied"
    UNAUTHENTICATED = "unauthenticated"
    LEASE_LOST = "lease_lost"
    CAPACITY_EXCEEDED = "capacity_exceeded"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CORRUPT_BLOCK = "corrupt_block"
    INTERNAL = "internal"


class KVStoreError(Exception):
    """Base of all errors of the store.

    Args:
        message: problem and remedy, for a person.
        fields: details by name; values become strings when the error is sent to a peer.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}

    def __str__(self) -> str:
        if not self.fields:
            return self.message
        return f"{self.message} ({', '.join(f'{name}={value}' for name, value in self.fields.items())})"


class InvalidArgument(KVStoreError, ValueError):
    """An argument is invalid. Correct the call: a retry fails again."""

    kind = ErrorKind.INVALID_ARGUMENT


class Unsupported(KVStoreError):
    """This build, volume or peer does not support the call."""

    kind = ErrorKind.UNSUPPORTED


class NotFound(KVStoreError, KeyError):
    """The named object, such as a node, namespace or session, does not exist."""

    kind = ErrorKind.NOT_FOUND
    __str__ = KVStoreError.__str__  # KeyError would print the repr


class Conflict(KVStoreError):
    """The object exists already, with other properties."""

    kind = ErrorKind.CONFLICT


class PermissionDenied(KVStoreError):
    """The role or tenant of the caller does not permit the call."""

    kind = ErrorKind.PERMISSION_DENIED


class Unauthenticated(KVStoreError):
    """The caller showed no token, or one that the server does not know."""

    kind = ErrorKind.UNAUTHENTICATED


class LeaseLost(KVStoreError):
    """The session, lease or prepared slot of the caller has expired. Begin again."""

    kind = ErrorKind.LEASE_LOST


class CapacityExceeded(KVStoreError):
    """There is no space, or a limit is reached. Retry later."""

    kind = ErrorKind.CAPACITY_EXCEEDED
    retryable = True


class Unavailable(KVStoreError):
    """The server or peer cannot be reached now. Retry later."""

    kind = ErrorKind.UNAVAILABLE
    retryable = True


class DeadlineExceeded(KVStoreError, TimeoutError):
    """No answer arrived within the deadline."""

    kind = ErrorKind.DEADLINE_EXCEEDED
    retryable = True


class CorruptBlock(KVStoreError):
    """The bytes of a block do not match their checksum. Treat the block as a miss."""

    kind = ErrorKind.CORRUPT_BLOCK


class Internal(KVStoreError):
    """The store failed in an unexpected way: a bug. Report it with the log of the server."""

    kind = ErrorKind.INTERNAL


def install_command(extra: str) -> str:
    """Return the pip command that adds an optional extra of this package, such as ``admin``, for messages.

    pip reads the extras of an installed package from its metadata and asks an index only for the libraries, so the command
    works although this package is on no index. It names the running interpreter: pip of another environment would search the
    index for the package.
    """
    return f"{shlex.quote(sys.executable)} -m pip install 'kvstore-dualpath[{extra}]'"
