"""Checks of hints that arrive over gRPC."""

from __future__ import annotations

from kvproto.v1 import node_pb2
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.core.limits import MAX_HINT_PRIORITY, MAX_KEEP_MS, MAX_TRANSFER_ID_BYTES
from kvstore.node.hints.ledger import SessionHint
from kvstore.node.hints.session_hints import HintResult, SessionHints
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.rpc.codec import keys_from_packed


def apply_hint(hints: SessionHints, namespace: NodeNamespace, request: node_pb2.HintRequest) -> node_pb2.HintResponse:
    """Check a hint, and apply it.

    Raises:
        InvalidArgument: a malformed session or keys, or a number out of its range.
        Unsupported: an unknown kind.
        CapacityExceeded: too many sessions have hints.
    """
    name = request.session
    if not 0 < len(name.encode()) <= MAX_TRANSFER_ID_BYTES or not name.isprintable():
        raise InvalidArgument("session must be printable text of 1 to 64 bytes", characters=len(name))
    if request.kind not in (node_pb2.HINT_KIND_KEEP, node_pb2.HINT_KIND_END):
        raise Unsupported("unknown kind of hint", kind=int(request.kind))
    for field, value, limit in (
        ("keep_ms", request.keep_ms, MAX_KEEP_MS),
        ("next_turn_ms", request.next_turn_ms, MAX_KEEP_MS),
        ("priority", request.priority, MAX_HINT_PRIORITY),
    ):
        if value > limit:
            raise InvalidArgument(f"{field} is out of range", got=value, limit=limit)
    keys = keys_from_packed(request.keys)
    if request.kind == node_pb2.HINT_KIND_END:
        result: HintResult = hints.end(namespace, name, keys)
    else:
        next_turn_s = request.next_turn_ms / 1000 or None
        result = hints.keep(namespace, SessionHint(name, keys, request.keep_ms / 1000, next_turn_s, request.priority))
    return node_pb2.HintResponse(protected_blocks=result.protected, dropped_blocks=result.dropped)
