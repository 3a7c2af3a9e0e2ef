"""Authorization of gRPC calls by bearer tokens. Without a token file there is none, and every call is allowed.

``REQUIRED`` maps methods to permissions, ``GRANTED`` maps roles to permissions. A method without an entry is denied to every
role. A call has its token in the metadata key ``authorization: Bearer TOKEN``, also over unix sockets.

The role ``tenant`` is confined: its calls reach only namespaces whose spec names that tenant. Only a method's handler knows the
namespace, so handlers call ``require_tenant``. Other roles reach all namespaces.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio

from kvstore.core.errors import CapacityExceeded, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.core.limits import MAX_NAME_BYTES, TENANT_SHARE
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metrics import Event
from kvstore.rpc.auth.tokens import AccessRole, Principal, TokenTable, WatchedFile, is_caller_name
from kvstore.rpc.errors import abort_arguments
from kvstore.rpc.tls_connections import TlsConnections

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

AUTHORIZATION: Final = "authorization"
NODE_ID: Final = "kv-node-id"
"""Metadata key with the id of the calling node. It is not authenticated and only explains refused calls."""
ON_BEHALF: Final = "kv-on-behalf-of"
"""Metadata key with the name of the person for whom an admin server calls. It is recorded beside the name of the call's token, if
that token has the role operator. It grants nothing."""
_SCHEME: Final = "bearer "


class Permission(Enum):
    """Permission that a method requires."""

    NOTHING = auto()
    """No permission: health probes."""
    LOOK = auto()
    """Read the state of the store, of all namespaces."""
    CHANGE = auto()
    """Change state that other users rely on."""
    DATA = auto()
    """Read and write blocks, as engines do."""
    SCHEDULE = auto()
    """Report engines and schedule requests."""
    SERVE = auto()
    """Publish, and talk to other nodes, as nodes do."""


GRANTED: Final = {
    AccessRole.READ: frozenset({Permission.LOOK}),
    AccessRole.OPERATOR: frozenset(Permission),
    AccessRole.NODE: frozenset({Permission.SERVE, Permission.DATA, Permission.LOOK}),
    AccessRole.ENGINE: frozenset({Permission.DATA, Permission.SCHEDULE}),
    AccessRole.TENANT: frozenset({Permission.DATA}),
}
_METADATA: Final = {
    "RegisterNode": Permission.SERVE,
    "Heartbeat": Permission.SERVE,
    "UnregisterNode": Permission.SERVE,
    "Publish": Permission.SERVE,
    "CompareDigests": Permission.SERVE,
    "RepairRanges": Permission.SERVE,
    "LocateBlocks": Permission.SERVE,
    "RegisterNamespace": Permission.DATA,
    "ListNamespaces": Permission.DATA,
    "ListNodes": Permission.DATA,
    "Lookup": Permission.DATA,
    "LookupHeads": Permission.DATA,
    "PlanLoad": Permission.DATA,
    "PriceLoad": Permission.DATA,
    "ReportLoads": Permission.DATA,
    "ReplanLoad": Permission.DATA,
    "WatchBlocks": Permission.DATA,
    "ReportEngines": Permission.SCHEDULE,
    "AssignRequest": Permission.SCHEDULE,
    "CancelRequest": Permission.SCHEDULE,
    "GetStats": Permission.LOOK,
    "DrainNode": Permission.CHANGE,
    "UndrainNode": Permission.CHANGE,
    "RemoveNode": Permission.CHANGE,
}
_NODE: Final = {
    "GetNode": Permission.DATA,
    "IssueTicket": Permission.DATA,
    "OpenSession": Permission.DATA,
    "Prepare": Permission.DATA,
    "Complete": Permission.DATA,
    "Abort": Permission.DATA,
    "Load": Permission.DATA,
    "ReadAhead": Permission.DATA,
    "Hint": Permission.DATA,
    "LoadResident": Permission.DATA,
    "Locate": Permission.DATA,
    "AwaitPrompt": Permission.DATA,
    "AbandonPrompt": Permission.DATA,
    "Release": Permission.DATA,
    "Flush": Permission.DATA,
    "PullBlocks": Permission.SERVE,
    "GetNodeStats": Permission.LOOK,
    "Evict": Permission.CHANGE,
}
_METADATA_ADMIN: Final = {
    "DescribeServer": Permission.LOOK,
    "DescribeNamespaces": Permission.LOOK,
    "DescribeBlocks": Permission.LOOK,
    "DescribePlanning": Permission.LOOK,
    "DescribeShards": Permission.LOOK,
    "DescribeTenants": Permission.LOOK,
    "ListClusterEvents": Permission.LOOK,
    "ListNamespaceRules": Permission.LOOK,
    "DescribeHistory": Permission.LOOK,
    "SetPathPolicy": Permission.CHANGE,
    "SetTenantQuota": Permission.CHANGE,
    "SetNamespaceRule": Permission.CHANGE,
    "RebuildIndex": Permission.CHANGE,
}
_NODE_ADMIN: Final = {
    "DescribeNode": Permission.LOOK,
    "DescribeUsage": Permission.LOOK,
    "ListSlowLoads": Permission.LOOK,
    "DescribeCheck": Permission.LOOK,
    "DescribeHistory": Permission.LOOK,
    "CheckVolume": Permission.CHANGE,
    "CancelCheck": Permission.CHANGE,
    "EvictBlocks": Permission.CHANGE,
    "InvalidateNamespace": Permission.CHANGE,
    "HintSession": Permission.CHANGE,
    "SetTrafficCap": Permission.CHANGE,
    "CompareIndex": Permission.CHANGE,
}
_OTHERS: Final = {
    "/grpc.health.v1.Health/Check": Permission.NOTHING,
    "/grpc.health.v1.Health/Watch": Permission.LOOK,  # each open stream occupies one of the server's concurrent calls
    "/grpc.health.v1.Health/List": Permission.NOTHING,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Permission.LOOK,
}
REQUIRED: Final = {
    **{f"/kvstore.v1.Metadata/{name}": need for name, need in _METADATA.items()},
    **{f"/kvstore.v1.Node/{name}": need for name, need in _NODE.items()},
    **{f"/kvstore.v1.MetadataAdmin/{name}": need for name, need in _METADATA_ADMIN.items()},
    **{f"/kvstore.v1.NodeAdmin/{name}": need for name, need in _NODE_ADMIN.items()},
    **_OTHERS,
}
READABLE_DATA_METHODS: Final = frozenset({"ListNamespaces", "ListNodes", "GetNode"})
"""DATA methods that the role ``read`` may call as well, because LOOK methods return the same information."""

_caller: ContextVar[Principal | None] = ContextVar("kvstore_caller", default=None)
"""Caller of the call that this task handles; None: the server does not use tokens."""

_on_behalf: ContextVar[str] = ContextVar("kvstore_on_behalf", default="")
"""Name of the person for whom the caller acts; empty: for none."""


def set_caller(caller: Principal | None, person: str = "") -> None:
    """Declare who makes the call of the current context.

    Args:
        caller: owner of the call's token; None: the server does not use tokens.
        person: for whom the caller acts; empty: for none.
    """
    _caller.set(caller)
    _on_behalf.set(person)


def tenant() -> str | None:
    """Tenant that the current call is confined to; None: it is not confined."""
    caller = _caller.get()
    return caller.name if caller is not None and caller.role is AccessRole.TENANT else None


def caller_name() -> str:
    """Who made the current call, for records; empty: the server does not use tokens.

    It is the name of the call's token, as ``"alice"``. If an admin server calls for a person, that person comes first, as
    ``"alice (via admin-1)"``: the server authenticated its token, and the admin server authenticated the person.
    """
    caller = _caller.get()
    if caller is None:
        return ""
    person = _on_behalf.get()
    return f"{person} (via {caller.name})" if person else caller.name


def require_tenant(owner: str) -> None:
    """Reject the current call if it is confined to another tenant.

    Args:
        owner: tenant of the namespace that the call uses.

    Raises:
        PermissionDenied: the caller is confined to another tenant.
    """
    mine = tenant()
    if mine is not None and mine != owner:
        raise PermissionDenied("this namespace belongs to another tenant", tenant=mine)


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A refused call that claims to come from a node. Only ``host`` is authenticated.

    Args:
        node_id: node id in the call's metadata.
        host: address of the caller, without port.
        why: why its token was refused.
    """

    node_id: str
    host: str
    why: str


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Admit calls whose token grants the permission that the method requires. Must be a server's first interceptor.

    Args:
        tokens: the token file.
        count: counts a refused call.
        on_refused_node: called with each refused call that claims to come from a node.
        connections: connections of a TLS port, to record the peers of refused calls.
    """

    def __init__(
        self,
        tokens: WatchedFile[TokenTable],
        count: Callable[[Event], None],
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
            # gRPC runs each call, its handler included, in one task with its own context
            caller = self.admit(handler_call_details.method, handler_call_details.invocation_metadata)
            set_caller(caller, _person(caller, handler_call_details.invocation_metadata))
        except KVStoreError as refused:
            handler = await continuation(handler_call_details)
            return handler if handler is None else self._refusing(handler, refused, handler_call_details)
        return await continuation(handler_call_details)

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Principal | None:
        """Check the token of a call.

        Returns:
            The caller; None for a method that requires no permission.

        Raises:
            Unauthenticated: the token is missing or unknown.
            PermissionDenied: the token's role does not grant the permission.
        """
        need = REQUIRED.get(method)
        if need is Permission.NOTHING:
            return None
        token = _token(metadata)
        caller = self._tokens.get().caller(token)
        if caller is None:
            raise Unauthenticated("the token is not known to this server" if token else "a token is required, and none was given")
        if need is None or need not in GRANTED[caller.role]:
            name = method.rpartition("/")[2]
            if need is Permission.DATA and caller.role is AccessRole.READ and name in READABLE_DATA_METHODS:
                return caller
            raise insufficient_role(_in_words(name), [role for role in AccessRole if need in GRANTED[role]], caller)
        return caller

    def _refusing(self, handler: Any, error: KVStoreError, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401  # as above
        """A handler of the same arity as ``handler`` that refuses every call."""
        self._count(common_metrics.RPC_ERRORS[error.kind.value])

        async def abort(context: Any) -> NoReturn:  # noqa: ANN401  # as above
            if self._connections is not None:
                self._connections.called(context)
            peer = context.peer()
            _limited.warning("call refused: %s (method=%s, peer=%s)", error.message, call.method.rpartition("/")[2], peer)
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

        # no deserializer: a refused request may be large, and must not cost time of the event loop
        codec = {"response_serializer": handler.response_serializer}
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(once, **codec)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(once, **codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(streamed, **codec)
        return grpc.stream_stream_rpc_method_handler(streamed, **codec)


def insufficient_role(what: str, roles: Sequence[AccessRole], caller: Principal) -> PermissionDenied:
    """The error for a caller whose role lacks a permission, over gRPC and REST.

    Args:
        what: the requested operation.
        roles: roles that have the permission.
        caller: the caller.
    """
    names = " or ".join(role.value for role in sorted(roles, key=lambda role: role is AccessRole.OPERATOR))
    requires = f"requires the role {names}" if roles else "is open to no role"
    return PermissionDenied(f"permission denied: '{what}' {requires}; this token is '{caller.name}' ({caller.role.value})")


def host_of_peer(peer: str) -> str:
    """Host of a gRPC peer: ``ipv4:127.0.0.1:4711`` -> ``127.0.0.1``; empty for a unix socket."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest.rpartition(":")[0]).strip("[]")


