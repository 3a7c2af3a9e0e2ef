"""Tickets are valid only if this boot of this node signed them, before they expire, and for their namespace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvstore.core.limits import MAX_TICKET_BYTES
from kvstore.core.types import BootId, NamespaceId
from kvstore.transport.tickets import TicketAuthority

OURS, OTHER = NamespaceId(b"n" * 16), NamespaceId(b"m" * 16)
CLOCK = ManualClock()
AUTHORITY = TicketAuthority(b"secret" * 8, BootId(b"b" * 16), CLOCK)


def test_ticket_allows_only_its_namespace() -> None:
    ticket = AUTHORITY.issue(OURS, 10)
    assert len(ticket) <= MAX_TICKET_BYTES
    scope = AUTHORITY.verify(ticket)
    AUTHORITY.check(scope, OURS)
    with pytest.raises(PermissionDenied):
        AUTHORITY.check(scope, OTHER)


def test_ticket_of_peer_allows_all_namespaces() -> None:
    scope = AUTHORITY.verify(AUTHORITY.issue(None, 10))
    AUTHORITY.check(scope, OURS)
    AUTHORITY.check(scope, OTHER)


def test_ticket_expired_is_refused() -> None:
    clock = ManualClock()
    authority = TicketAuthority(b"secret" * 8, BootId(b"b" * 16), clock)
    ticket = authority.issue(OURS, 10)
    scope = authority.verify(ticket)
    clock.advance(9.9)
    authority.check(scope, OURS)
    clock.advance(0.2)
    with pytest.raises(Unauthenticated):
        authority.check(scope, OURS)
    with pytest.raises(Unauthenticated):
        authority.verify(ticket)


@pytest.mark.parametrize(
    "other", [TicketAuthority(b"secret" * 8, BootId(b"c" * 16), CLOCK), TicketAuthority(b"guess!" * 8, BootId(b"b" * 16), CLOCK)]
)
def test_ticket_of_other_boot_or_node_is_refused(other: TicketAuthority) -> None:
    with pytest.raises(Unauthenticated):
        AUTHORITY.verify(other.issue(OURS, 10))


@given(st.integers(0, 79), st.integers(1, 255))
def test_ticket_changed_byte_is_refused(position: int, flip: int) -> None:
    ticket = bytearray(AUTHORITY.issue(OURS, 10))
    ticket[position] ^= flip
    with pytest.raises(Unauthenticated):
        AUTHORITY.verify(bytes(ticket))


@given(st.binary(max_size=200))
def test_ticket_random_bytes_are_refused(ticket: bytes) -> None:
    with pytest.raises(Unauthenticated):
        AUTHORITY.verify(ticket)


def test_ticket_short_secret_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        TicketAuthority(b"short", BootId(b"b" * 16), CLOCK)
