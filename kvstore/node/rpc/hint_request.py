"""Checks of hints that arrive over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.v1 import node_pb2
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.core.limits import MAX_HINT_PRIORITY, MAX_KEEP_MS, MAX_TRANSFER_ID_BYTES
from kvstore.core.types import BlockKey
from kvstore.node.hints.ledger import SessionHint
from kvstore.node.hints.session_hints import HintResult, SessionHints
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.rpc.codec import keys_from_packed


def apply_hint(
    hints: SessionHints,
    namespace: NodeNamespace,
    request: node_pb2.HintRequest,
    *,
    read_ahead: bool,
) -> node_pb2.HintResponse:
    """Check a hint, and apply it.

    Args:
        hints: of this node.
        namespace: of the session.
        request: the hint.
        read_ahead: whether the session's engine is on this host, so that blocks are read into DRAM before its next turn.

    Raises:
        InvalidArgument: a malformed session or keys, or a number out of its range.
        Unsupported: an unknown kind.
        CapacityExceeded: too many sessions have hints.
    """
    _check(request)
    return _apply(hints, namespace, request, keys_from_packed(request.keys), read_ahead=read_ahead)


def apply_to_known(
    hints: SessionHints, namespace: NodeNamespace | None, request: node_pb2.HintRequest
) -> node_pb2.HintResponse | None:
    """Check a hint, and apply it to the blocks that its session protects here. None: this node does not know the session.

    Raises:
        InvalidArgument: see ``apply_hint``.
        Unsupported: see ``apply_hint``.
    """
    _check(request)
    keys = () if namespace is None else hints.protected_keys(namespace, request.session)
    return _apply(hints, namespace, request, keys, read_ahead=True) if namespace is not None and keys else None


def _apply(
    hints: SessionHints, namespace: NodeNamespace, request: node_pb2.HintRequest, chain: Sequence[BlockKey], *, read_ahead: bool
) -> node_pb2.HintResponse:
    if request.kind == node_pb2.HINT_KIND_END:
        result: HintResult = hints.end(namespace, request.session, chain)
    else:
        next_turn_s = request.next_turn_ms / 1000 or None
        hint = SessionHint(request.session, chain, request.keep_ms / 1000, next_turn_s, request.priority, read_ahead)
        result = hints.keep(namespace, hint)
    return node_pb2.HintResponse(protected_blocks=result.protected, dropped_blocks=result.dropped)


def _check(request: node_pb2.HintRequest) -> None:
    """Check the fields of a hint, without its keys.

    Raises:
        InvalidArgument: a malformed session, or a number out of its range.
        Unsupported: an unknown kind.
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
