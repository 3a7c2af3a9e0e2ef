"""Hints: nodes hear what happens next in a session of an application.

    client.hints.keep("chat-7", keys, keep_for_s=300.0, next_turn_s=20.0)   # after a turn
    client.hints.end("chat-7", keys)                                        # after the last one

A hint changes no result, only which blocks are evicted first. It goes to the node of this host, and to at most
``ClientOptions.hint_nodes`` others that the last lookup of the session's chain named. It is sent in the background; a lost one is
counted. There is no hint for a fork: it is a ``keep`` of the other session, and blocks that both share are protected until both
have ended.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from kvclient.call.arguments import check_process
from kvclient.call.request_hint import DEFAULT_KEEP_S, RequestHint
from kvclient.nodes.local_session import is_session_lost
from kvproto.v1 import node_pb2
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import InvalidArgument, KVStoreError, LeaseLost, Unavailable
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.tracing import inject
from kvstore.rpc.client import ChannelBroken, call_cancellable, start_call
from kvstore.rpc.codec import keys_from_packed
from kvstore.rpc.errors import FailedCall, from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvclient.call.context import ClientContext
    from kvclient.results import NodeRef
    from kvstore.core.types import BlockKey

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Hints that wait for the answer of the node of this host, and hints that wait until they are sent to other nodes."""


