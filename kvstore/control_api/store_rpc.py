"""gRPC calls to the metadata server and to nodes. Every call has a deadline; concurrency is limited."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc.aio

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import metadata_pb2
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub, NodeAdminStub
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvproto.v1.node_pb2_grpc import NodeStub
from kvstore.core.errors import DeadlineExceeded, KVStoreError, NotFound, Unauthenticated, Unavailable, Unsupported
from kvstore.health.findings import HealthFinding
from kvstore.health.server_indexes import differing_indexes
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import admin as admin_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.interceptor import ON_BEHALF
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call_aio, connect_aio
from kvstore.rpc.diagnosis import TIMEOUT_S, Diagnoser, Target
from kvstore.rpc.failover.aio_channel import AioFailoverChannel
from kvstore.rpc.failover.connect import connect_metadata_aio, states_of
from kvstore.rpc.failover.servers import MetadataServerState

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

T = TypeVar("T")
_Metadata = list[tuple[str, str]]

acting_for: Final[ContextVar[str]] = ContextVar("kvstore_acting_for", default="")
"""Name of the person whose change the current task sends to the metadata server; empty: the owner of the token."""
NODES_AT_ONCE: Final = 32
_NOT_REPORTING: Final = "the node does not report to the metadata server"
DIAGNOSIS_HOLDS_S: Final = 10.0
"""How long a diagnosis of an unreachable metadata server is reused."""
_IDLE_CHECK_S: Final = 0.5
"""Time limit of the probe of a metadata server to which no call goes."""
_INDEXES_AGAIN_S: Final = 0.5
"""Time after which servers with different indexes are asked again."""
_TWO_ATTEMPTS: Final = RetryPolicy(attempts=2, first_backoff_s=0.05)
"""The second attempt reaches a server that was restarted. Calls of nodes use it for changes too, because these may be repeated:
they carry an operation id or the expected old value."""


@dataclass(frozen=True, slots=True)
class NodeReplies(Generic[T]):
    """Results of a call to several nodes: answers and errors by node id."""

    answers: dict[str, T]
    failed: dict[str, KVStoreError]


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """How to reach a store.

    Attributes:
        metadata: address of the metadata server, or of several.
        tls: TLS settings of the channels to metadata server and nodes.
        token: token for metadata server and nodes; None: no token.
        read_token: token for queries to nodes; None: ``token``. The metadata server repeats the address
            that a node registered, and nothing proves that the address is that node's. So a query must not send a token that
            permits changes.
        timeout_s: timeout of a query.
        change_timeout_s: timeout of a change, such as an eviction.
    """

    metadata: str = "127.0.0.1:7400"
    tls: TlsConfig | None = None
    token: TokenSource | None = None
    read_token: TokenSource | None = None
    timeout_s: float = 3.0
    change_timeout_s: float = 60.0


class StoreRpc:
    """gRPC calls to the metadata server and to the nodes that it knows. Bound to one event loop; call ``close`` once.

    Args:
        endpoint: address, credentials and timeouts.
        counters: counters of the process.
    """

    def __init__(self, endpoint: StoreEndpoint, counters: Counters) -> None:
        self._endpoint = endpoint
        self._counters = counters
        self._channel = connect_metadata_aio(endpoint.metadata, tls=endpoint.tls, token=endpoint.token, counters=counters)
        target = Target(
            server="the metadata server",
            address=endpoint.metadata,
            tls=endpoint.tls,
            token=endpoint.token,
            tls_settings="[client.tls]",
            token_setting="client.token_file",  # noqa: S106
        )
        self._diagnoser = Diagnoser(target, DIAGNOSIS_HOLDS_S)
        self._metadata = MetadataStub(self._channel)
        self._admin = MetadataAdminStub(self._channel)
        self._query_slots = asyncio.Semaphore(NODES_AT_ONCE)
        # Slots of their own: changes on nodes that do not answer must not delay queries.
        self._change_slots = asyncio.Semaphore(NODES_AT_ONCE)

    @property
    def change_timeout_s(self) -> float:
        """Timeout of a change."""
        return self._endpoint.change_timeout_s

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    # ---- the metadata server ----
    async def nodes(self) -> dict[str, metadata_pb2.NodeStatus]:
        """All known nodes, by id."""
        answer = await self._ask(self._metadata.ListNodes, metadata_pb2.ListNodesRequest())
        return {status.node.node_id: status for status in answer.nodes}

    async def node(self, node_id: str) -> metadata_pb2.NodeStatus:
        """A node.

        Raises:
            NotFound: the node does not exist.
        """
        status = (await self.nodes()).get(node_id)
        if status is None:
            raise NotFound("no such node", node_id=node_id[:64])
        return status

    async def metadata_servers(self) -> list[MetadataServerState]:
        """The metadata servers that are configured or named by DNS, with their state."""
        if isinstance(self._channel, AioFailoverChannel):
            await asyncio.to_thread(self._channel.servers.check_idle, _IDLE_CHECK_S)
        return states_of(self._channel, self._endpoint.metadata)

    async def server(self) -> pb.DescribeServerResponse:
        """State of the metadata server. If the servers of a list have different indexes, that is one of its findings."""
        answer: pb.DescribeServerResponse = await self._ask(self._admin.DescribeServer, pb.DescribeServerRequest())
        found = await self._different_indexes()
        if found is not None and found.code.name not in {one.code for one in answer.findings}:
            answer.findings.insert(0, found.to_proto())
        return answer

    async def _different_indexes(self) -> HealthFinding | None:
        """The finding about different indexes; servers are asked twice, because they differ while an index is created again."""
        if not isinstance(self._channel, AioFailoverChannel) or len(self._channel.servers.addresses) < 2:
            return None
        if differing_indexes(await self._index_epochs(self._channel)) is None:
            return None
        await asyncio.sleep(_INDEXES_AGAIN_S)
        return differing_indexes(await self._index_epochs(self._channel))

    @staticmethod
    async def _index_epochs(channel: AioFailoverChannel) -> dict[str, bytes]:
        """The index epoch of each metadata server that answers."""

        async def ask(address: str) -> bytes:
            stub = MetadataStub(channel.channel_to(address))
            request = metadata_pb2.GetStatsRequest()
            try:
                answer: metadata_pb2.GetStatsResponse
                answer = await call_aio(stub.GetStats, request, _IDLE_CHECK_S, RetryPolicy(attempts=1))
            except KVStoreError:  # the states of the servers show it
                return b""
            return answer.index_epoch

        addresses = channel.servers.addresses
        found = await asyncio.gather(*map(ask, addresses))
        return {address: epoch for address, epoch in zip(addresses, found, strict=True) if epoch}

    async def shards(self) -> pb.DescribeShardsResponse:
        """Servers that hold a shared index, and the metadata servers that serve it."""
        return await self._ask(self._admin.DescribeShards, pb.DescribeShardsRequest())

    async def namespaces(self, after: bytes, limit: int) -> pb.DescribeNamespacesResponse:
        """A page of namespaces, in order of registration."""
        return await self._ask(self._admin.DescribeNamespaces, pb.DescribeNamespacesRequest(after=after, limit=limit))

    async def namespace(self, namespace_id: bytes) -> pb.NamespaceDescription:
        """A namespace.

        Raises:
            NotFound: the namespace is not registered.
        """
        request = pb.DescribeNamespacesRequest(namespace_id=namespace_id)
        answer: pb.DescribeNamespacesResponse = await self._ask(self._admin.DescribeNamespaces, request)
        if not answer.namespaces:
            raise NotFound("no such namespace", namespace_id=namespace_id.hex())
        return answer.namespaces[0]

    async def register_namespace(self, request: metadata_pb2.RegisterNamespaceRequest) -> bytes:
        """Register a namespace and return its id."""
        request.operation_id = operation_id()
        answer: metadata_pb2.RegisterNamespaceResponse = await self._change(self._metadata.RegisterNamespace, request)
        return answer.namespace_id

    async def blocks(self, namespace_id: bytes, keys: bytes) -> pb.DescribeBlocksResponse:
        """Index records of packed keys."""
        request = pb.DescribeBlocksRequest(namespace_id=namespace_id, keys=keys)
        return await self._ask(self._admin.DescribeBlocks, request)

    async def cluster_events(self, after_id: int, since_s: float, limit: int) -> pb.ListClusterEventsResponse:
        """A page of cluster events, in order."""
        request = pb.ListClusterEventsRequest(after_id=after_id, since_ms=round(since_s * 1000), limit=limit)
        return await self._ask(self._admin.ListClusterEvents, request)

    async def planning(self, *, decisions: int = 0, live: int = 0, after_plan: int = 0) -> pb.DescribePlanningResponse:
        """Planning state: queues, decisions and live plans."""
        request = pb.DescribePlanningRequest(decisions=decisions, live=live, after_plan=after_plan)
        return await self._ask(self._admin.DescribePlanning, request)

    async def set_path_policy(self, policy: str, expected: str | None) -> pb.SetPathPolicyResponse:
        """Change the path policy."""
        return await self._change(self._admin.SetPathPolicy, pb.SetPathPolicyRequest(policy=policy, expected=expected))

    async def rebuild_index(self, epoch: bytes) -> pb.RebuildIndexResponse:
        """Rebuild the index if it has this epoch."""
        return await self._change(self._admin.RebuildIndex, pb.RebuildIndexRequest(expected_epoch=epoch))

    async def drain_node(self, node_id: str, *, move: bool) -> metadata_pb2.NodeStatus:
        """Drain a node."""
        request = metadata_pb2.DrainNodeRequest(operation_id=operation_id(), node_id=node_id, move=move)
        answer: metadata_pb2.DrainNodeResponse = await self._change(self._metadata.DrainNode, request)
        return answer.status

    async def undrain_node(self, node_id: str) -> metadata_pb2.NodeStatus:
        """Cancel the drain of a node."""
        request = metadata_pb2.UndrainNodeRequest(operation_id=operation_id(), node_id=node_id)
        answer: metadata_pb2.UndrainNodeResponse = await self._change(self._metadata.UndrainNode, request)
        return answer.status

    async def remove_node(self, node_id: str, *, force: bool) -> bool:
        """Forget a dead or drained node, or any node with ``force``. Returns False if the node is unknown."""
        request = metadata_pb2.RemoveNodeRequest(operation_id=operation_id(), node_id=node_id, force=force)
        answer: metadata_pb2.RemoveNodeResponse = await self._change(self._metadata.RemoveNode, request)
        return answer.known

    async def tenants(self, tenant: str | None = None) -> pb.DescribeTenantsResponse:
        """Tenants with usage or quota, by name; or one tenant."""
        return await self._ask(self._admin.DescribeTenants, pb.DescribeTenantsRequest(tenant=tenant))

    async def set_quota(self, tenant: str, quota: pb.TenantQuota, expected: pb.TenantQuota | None) -> pb.SetTenantQuotaResponse:
        """Set the quota of a tenant; an empty quota removes it."""
        request = pb.SetTenantQuotaRequest(operation_id=operation_id(), tenant=tenant, quota=quota, expected=expected)
        return await self._change(self._admin.SetTenantQuota, request)

    async def rules(self) -> list[metadata_pb2.NamespaceRule]:
        """Retention rules, by namespace id."""
        answer: pb.ListNamespaceRulesResponse = await self._ask(self._admin.ListNamespaceRules, pb.ListNamespaceRulesRequest())
        return list(answer.rules)

    async def set_rule(
        self, rule: metadata_pb2.NamespaceRule, expected: metadata_pb2.NamespaceRule | None
    ) -> pb.SetNamespaceRuleResponse:
        """Set the retention rule of a namespace."""
        request = pb.SetNamespaceRuleRequest(operation_id=operation_id(), rule=rule, expected=expected)
        return await self._change(self._admin.SetNamespaceRule, request)

    async def counters(self) -> dict[str, int]:
        """Counters of the metadata servers since their starts, added up."""
        request = metadata_pb2.GetStatsRequest(all_servers=True)
        answer: metadata_pb2.GetStatsResponse = await self._ask(self._metadata.GetStats, request)
        return dict(answer.counters)

    async def history(self, request: pb.DescribeHistoryRequest) -> pb.DescribeHistoryResponse:
        """Figures of the metadata server of the last hour."""
        return await self._ask(self._admin.DescribeHistory, request)

    # ---- nodes ----
    async def ask_node(
        self,
        status: metadata_pb2.NodeStatus,
        ask: Callable[[NodeRpc], Awaitable[T]],
        timeout_s: float | None = None,
        *,
        changes: bool = False,
    ) -> T:
        """Call one node.

        Args:
            status: the node.
            ask: the call, given stubs of the node.
            timeout_s: time for the wait for a slot and all calls together; None: timeout of a query.
            changes: send the token that permits changes. A query sends ``read_token`` if there is one, because
                nothing proves that the address is the node's.

        Raises:
            Unavailable: the node does not report to the metadata server, or does not answer.
            DeadlineExceeded: the time has passed, possibly while too many other nodes were asked.
            Unsupported: the node is an engine's pool of device memory, or its cache.
            KVStoreError: the error of the node.
        """
        if not status.alive:
            why = f"the metadata server rejects the node: {status.refused}" if status.refused else _NOT_REPORTING
            raise Unavailable(why, node_id=status.node.node_id)
        endpoint = self._endpoint
        tls = endpoint.tls
        token = endpoint.token if changes or endpoint.read_token is None else endpoint.read_token
        address = status.node.control_address
        if not address:
            raise Unsupported("the cache of an engine answers no calls", node_id=status.node.node_id)
        timeout_s = endpoint.timeout_s if timeout_s is None else timeout_s
        ends_s = asyncio.get_running_loop().time() + timeout_s
        slots = self._change_slots if changes else self._query_slots
        try:
            async with asyncio.timeout(timeout_s):
                await slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "node not asked before the timeout: too many calls of nodes are in progress; try again",
                node_id=status.node.node_id,
                limit=NODES_AT_ONCE,
            ) from None
        try:
            async with connect_aio(address, tls=tls, token=token, own_connection=True) as channel:
                return await ask(NodeRpc(status, channel, ends_s, self._counters))
        finally:
            slots.release()

    async def change_node(self, status: metadata_pb2.NodeStatus, ask: Callable[[NodeRpc], Awaitable[T]]) -> T:
        """Like ``ask_node``, with the timeout and token of a change."""
        return await self.ask_node(status, ask, self._endpoint.change_timeout_s, changes=True)

    async def ask_nodes(
        self,
        statuses: Iterable[metadata_pb2.NodeStatus],
        ask: Callable[[NodeRpc], Awaitable[T]],
        timeout_s: float | None = None,
        *,
        changes: bool = False,
    ) -> NodeReplies[T]:
        """Call several nodes, except caches of engines; an error of one does not affect the others.

        ``ask`` also converts the answer. If it raises ``ValueError``, for example because a duration is negative, the node
        counts as failed.
        """
        found: NodeReplies[T] = NodeReplies({}, {})

        async def one(status: metadata_pb2.NodeStatus) -> None:
            node_id = status.node.node_id
            try:
                found.answers[node_id] = await self.ask_node(status, ask, timeout_s, changes=changes)
            except KVStoreError as error:
                self._counters.add(admin_metrics.NODES_UNREACHED)
                found.failed[node_id] = error
            except ValueError as error:
                limited.warning("invalid answer: node (node_id=%s, error=%.300s)", node_id, error)
                self._counters.add(admin_metrics.NODES_UNREACHED)
                found.failed[node_id] = Unavailable("the node sent an invalid answer", node_id=node_id)

        await asyncio.gather(*(one(status) for status in statuses if status.node.control_address))
        return found

    async def change_nodes(
        self,
        statuses: Iterable[metadata_pb2.NodeStatus],
        ask: Callable[[NodeRpc], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> NodeReplies[T]:
        """Like ``ask_nodes``, with the token of a change and, unless ``timeout_s`` is given, its timeout."""
        return await self.ask_nodes(statuses, ask, self.change_timeout_s if timeout_s is None else timeout_s, changes=True)

    # ---- inside ----
    async def _ask(self, method: Callable[..., Awaitable[T]], request: object) -> T:
        return await self._call(method, request, self._endpoint.timeout_s, _TWO_ATTEMPTS)

    async def _change(self, method: Callable[..., Awaitable[T]], request: object) -> T:
        person = acting_for.get()

        def named(request: object, timeout: float | None = None, *, metadata: _Metadata | None = None) -> Awaitable[T]:
            return method(request, timeout=timeout, metadata=[*(metadata or ()), (ON_BEHALF, person)])

        return await self._call(named if person else method, request, self._endpoint.change_timeout_s, RetryPolicy(attempts=1))

    async def _call(self, method: Callable[..., Awaitable[T]], request: object, timeout_s: float, retry: RetryPolicy) -> T:
        try:
            answer = await _counted(self._counters, call_aio(method, request, timeout_s, retry))
        except (Unavailable, DeadlineExceeded, Unauthenticated) as error:
            if retry is not _TWO_ATTEMPTS and isinstance(error, DeadlineExceeded):
                raise  # a slow change does not indicate a bad connection
            known = self._diagnoser.known(error)
            if known is error:
                known = await asyncio.to_thread(self._diagnoser.explain, error, min(TIMEOUT_S, self._endpoint.timeout_s))
            raise known from error
        self._diagnoser.answered()
        return answer


class NodeRpc:
    """Stubs of one node for the duration of a call."""

    def __init__(self, status: metadata_pb2.NodeStatus, channel: grpc.aio.Channel, ends_s: float, counters: Counters) -> None:
        self.status = status
        self.stub = NodeAdminStub(channel)
        self.node_stub = NodeStub(channel)
        self._ends_s = ends_s
        self._counters = counters

    async def __call__(self, method: Callable[..., Awaitable[T]], request: object) -> T:
        """Call a method of a stub. All calls have one deadline."""
        left_s = max(0.001, self._ends_s - asyncio.get_running_loop().time())
        return await _counted(self._counters, call_aio(method, request, left_s, _TWO_ATTEMPTS))


async def _counted(counters: Counters, answer: Awaitable[T]) -> T:
    try:
        return await answer
    except KVStoreError:
        counters.add(admin_metrics.UPSTREAM_ERRORS)
        raise


def operation_id() -> bytes:
    """A new operation id."""
    return secrets.token_bytes(16)
