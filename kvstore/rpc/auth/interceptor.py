"""Who may call what over gRPC, where a server has a file of tokens; without one nothing of this is in the way.

One mapping says what each method takes (``NEEDS``), another what each role has (``MAY``); a method that is in no mapping is
refused to everybody. A token comes as ``authorization: Bearer TOKEN`` in a call's metadata, over unix sockets too.

``tenant NAME`` is confined: its calls reach only namespaces whose spec names that tenant. What a method speaks of is known to its
handler alone, so handlers ask (``confine``, ``tenant``). Everybody else who may call them reaches all namespaces.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio

from kvstore.core.errors import KVStoreError, PermissionDenied, Unauthenticated
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.auth.tokens import Caller, Role, Tokens, Watched
from kvstore.rpc.errors import abort_arguments
from kvstore.rpc.tls_connections import TlsConnections

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

AUTHORIZATION: Final = "authorization"
NODE_ID: Final = "kv-node-id"
"""Metadata key by which a node says who it is with its calls. Anybody can send it: it only explains refusals."""
_SCHEME: Final = "bearer "


class Need(Enum):
    """What a method takes."""

    NOTHING = auto()
    """Probes."""
    LOOK = auto()
    """Sees what the store is and does, of all namespaces."""
    CHANGE = auto()
    """Changes what others rely on."""
    DATA = auto()
    """What an engine does in its namespaces."""
    SCHEDULE = auto()
    """Speaks for engines, or places requests."""
    SERVE = auto()
    """What nodes tell the metadata server, and ask of one another."""


MAY: Final = {
    Role.READ: frozenset({Need.LOOK}),
    Role.OPERATOR: frozenset(Need),
    Role.NODE: frozenset({Need.SERVE, Need.DATA, Need.LOOK}),
    Role.ENGINE: frozenset({Need.DATA, Need.SCHEDULE}),
    Role.TENANT: frozenset({Need.DATA}),
}
_METADATA: Final = {
    "RegisterNode": Need.SERVE,
    "Heartbeat": Need.SERVE,
    "UnregisterNode": Need.SERVE,
    "Publish": Need.SERVE,
    "CompareDigests": Need.SERVE,
    "RepairRange": Need.SERVE,
    "LocateBlocks": Need.SERVE,
    "RegisterNamespace": Need.DATA,
    "ListNamespaces": Need.DATA,
    "ListNodes": Need.DATA,
    "Lookup": Need.DATA,
    "PlanLoad": Need.DATA,
    "ReportLoads": Need.DATA,
    "ReplanLoad": Need.DATA,
    "WatchBlocks": Need.DATA,
    "ReportEngines": Need.SCHEDULE,
    "AssignRequest": Need.SCHEDULE,
    "CancelRequest": Need.SCHEDULE,
    "GetStats": Need.LOOK,
    "DrainNode": Need.CHANGE,
    "UndrainNode": Need.CHANGE,
    "RemoveNode": Need.CHANGE,
}
_NODE: Final = {
    "GetNode": Need.DATA,
    "IssueTicket": Need.DATA,
    "OpenSession": Need.DATA,
    "Prepare": Need.DATA,
    "Complete": Need.DATA,
    "Abort": Need.DATA,
    "Load": Need.DATA,
    "Locate": Need.DATA,
    "AwaitPrompt": Need.DATA,
    "AbandonPrompt": Need.DATA,
    "Release": Need.DATA,
    "Flush": Need.DATA,
    "PullBlocks": Need.SERVE,
    "GetNodeStats": Need.LOOK,
    "Evict": Need.CHANGE,
}
_METADATA_ADMIN: Final = {
    "DescribeServer": Need.LOOK,
    "DescribeNamespaces": Need.LOOK,
    "DescribeBlocks": Need.LOOK,
    "DescribePlanning": Need.LOOK,
    "DescribeTenants": Need.LOOK,
    "ListNamespaceRules": Need.LOOK,
    "SetPathPolicy": Need.CHANGE,
    "SetTenantQuota": Need.CHANGE,
    "SetNamespaceRule": Need.CHANGE,
    "RebuildIndex": Need.CHANGE,
}
_NODE_ADMIN: Final = {
    "DescribeNode": Need.LOOK,
    "DescribeUsage": Need.LOOK,
    "ListSlowLoads": Need.LOOK,
    "DescribeCheck": Need.LOOK,
    "CheckVolume": Need.CHANGE,
    "CancelCheck": Need.CHANGE,
    "EvictBlocks": Need.CHANGE,
    "InvalidateNamespace": Need.CHANGE,
    "SetTrafficCap": Need.CHANGE,
    "CompareIndex": Need.CHANGE,
}
_OTHERS: Final = {
    "/grpc.health.v1.Health/Check": Need.NOTHING,
    "/grpc.health.v1.Health/Watch": Need.LOOK,  # without end, and each is one of the calls that a server has at once
    "/grpc.health.v1.Health/List": Need.NOTHING,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Need.LOOK,
}
NEEDS: Final = {
    **{f"/kvstore.v1.Metadata/{name}": need for name, need in _METADATA.items()},
    **{f"/kvstore.v1.Node/{name}": need for name, need in _NODE.items()},
    **{f"/kvstore.v1.MetadataAdmin/{name}": need for name, need in _METADATA_ADMIN.items()},
    **{f"/kvstore.v1.NodeAdmin/{name}": need for name, need in _NODE_ADMIN.items()},
    **_OTHERS,
}
ALSO_LOOKS: Final = frozenset({"ListNamespaces", "ListNodes", "GetNode"})
"""Methods of engines by which people look, too: all of it is shown elsewhere to who may look."""

_caller: ContextVar[Caller | None] = ContextVar("kvstore_caller", default=None)
"""Who made the call that this task handles; None: the server asks nobody."""


def tenant() -> str | None:
    """The tenant that this call is confined to; None: to none."""
    caller = _caller.get()
    return caller.name if caller is not None and caller.role is Role.TENANT else None


def confine(of: str) -> None:
    """Refuses what is not the caller's.

    Args:
        of: the tenant of the namespace that the call speaks of.

    Raises:
        PermissionDenied: the caller is another tenant.
    """
    mine = tenant()
    if mine is not None and mine != of:
        raise PermissionDenied("this namespace is not of your tenant", tenant=mine)


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A refused call that claims to come from a node. Nothing of it is proven but ``host``.

    Args:
        node_id: whom the caller claims to be.
        host: the address that the call came from, without its port.
        why: what is wrong with its token.
    """

    node_id: str
    host: str
    why: str