class HintSender:
    """Hints of one client about sessions of its application. Thread-safe; nothing waits."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._made_in = os.getpid()
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._under_way = threading.BoundedSemaphore(MAX_WAITING)
        """Bounds the calls to the node of this host."""

    def keep(
        self,
        session: str,
        keys: Sequence[BlockKey] | bytes,
        *,
        keep_for_s: float = DEFAULT_KEEP_S,
        next_turn_s: float | None = None,
        priority: int = 0,
    ) -> bool:
        """Protect the blocks of a session until its next turn: ``client.hints.keep("chat-7", keys, next_turn_s=20.0)``.

        Args:
            session: its name, of 1 to 64 bytes, unique in this namespace.
            keys: its chain, from the head.
            keep_for_s: how long its blocks are protected, at most one hour.
            next_turn_s: seconds until its next turn is expected, at most one hour: sessions that are expected sooner displace
                others of the tenant, and blocks on a volume are read into DRAM in time. None: unknown.
            priority: 0 to 9: sessions of a higher one displace those of a lower one of the same tenant.

        Returns:
            Whether the hint was sent to the node of this host. Its effect shows in the node's metrics.

        Raises:
            InvalidArgument: a value of another type or out of its range, or no keys.
        """
        if not keys:
            raise InvalidArgument("keep requires the keys of the session's chain", session=session)
        hint = RequestHint(session, keep_for_s, next_turn_s, priority)
        request = node_pb2.HintRequest(
            session=session,
            kind=node_pb2.HINT_KIND_KEEP,
            keep_ms=round(hint.keep_for_s * 1000),
            next_turn_ms=0 if hint.next_turn_s is None else max(1, round(hint.next_turn_s * 1000)),
            priority=hint.priority,
        )
        return self._send(request, keys)

    def end(self, session: str, keys: Sequence[BlockKey] | bytes = b"") -> bool:
        """Say that a session has ended: its blocks are evicted first.

            client.hints.end("chat-7", keys)

        Args:
            session: its name.
            keys: its chain, from the head; empty: the blocks that it protects.

        Returns:
            Whether the hint was sent to the node of this host.

        Raises:
            InvalidArgument: a value of another type or out of its range.
        """
        RequestHint(session)
        return self._send(node_pb2.HintRequest(session=session, kind=node_pb2.HINT_KIND_END), keys)

    def give(self, hint: RequestHint, keys: Sequence[BlockKey] | bytes) -> bool:
        """Give the hint of a request that has ended: ``client.hints.give(RequestHint("chat-7", end=True), keys)``.

        Args:
            hint: what happens next.
            keys: the session's chain, from the head; a hint without keys that ends no session is not sent.

        Returns:
            Whether the hint was sent to the node of this host.

        Raises:
            InvalidArgument: too many keys.
        """
        if hint.end:
            return self.end(hint.session, keys)
        if not keys:
            return False
        return self.keep(hint.session, keys, keep_for_s=hint.keep_for_s, next_turn_s=hint.next_turn_s, priority=hint.priority)

    def _send(self, request: node_pb2.HintRequest, keys: Sequence[BlockKey] | bytes) -> bool:
        check_process(self._made_in)
        context = self._context
        request.keys = ChainSlice(context.namespace, keys).packed
        counters, incidents = context.incidents.counters, context.incidents
        self._send_to_others(request)
        session = context.local.session() if context.local is not None else None
        if session is None:
            counters.add(client_metrics.HINTS_NOT_SENT)
            return False
        if not self._under_way.acquire(blocking=False):
            incidents.report(client_metrics.HINTS_NOT_SENT, "hint not sent: too many are waiting for the node's answer")
            return False
        request.session_id = session.session_id
        try:
            timeout_s = context.options.lookup_deadline_s
            call = start_call(session.stub.Hint.future, request, timeout=timeout_s, metadata=inject())
        except (ValueError, ChannelBroken) as error:
            self._under_way.release()
            counters.add(client_metrics.HINTS_NOT_SENT)
            if isinstance(error, ChannelBroken) and context.local is not None:
                context.local.lost(session, error)
            return False

        def ended(done: grpc.Future[Any]) -> None:
            self._under_way.release()
            failed = None if done.cancelled() else done.exception()
            if isinstance(failed, grpc.RpcError):
                incidents.report(client_metrics.HINTS_FAILED, "hint not applied", from_rpc_error(cast("FailedCall", failed)))

        counters.add(client_metrics.HINTS)
        call.add_done_callback(ended)
        return True

    # ---- other nodes with blocks of the session
    def _send_to_others(self, request: node_pb2.HintRequest) -> None:
        """Queue a hint for the nodes that the last lookup of the chain named."""
        context = self._context
        if not context.options.hint_nodes:
            return
        if not self._waiting.acquire(blocking=False):
            context.incidents.report(client_metrics.HINTS_TO_OTHERS_SKIPPED, "hint not sent to other nodes: too many are waiting")
            return
        copy = node_pb2.HintRequest()
        copy.CopyFrom(request)
        try:
            context.hint_threads.submit(self._work, copy)
        except Unavailable:  # the client is closed
            self._waiting.release()

    def _work(self, request: node_pb2.HintRequest) -> None:
        context = self._context
        try:
            for node in context.chain_nodes.of(request.session, keys_from_packed(request.keys)):
                if context.local is not None and node.node_id == context.local.node_id:
                    continue
                try:
                    self._tell(node, request)
                except KVStoreError as error:
                    context.incidents.report(client_metrics.HINTS_FAILED, "hint not applied", error)
            if request.kind == node_pb2.HINT_KIND_END:
                context.chain_nodes.forget(request.session)
        except Exception:  # noqa: BLE001  # the edge of the thread: nothing reads the result of its work
            context.incidents.counters.add(client_metrics.BUGS)
            _log.exception("hint not sent to other nodes: unexpected failure")
        finally:
            self._waiting.release()

    def _tell(self, node: NodeRef, request: node_pb2.HintRequest) -> None:
        """Send a hint, at most twice: nodes end sessions of other hosts that are idle."""
        context = self._context
        end_s = context.clock.now_s() + context.options.lookup_deadline_s
        try:
            self._tell_once(node, request, end_s)
        except LeaseLost:
            self._tell_once(node, request, end_s)
        context.incidents.counters.add(client_metrics.HINTS_TO_OTHERS)

    def _tell_once(self, node: NodeRef, request: node_pb2.HintRequest, end_s: float) -> None:
        context = self._context
        session = context.remote_sessions.session(node, end_s - context.clock.now_s())
        request.session_id = session.session_id
        try:
            call_cancellable(session.stub.Hint, request, end_s - context.clock.now_s(), session.server.waiting)
        except KVStoreError as error:
            if is_session_lost(error):
                context.remote_sessions.lost(session, error)
            raise
