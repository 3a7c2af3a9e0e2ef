# ruff: noqa: N802, ARG002  # names and signatures of the handlers are gRPC's
"""The Metadata service's handlers: check the request, do one thing, answer. Errors are mapped by the server's interceptor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvproto.v1.common_pb2 import CacheSpec, NodeInfo
from kvproto.v1.metadata_pb2_grpc import add_MetadataServicer_to_server
from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, Unsupported
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.events.subscription import BlockEventSubscription, tell_served
from kvstore.metadata.indexing.anti_entropy import differing_ranges
from kvstore.metadata.indexing.index_mutations import register_node, repair_range
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.lookup import Lookups
from kvstore.metadata.indexing.publish_stream import PublishStream
from kvstore.metadata.membership.node_admin import NodeAdmin, check_progress, refuse_removed
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.policies import RetentionPolicies, check_usages
from kvstore.metadata.retention.tenants import NamespaceOwners
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.scheduling.scheduler_service import MAX_BUDGET_S, SchedulerService
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process.node_id import check_node_id
from kvstore.rpc.auth.interceptor import host_of_peer, require_tenant, tenant
from kvstore.rpc.auth.tenant_limits import TenantLimit
from kvstore.rpc.codec import check_id, check_name, runs_from_proto, spec_from_proto, tier_from_proto

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Metadata"].full_name
MISSED_BEATS: Final = 3
"""A node's id is free for another boot once so many heartbeats of the one before have not come; two may be lost on
the way between workers."""
_ROLES: Final = frozenset({"prefill", "decode", "storage"})


@dataclass(frozen=True, slots=True)
class MetadataParts:
    """What the handlers work with.

    Args:
        index: the index.
        nodes: who is registered and alive.
        writes: the thread that changes the index.
        reads: the thread for long reads of it.
        counters: events of this process.
        heartbeat_interval_ms: what nodes are told.
        planning: load plans.
        scheduling: of requests; None where several workers would each know a part of the engines.
        lookups: the hot path.
        orders: what operators order of nodes.
        retention: what may stay on nodes.
        feed: block events; None where several workers would each know a part of the changes.
    """

    index: PrefixIndex
    nodes: NodeTable
    writes: IndexThread
    reads: IndexThread
    counters: Counters
    heartbeat_interval_ms: int
    planning: PlannerService
    scheduling: SchedulerService | None
    lookups: Lookups
    orders: NodeAdmin
    retention: RetentionPolicies
    feed: BlockEventLog | None


class MetadataService(metadata_pb2_grpc.MetadataServicer):
    """Handlers. Their names and comments are those of ``proto/kvstore/v1/metadata.proto``."""

    def __init__(self, parts: MetadataParts) -> None:
        self._parts = parts
        self._lookups = parts.lookups
        self._tenants = NamespaceOwners(parts.index)
        self._watches = TenantLimit("block events", 0 if parts.feed is None else parts.feed.most, parts.counters.add)
        self._streams: set[PublishStream] = set()

    def end_streams(self) -> None:
        """The server ends: nodes' streams, which would last as long as they live, end in order."""
        for stream in self._streams:
            stream.end()

    async def RegisterNode(
        self,
        request: pb.RegisterNodeRequest,
        context: grpc.aio.ServicerContext[pb.RegisterNodeRequest, pb.RegisterNodeResponse],
    ) -> pb.RegisterNodeResponse:
        check_id(request.operation_id, "operation_id")
        info = request.node
        _check_node(info)
        self._check_room_for(info)
        needs = await self._parts.writes.run(register_node, self._parts.index, info)
        self._parts.nodes.record_registration(NodeId(info.node_id), BootId(info.boot_id), host_of_peer(context.peer()))
        if self._parts.feed is not None:
            tell_served(self._parts.feed, self._parts.nodes)
        self._parts.counters.add(metadata_metrics.REGISTRATIONS)
        return pb.RegisterNodeResponse(
            index_epoch=self._parts.index.epoch,
            heartbeat_interval_ms=self._parts.heartbeat_interval_ms,
            volume_needs=needs,
            drain=self._parts.nodes.drain_order(NodeId(info.node_id)),
        )

    async def Heartbeat(
        self,
        request: pb.HeartbeatRequest,
        context: grpc.aio.ServicerContext[pb.HeartbeatRequest, pb.HeartbeatResponse],
    ) -> pb.HeartbeatResponse:
        check_name(request.node_id, "node_id")
        check_id(request.boot_id, "boot_id")
        if len(request.usages) > limits.MAX_VOLUMES_PER_NODE:
            raise InvalidArgument("too many volumes", got=len(request.usages), limit=limits.MAX_VOLUMES_PER_NODE)
        for usage in request.usages:
            check_name(usage.volume_id, "volume_id")
            if len(usage.read_only) > limits.MAX_REASON:
                raise InvalidArgument("a reason takes a few words", got=len(usage.read_only), limit=limits.MAX_REASON)
        if request.HasField("drain"):
            check_progress(request.drain)
        check_usages(request)
        if len(request.problems) > limits.MAX_PROBLEMS_TOLD:
            raise InvalidArgument("too many problems", got=len(request.problems), limit=limits.MAX_PROBLEMS_TOLD)
        if (longest := max(map(len, request.problems), default=0)) > limits.MAX_REASON:
            raise InvalidArgument("a problem takes a few words", got=longest, limit=limits.MAX_REASON)
        known = self._parts.nodes.record_heartbeat(request, host_of_peer(context.peer()))
        self._parts.counters.add(metadata_metrics.HEARTBEATS)
        node_id = NodeId(request.node_id)
        return pb.HeartbeatResponse(
            index_epoch=self._parts.index.epoch,
            register_again=not known,
            drain=self._parts.nodes.drain_order(node_id),
            retention=await self._parts.retention.answer(request) if known else None,
        )

    async def UnregisterNode(self, request: pb.UnregisterNodeRequest, context: object) -> pb.UnregisterNodeResponse:
        return pb.UnregisterNodeResponse(known=await self._parts.orders.unregister(request))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: object) -> pb.DrainNodeResponse:
        return pb.DrainNodeResponse(status=await self._parts.orders.drain(request))

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: object) -> pb.UndrainNodeResponse:
        return pb.UndrainNodeResponse(status=await self._parts.orders.undrain(request))

    async def RemoveNode(self, request: pb.RemoveNodeRequest, context: object) -> pb.RemoveNodeResponse:
        return pb.RemoveNodeResponse(known=await self._parts.orders.remove(request))

    async def LocateBlocks(self, request: pb.LocateBlocksRequest, context: object) -> pb.LocateBlocksResponse:
        return await self._parts.orders.locate(request)

    async def Publish(self, requests: AsyncIterator[pb.PublishRequest], context: object) -> AsyncIterator[pb.PublishResponse]:
        parts = self._parts
        stream = PublishStream(parts.index, parts.writes, parts.nodes, parts.counters)
        self._streams.add(stream)
        try:
            async for sequence in stream.run(requests):
                yield pb.PublishResponse(sequence=sequence)
        finally:
            self._streams.discard(stream)

    async def CompareDigests(self, request: pb.CompareDigestsRequest, context: object) -> pb.CompareDigestsResponse:
        count = len(request.digests)
        if count != len(request.counts) or request.first_range + count > limits.DIGEST_RANGES:
            raise InvalidArgument(
                "digests and counts take one value a range", digests=count, counts=len(request.counts), first=request.first_range
            )
        volume_epoch = self._parts.nodes.volume_epoch(*_volume_of(request))
        parts = self._parts
        ranges = await differing_ranges(
            parts.index, parts.reads, volume_epoch, request.first_range, list(request.digests), list(request.counts)
        )
        parts.counters.add(metadata_metrics.RANGES_COMPARED, count)
        parts.counters.add(metadata_metrics.RANGES_DIFFERING, len(ranges))
        return pb.CompareDigestsResponse(differing_ranges=ranges)

    async def RepairRange(self, request: pb.RepairRangeRequest, context: object) -> pb.RepairRangeResponse:
        check_id(request.operation_id, "operation_id")
        if request.range >= limits.DIGEST_RANGES:
            raise InvalidArgument("no such range of key space", range=request.range, ranges=limits.DIGEST_RANGES)
        volume_epoch = self._parts.nodes.volume_epoch(*_volume_of(request))
        runs = runs_from_proto(request.blocks)
        added, removed = await self._parts.writes.run(repair_range, self._parts.index, volume_epoch, request.range, runs)
        self._parts.counters.add(metadata_metrics.REPLICAS_REPAIRED, added + removed)
        return pb.RepairRangeResponse(added=added, removed=removed)

    async def RegisterNamespace(self, request: pb.RegisterNamespaceRequest, context: object) -> pb.RegisterNamespaceResponse:
        check_id(request.operation_id, "operation_id")
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        if self._parts.index.spec_of(spec.namespace) is None:
            await self._parts.writes.run(self._tenants.register, spec)
        return pb.RegisterNamespaceResponse(namespace_id=spec.namespace)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: object) -> pb.ListNamespacesResponse:
        entries = [(key, CacheSpec.FromString(spec)) for key, spec in self._parts.index.namespaces()]
        only = tenant()
        return pb.ListNamespacesResponse(
            namespaces=[
                pb.NamespaceInfo(namespace_id=key, spec=spec) for key, spec in entries if only is None or spec.tenant == only
            ]
        )

    async def ListNodes(self, request: pb.ListNodesRequest, context: object) -> pb.ListNodesResponse:
        return pb.ListNodesResponse(nodes=self._parts.nodes.statuses())

    async def Lookup(self, request: pb.LookupRequest, context: object) -> bytes:  # see add_to_server
        self._tenants.check(request.namespace_id)
        return self._lookups.answer(request)

    async def PlanLoad(self, request: pb.PlanLoadRequest, context: object) -> pb.LoadPlan:
        return self._parts.planning.plan(request)

    async def ReportLoads(self, request: pb.ReportLoadsRequest, context: object) -> pb.ReportLoadsResponse:
        return self._parts.planning.report(request)

    async def ReplanLoad(self, request: pb.ReplanLoadRequest, context: object) -> pb.LoadPlan:
        return self._parts.planning.replan(request)

    async def ReportEngines(self, request: pb.ReportEnginesRequest, context: object) -> pb.ReportEnginesResponse:
        return self._scheduling.report(request)

    async def AssignRequest(
        self,
        request: pb.AssignRequestRequest,
        context: grpc.aio.ServicerContext[pb.AssignRequestRequest, pb.Assignment],
    ) -> pb.Assignment:
        left_s = context.time_remaining()
        return await self._scheduling.assign(request, MAX_BUDGET_S if left_s is None else left_s)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: object) -> pb.CancelRequestResponse:
        return pb.CancelRequestResponse(known=self._scheduling.cancel(request))

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: object) -> AsyncIterator[pb.WatchBlocksResponse]:
        parts = self._parts
        if parts.feed is None:
            raise Unsupported("block events are told by one process that sees all changes: set metadata.workers to 1")
        self._tenants.check_all(request.namespace_ids)
        watch = BlockEventSubscription(request, parts.feed, parts.index, parts.reads, parts.nodes, parts.counters)
        give_back = self._watches.acquire()
        try:
            async with aclosing(watch.run()) as messages:
                async for message in messages:
                    yield message
        finally:
            give_back()

    async def GetStats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        stats = self._parts.index.stats()
        gauges = self._parts.scheduling.gauges() if self._parts.scheduling is not None else {}
        return pb.GetStatsResponse(
            blocks=stats.blocks,
            index_bytes=stats.bytes,
            index_epoch=self._parts.index.epoch,
            counters={**self._parts.counters.snapshot(), **gauges},
        )

    @property
    def _scheduling(self) -> SchedulerService:
        if self._parts.scheduling is None:
            raise Unsupported("requests are scheduled by one process that knows all engines: set metadata.workers to 1")
        return self._parts.scheduling

    def _check_room_for(self, info: NodeInfo) -> None:
        """Refuses what must not be registered now: too many nodes, or an id or a volume that a living node has.

        A node that was started anew has its id back at once where it serves at the address of before, else when its old boot
        has been silent for ``MISSED_BEATS``.
        """
        nodes = self._parts.nodes
        view = nodes.view()
        node_id = NodeId(info.node_id)
        refuse_removed(self._parts.index, info)
        if node_id not in view.nodes and len(view.nodes) >= limits.MAX_NODES:
            raise CapacityExceeded("too many nodes", limit=limits.MAX_NODES)
        known = view.nodes.get(node_id)
        if known is not None and known.boot_id != info.boot_id and known.control_address != info.control_address:
            patience_s = MISSED_BEATS * self._parts.heartbeat_interval_ms / 1000
            if nodes.is_alive(node_id) and nodes.heard_within(node_id, BootId(known.boot_id), patience_s):
                self._parts.counters.add(metadata_metrics.NODE_IDS_REFUSED)
                raise Conflict(
                    "another living node has this id: give one of them another (node.node_id), or stop it",
                    node_id=node_id,
                    control_address=known.control_address,
                )
        for volume in info.volumes:
            for owner in view.owners.get(VolumeId(volume.volume_id), ()):
                if owner != node_id and nodes.is_alive(owner):
                    raise Conflict("another living node has this volume", volume_id=volume.volume_id, node_id=owner)


