"""Tickets: a client shows a ticket on each data-plane connection before it may request blocks.

A node signs its tickets and verifies them itself, so the secret never leaves the node and its own monotonic clock dates them. A
ticket is valid for one namespace, or for all (tickets of peer nodes), until it expires or the node restarts with a new boot id.
Other processes treat tickets as opaque bytes::

    <u8 version, u8 flags, 6 zero bytes, 16s boot id, 16s namespace, u64 expiry in µs> + HMAC-SHA256 of the fields before
    80 bytes
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvstore.core.types import KEY_BYTES, BootId, NamespaceId

_BODY = struct.Struct("<BB6x16s16sQ")
_VERSION = 1
_ALL_NAMESPACES = 1
_DIGEST_BYTES = 32
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class TicketScope:
    """Permissions of a verified ticket. ``namespace`` None: all namespaces."""

    namespace: NamespaceId | None
    expires_at_s: float


class TicketAuthority:
    """Issues and verifies the tickets of one boot of one node. Thread-safe, because nothing in it changes.

    Args:
        secret: at least 16 random bytes, known only to this node.
        boot_id: id of this boot; tickets of other boots are refused.
        clock: dates tickets.
    """

    def __init__(self, secret: bytes, boot_id: BootId, clock: Clock) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidArgument("the ticket secret must have at least 16 random bytes", bytes=len(secret))
        if len(boot_id) != KEY_BYTES:
            raise InvalidArgument("a boot id must have 16 bytes", bytes=len(boot_id))
        self._secret = secret
        self._boot_id = boot_id
        self._clock = clock

    def issue(self, namespace: NamespaceId | None, valid_for_s: float) -> bytes:
        """Return a ticket that expires in ``valid_for_s``, for one namespace or (None) for all."""
        if namespace is not None and len(namespace) != KEY_BYTES:
            raise InvalidArgument("a namespace id must have 16 bytes", bytes=len(namespace))
        expiry_us = int((self._clock.now_s() + valid_for_s) * 1e6)
        flags = _ALL_NAMESPACES if namespace is None else 0
        body = _BODY.pack(_VERSION, flags, self._boot_id, bytes(KEY_BYTES) if namespace is None else namespace, expiry_us)
        return body + self._sign(body)

    def verify(self, ticket: bytes) -> TicketScope:
        """Verify a ticket; return its permissions.

        Raises:
            Unauthenticated: the ticket was not signed by this boot of this node, or has expired.
        """
        body, signature = ticket[: _BODY.size], ticket[_BODY.size :]
        if len(ticket) != _BODY.size + _DIGEST_BYTES or not hmac.compare_digest(self._sign(body), signature):
            raise Unauthenticated("the ticket was not issued by this node")
        version, flags, boot_id, namespace, expiry_us = _BODY.unpack(body)
        if version != _VERSION or boot_id != self._boot_id:
            raise Unauthenticated("the ticket is from another boot of this node; request a new one")
        scope = TicketScope(None if flags & _ALL_NAMESPACES else NamespaceId(namespace), expiry_us / 1e6)
        if self._clock.now_s() >= scope.expires_at_s:
            raise Unauthenticated("the ticket has expired; request a new one from the node")
        return scope

    def check(self, scope: TicketScope, namespace: NamespaceId) -> None:
        """Check that the holder of a verified ticket may access a namespace now.

        Raises:
            Unauthenticated: the ticket has expired since it was verified.
            PermissionDenied: the ticket is for another namespace.
        """
        if self._clock.now_s() >= scope.expires_at_s:
            raise Unauthenticated("the ticket has expired; request a new one from the node")
        if scope.namespace is not None and scope.namespace != namespace:
            raise PermissionDenied("the ticket is for another namespace")

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")