class Doorkeeper(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Lets in whose token has what a method takes. The first of a server's interceptors.

    Args:
        tokens: who may do what.
        count: counts an event: ``rpc_errors_<kind>_total``, as for any other refusal.
        on_refused_node: told of refused calls that claim to come from a node; None: nobody is.
        connections: told of callers at a TLS port; None: there is no such port.
    """

    def __init__(
        self,
        tokens: Watched[Tokens],
        count: Callable[[str], None],
        on_refused_node: Callable[[RefusedNode], None] | None = None,
        connections: TlsConnections | None = None,
    ) -> None:
        self._connections = connections
        self._tokens = tokens
        self._count = count
        self._on_refused_node = on_refused_node

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401  # grpc's handler tuple is untyped
        try:
            # the handler runs in this very task, and each call has a task and with it a context of its own
            _caller.set(self.admit(handler_call_details.method, handler_call_details.invocation_metadata))
        except KVStoreError as refused:
            handler = await continuation(handler_call_details)
            return handler if handler is None else self._refusing(handler, refused, handler_call_details)
        return await continuation(handler_call_details)

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller | None:
        """Who calls; None: nobody in particular, for what takes nothing.

        Raises:
            Unauthenticated: no token, or a token that is not known.
            PermissionDenied: the token's role does not suffice.
        """
        need = NEEDS.get(method)
        if need is Need.NOTHING:
            return None
        token = _token(metadata)
        caller = self._tokens.get().caller(token)
        if caller is None:
            raise Unauthenticated("the token is not known to this server" if token else "a token is required, and none was given")
        if need is None or need not in MAY[caller.role]:
            name = method.rpartition("/")[2]
            if need is Need.DATA and caller.role is Role.READ and name in ALSO_LOOKS:
                return caller
            raise too_low(_in_words(name), [role for role in Role if need in MAY[role]], caller)
        return caller

    def _refusing(self, handler: Any, error: KVStoreError, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401  # as above
        """A handler of the same kind as the method's that refuses every call."""
        self._count(f"rpc_errors_{error.kind.value}_total")

        async def abort(context: Any) -> NoReturn:  # noqa: ANN401  # as above
            if self._connections is not None:
                self._connections.called(context)
            peer = context.peer()
            _limited.warning("refused a call: %s (method=%s, peer=%s)", error.message, call.method.rpartition("/")[2], peer)
            claimed = _first(call.invocation_metadata, NODE_ID)
            if claimed and len(claimed) <= MAX_NAME_BYTES and self._on_refused_node is not None:
                self._on_refused_node(RefusedNode(claimed, host_of_peer(peer), error.message))
            await context.abort(*abort_arguments(error))
            raise AssertionError("abort always raises")

        async def once(_request: object, context: object) -> object:
            await abort(context)

        async def streamed(_request: object, context: object) -> AsyncIterator[object]:
            await abort(context)
            yield None  # type: ignore[unreachable]  # makes it a generator

        # no deserialiser: what a stranger sends may be long, and costs the event loop nothing where nobody reads it
        codec = {"response_serializer": handler.response_serializer}
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(once, **codec)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(once, **codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(streamed, **codec)
        return grpc.stream_stream_rpc_method_handler(streamed, **codec)


def too_low(what: str, roles: Sequence[Role], caller: Caller) -> PermissionDenied:
    """The refusal of a caller whose role does not suffice, in the same words over gRPC and REST.

    Args:
        what: what was asked for.
        roles: the roles that may; none: nobody may.
        caller: who asked.
    """
    names = " or ".join(role.value for role in sorted(roles, key=lambda role: role is Role.OPERATOR))
    requires = f"requires the role {names}" if roles else "is open to no role"
    return PermissionDenied(f"permission denied: '{what}' {requires}; this token is '{caller.name}' ({caller.role.value})")


def host_of_peer(peer: str) -> str:
    """The host of a caller as gRPC names it, without its port: ``127.0.0.1`` of ``ipv4:127.0.0.1:4711``; empty: no host."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest.rpartition(":")[0]).strip("[]")


def _in_words(method: str) -> str:
    """``drain node`` of ``DrainNode``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", method).lower()


def _first(metadata: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str:
    """The value of a key of a call's metadata; empty: it has none."""
    return next((value for key, value in metadata or () if key == wanted and isinstance(value, str)), "")


def _token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token of a call; empty: none."""
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""