def add_to_server(service: MetadataService, server: grpc.aio.Server) -> None:
    """Registers the handlers. That of ``Lookup`` answers bytes, which leave as they are."""
    add_MetadataServicer_to_server(service, server)
    lookup = grpc.unary_unary_rpc_method_handler(service.Lookup, request_deserializer=pb.LookupRequest.FromString)
    # takes precedence over the generated one; the stubs do not know the method
    server.add_registered_method_handlers(SERVICE_NAME, {"Lookup": lookup})  # type: ignore[attr-defined]


def _volume_of(request: pb.CompareDigestsRequest | pb.RepairRangeRequest) -> tuple[NodeId, BootId, VolumeId]:
    return (
        NodeId(check_name(request.node_id, "node_id")),
        BootId(check_id(request.boot_id, "boot_id")),
        VolumeId(check_name(request.volume_id, "volume_id")),
    )


def _check_node(info: NodeInfo) -> None:
    """Checks a registration's shape.

    Raises:
        InvalidArgument: a field is missing, too long or unknown.
    """
    check_node_id(check_name(info.node_id, "node_id"))
    check_id(info.boot_id, "boot_id")
    if len(info.roles) > len(_ROLES) or not _ROLES.issuperset(info.roles):
        raise InvalidArgument("unknown role", known=", ".join(sorted(_ROLES)))
    for name in ("control_address", "data_address"):
        check_name(getattr(info, name), name)
    if info.local_socket:
        check_name(info.local_socket, "local_socket")
    if len(info.volumes) > limits.MAX_VOLUMES_PER_NODE:
        raise InvalidArgument("too many volumes", got=len(info.volumes), limit=limits.MAX_VOLUMES_PER_NODE)
    for volume in info.volumes:
        check_name(volume.volume_id, "volume_id")
        tier_from_proto(volume.tier)
    if len({volume.volume_id for volume in info.volumes}) != len(info.volumes):
        raise InvalidArgument("a volume is named twice", node_id=info.node_id)
    if len(info.mounts) > limits.MAX_VOLUMES_PER_NODE:
        raise InvalidArgument("too many mounts", got=len(info.mounts), limit=limits.MAX_VOLUMES_PER_NODE)
    for mount in info.mounts:
        check_name(mount, "mounts")
