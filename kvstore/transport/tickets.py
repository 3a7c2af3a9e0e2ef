"""Tickets: what a data-plane connection shows before it may ask for bytes.

A node signs them and the same node verifies them, so the secret never leaves it and its own monotonic clock can date them.
A ticket is good for one namespace, or for all (a peer node's), until it expires or the node starts again (a new boot id).
Opaque to everybody else::

    <u8 version, u8 flags, 6 zero bytes, 16s boot id, 16s namespace, u64 expiry in µs> + HMAC-SHA256 of these      80 bytes
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
    """What a verified ticket allows. ``namespace`` None: all of them."""

    namespace: NamespaceId | None
    expires_at_s: float


class TicketAuthority:
    """Issues and verifies the tickets of one boot of one node. Thread-safe: it holds no state.

    Args:
        secret: at least 16 random bytes, known to this node alone.
        boot_id: this boot's; tickets of another are refused.
        clock: dates tickets.
    """

    def __init__(self, secret: bytes, boot_id: BootId, clock: Clock) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidArgument("a ticket secret takes at least 16 random bytes", bytes=len(secret))
        if len(boot_id) != KEY_BYTES:
            raise InvalidArgument("a boot id takes 16 bytes", bytes=len(boot_id))
        self._secret = secret
        self._boot_id = boot_id
        self._clock = clock

    def issue(self, namespace: NamespaceId | None, valid_for_s: float) -> bytes:
        """A ticket for one namespace, or (None) for all, that expires ``valid_for_s`` from now."""
        if namespace is not None and len(namespace) != KEY_BYTES:
            raise InvalidArgument("a namespace id takes 16 bytes", bytes=len(namespace))
        expiry_us = int((self._clock.now_s() + valid_for_s) * 1e6)
        flags = _ALL_NAMESPACES if namespace is None else 0
        body = _BODY.pack(_VERSION, flags, self._boot_id, bytes(KEY_BYTES) if namespace is None else namespace, expiry_us)
        return body + self._sign(body)

    def verify(self, ticket: bytes) -> TicketScope:
        """What a ticket allows.

        Raises:
            Unauthenticated: not signed by this boot of this node, or expired. The message does not say which byte was wrong.
        """
        body, signature = ticket[: _BODY.size], ticket[_BODY.size :]
        if len(ticket) != _BODY.size + _DIGEST_BYTES or not hmac.compare_digest(self._sign(body), signature):
            raise Unauthenticated("the ticket is not one of this node's")
        version, flags, boot_id, namespace, expiry_us = _BODY.unpack(body)
        if version != _VERSION or boot_id != self._boot_id:
            raise Unauthenticated("the ticket is of another boot of this node: ask it for another")
        scope = TicketScope(None if flags & _ALL_NAMESPACES else NamespaceId(namespace), expiry_us / 1e6)
        if self._clock.now_s() >= scope.expires_at_s:
            raise Unauthenticated("the ticket has expired: ask the node for another")
        return scope

    def check(self, scope: TicketScope, namespace: NamespaceId) -> None:
        """Whether the holder of a verified ticket may touch a namespace now.

        Raises:
            Unauthenticated: the ticket has expired meanwhile.
            PermissionDenied: it is for another namespace.
        """
        if self._clock.now_s() >= scope.expires_at_s:
            raise Unauthenticated("the ticket has expired: ask the node for another")
        if scope.namespace is not None and scope.namespace != namespace:
            raise PermissionDenied("the ticket is for another namespace")

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")
