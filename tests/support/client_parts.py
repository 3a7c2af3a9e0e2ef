"""The parts of a client that a test breaks or watches. No other module of the tests reads them."""

from __future__ import annotations

from kvclient import KVClient
from kvclient.call.context import ClientContext
from kvclient.nodes.local_session import Session


def context_of(client: KVClient) -> ClientContext:
    """Return the parts of a client."""
    return client.context


def session_of(client: KVClient) -> Session:
    """Return the session with the node of this host. The test fails if none is open."""
    local = context_of(client).local
    assert local is not None
    session = local.session()
    assert session is not None
    return session
