"""Sessions with nodes of other hosts: a lost one is replaced, and its report delays no other call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
from client_fakes import FakeNode

from kvclient import KVClient
from kvclient.nodes.remote_sessions import RemoteSession
from kvclient.results import NodeRef
from kvproto.v1 import node_pb2
from kvstore.core.errors import LeaseLost
from kvstore.core.types import NodeId
from support.client_parts import context_of
from support.wait import wait_until

WAIT_S = 10.0


def test_session_lost_in_callback_of_its_own_call(
    near: FakeNode, make_node: Callable[..., FakeNode], make_client: Callable[..., KVClient]
) -> None:
    """gRPC's thread of a channel runs the callback, and must still end the other calls of that channel."""
    far = make_node("far")
    sessions = context_of(make_client(near)).remote_sessions
    node = NodeRef(NodeId("far"), far.info.control_address, far.data_address)
    session, released = sessions.session(node, WAIT_S), threading.Event()

    def hang(_request: object, _context: object) -> Iterator[node_pb2.LoadProgress]:
        released.wait(WAIT_S)
        yield from ()

    far.load_script = hang
    far.fail["ReadAhead"] = LeaseLost("the session has ended")
    reader = threading.Thread(target=_read, args=(session,))
    reader.start()
    far.wait_called("Load")
    told = threading.Event()
    call = session.stub.ReadAhead.future(node_pb2.LoadRequest(), timeout=WAIT_S)
    call.add_done_callback(lambda _: (sessions.lost(session, LeaseLost("ended")), told.set()))
    try:
        assert told.wait(WAIT_S), "the thread that serves the channel goes on"
        assert not sessions.holds(session)
        assert sessions.session(node, WAIT_S) is not session
        wait_until(lambda: not reader.is_alive(), "the lost session's calls have ended")
    finally:
        released.set()


def _read(session: RemoteSession) -> None:
    with suppress(grpc.RpcError):
        list(session.stub.Load(node_pb2.LoadRequest(), timeout=60))