def _in_words(method: str) -> str:
    """``DrainNode`` -> ``drain node``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", method).lower()


def _first(metadata: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str:
    """Value of a metadata key; empty: the call does not have it."""
    return next((value for key, value in metadata or () if key == wanted and isinstance(value, str)), "")


def _person(caller: Principal | None, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The person for whom an operator's token calls; empty: none, or the caller may not name one."""
    if caller is None or caller.role is not AccessRole.OPERATOR:
        return ""
    named = _first(metadata, ON_BEHALF)
    return named if is_caller_name(named) else ""


def _token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Token of a call; empty: it has none."""
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""


class TenantLimit:
    """Limit on one resource: a confined tenant may hold at most a quarter of it. Thread-safe.

    Without limits one tenant could occupy a whole resource, e.g. all subscriptions. Callers without a tenant (engines, nodes,
    operators, and every caller of a server without tokens) are not limited.

    Args:
        resource: its name, for logs and errors.
        capacity: capacity for all callers, in any unit.
        count: counts a rejected call.
    """

    def __init__(self, resource: str, capacity: int, count: Callable[[Event], None]) -> None:
        self._resource = resource
        self._limit = max(1, capacity // TENANT_SHARE)
        self._count = count
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def acquire(self, amount: int = 1) -> Callable[[], None]:
        """Reserve an amount for the current call's tenant, if it is confined to one.

        Returns:
            A function that releases the reservation; call it once, from any thread.

        Raises:
            CapacityExceeded: the tenant would exceed its limit.
        """
        mine = tenant()
        if mine is None:
            return _nothing
        with self._lock:
            fits = self._held[mine] + amount <= self._limit
            if fits:
                self._held[mine] += amount
        if not fits:
            self._count(common_metrics.TENANT_SHARE_REFUSED)
            _limited.warning("call rejected: tenant limit reached (tenant=%s, resource=%s)", mine, self._resource)
            raise CapacityExceeded("tenant limit reached; release some or retry later", what=self._resource, limit=self._limit)

        def release() -> None:
            with self._lock:
                self._held[mine] -= amount
                if not self._held[mine]:
                    del self._held[mine]

        return release


def _nothing() -> None:
    """Release of a caller without a tenant."""
