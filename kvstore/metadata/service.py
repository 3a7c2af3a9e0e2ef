# ruff: noqa: N802, ARG002  # names and signatures of the handlers are gRPC's
"""Handlers of the Metadata service: check the request, call components, answer. An interceptor maps errors to status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvproto.v1.common_pb2 import TIER_HBM, NodeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvproto.v1.metadata_pb2_grpc import add_MetadataServicer_to_server
from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, Unavailable
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.cluster.event_journal import EventJournal
from kvstore.metadata.cluster.other_servers import OtherServers
from kvstore.metadata.cluster.server_sums import add_stats
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.events.subscription import report_served
from kvstore.metadata.indexing.anti_entropy import IndexDigests
from kvstore.metadata.indexing.index_mutations import register_node, repair_ranges
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.lookup import Lookups
from kvstore.metadata.indexing.publish_stream import PublishStream
from kvstore.metadata.indexing.range_checks import RangeChecks
from kvstore.metadata.membership.node_admin import NodeAdmin, check_progress
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.policies import RetentionPolicies, check_usages
from kvstore.metadata.retention.tenants import NamespaceList, NamespaceOwners
from kvstore.metadata.roles.roles import Roles
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.scheduling.scheduler_service import MAX_BUDGET_S, SchedulerService
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process.node_id import check_node_id
from kvstore.rpc.address import host_and_port
from kvstore.rpc.auth.interceptor import TenantLimit, caller_name, host_of_peer, require_tenant, tenant
from kvstore.rpc.codec import check_id, check_name, runs_from_proto, spec_from_proto, tier_from_proto
from kvstore.rpc.errors import USE_ANOTHER_SERVER

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Metadata"].full_name
MISSED_BEATS: Final = 3
"""A node's id is free for another boot after as many missed heartbeats; other servers of the index may see two of them late."""
_GET_STATS: Final = f"/{SERVICE_NAME}/GetStats"
_ROLES: Final = frozenset({"prefill", "decode", "storage"})


@dataclass(frozen=True, slots=True)
class MetadataParts:
    """Components that the handlers use.

    Args:
        index: the index.
        nodes: registrations and liveness.
        writes: thread that changes the index.
        reads: thread for long reads of the index.
        counters: counters of this process.
        heartbeat_interval_ms: interval that nodes are asked to use.
        planner: load plans.
        scheduler: request scheduling.
        roles: roles of this process.
        lookups: lookups.
        node_admin: calls about whole nodes.
        retention: quotas and retention rules.
        events: block events.
        event_log: log of this process for ``events``; None: all servers of the index share the events.
        journal: receives operators' orders.
        digests: digests of the index for anti-entropy.
        range_checks: checks of key ranges that nodes are asked for.
        others: the other metadata servers of the index.
    """

    index: PrefixIndex
    nodes: NodeTable
    writes: IndexThread
    reads: IndexThread
    counters: Counters
    heartbeat_interval_ms: int
    planner: PlannerService
    scheduler: SchedulerService
    roles: Roles
    lookups: Lookups
    node_admin: NodeAdmin
    retention: RetentionPolicies
    events: EventSource
    event_log: BlockEventLog | None
    journal: EventJournal
    digests: IndexDigests
    range_checks: RangeChecks
    others: OtherServers


class MetadataService(metadata_pb2_grpc.MetadataServicer):
    """The handlers. ``proto/kvstore/v1/metadata.proto`` documents each method."""

    def __init__(self, parts: MetadataParts) -> None:
        self._parts = parts
        self._lookups = parts.lookups
        self._namespace_owners = NamespaceOwners(parts.index)
        self._namespaces = NamespaceList()
        self._subscriptions = TenantLimit("block events", parts.events.max_subscribers, parts.counters.add)
        self._streams: set[PublishStream] = set()

    def end_streams(self) -> None:
        """End all publish streams gracefully; otherwise they last as long as their nodes."""
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
        self._check_reaches_index()
        await self._parts.index.refresh()  # another server may have registered the node or the volume a moment ago
        self._check_space_for(info)
        needs = await self._parts.writes.run(register_node, self._parts.index, info)
        self._parts.nodes.record_registration(NodeId(info.node_id), BootId(info.boot_id), host_of_peer(context.peer()))
        for stream in self._streams:
            stream.node_registered(NodeId(info.node_id))
        if self._parts.event_log is not None:
            report_served(self._parts.event_log, self._parts.nodes)
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
                raise InvalidArgument("read_only is too long", got=len(usage.read_only), limit=limits.MAX_REASON)
        if len(request.checked) > limits.MAX_RANGE_CHECKS:
            raise InvalidArgument("too many range checks", got=len(request.checked), limit=limits.MAX_RANGE_CHECKS)
        if request.HasField("drain"):
            check_progress(request.drain)
        check_usages(request)
        check_findings(request)
        self._check_reaches_index()  # else other servers would not learn of this heartbeat, and hide the node
        request.clock_offset_ms = 0  # servers compute it
        host = host_of_peer(context.peer())
        known = self._parts.nodes.record_heartbeat(request, host)
        if not known:
            await self._parts.index.refresh()
            known = self._parts.nodes.record_heartbeat(request, host)
        self._parts.counters.add(metadata_metrics.HEARTBEATS)
        node_id = NodeId(request.node_id)
        return pb.HeartbeatResponse(
            index_epoch=self._parts.index.epoch,
            register_again=not known,
            drain=self._parts.nodes.drain_order(node_id),
            retention=await self._parts.retention.answer(request) if known else None,
            checks=self._parts.range_checks.messages(request) if known else (),
            membership_version=self._parts.nodes.members_token,
        )

    def _check_reaches_index(self) -> None:
        """Reject the call if this server cannot reach the index, so that the node tries another server."""
        if not self._parts.index.reachable:
            self._parts.counters.add(metadata_metrics.NODES_SENT_ELSEWHERE)
            raise Unavailable("this metadata server cannot reach the index", **{USE_ANOTHER_SERVER: "yes"})

    async def UnregisterNode(self, request: pb.UnregisterNodeRequest, context: object) -> pb.UnregisterNodeResponse:
        return pb.UnregisterNodeResponse(known=await self._parts.node_admin.unregister(request))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: object) -> pb.DrainNodeResponse:
        status = await self._parts.node_admin.drain(request)
        self._order(request.node_id, f"Drain of node {request.node_id} ordered{' with migration' if request.move else ''}.")
        return pb.DrainNodeResponse(status=status)

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: object) -> pb.UndrainNodeResponse:
        status = await self._parts.node_admin.undrain(request)
        self._order(request.node_id, f"Drain of node {request.node_id} cancelled.")
        return pb.UndrainNodeResponse(status=status)

    async def RemoveNode(self, request: pb.RemoveNodeRequest, context: object) -> pb.RemoveNodeResponse:
        known = await self._parts.node_admin.remove(request)
        if known:
            self._order(request.node_id, f"Removal of node {request.node_id} ordered.")
        return pb.RemoveNodeResponse(known=known)

    def _order(self, subject: str, text: str) -> None:
        """Record an operator's order."""
        self._parts.journal.record("order", subject, text, who=caller_name())

    async def LocateBlocks(self, request: pb.LocateBlocksRequest, context: object) -> pb.LocateBlocksResponse:
        return await self._parts.node_admin.locate(request)

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
                "digests and counts must have one value per range, within the ranges of key space",
                digests=count,
                counts=len(request.counts),
                first=request.first_range,
            )
        volume_epoch = await self._parts.nodes.known_volume_epoch(*_volume_of(request))
        parts = self._parts
        ranges = await parts.digests.differing(
            volume_epoch, request.first_range, list(request.digests), list(request.counts), request.max_age_ms / 1000
        )
        parts.counters.add(metadata_metrics.RANGES_COMPARED, count)
        parts.counters.add(metadata_metrics.RANGES_DIFFERING, len(ranges))
        return pb.CompareDigestsResponse(differing_ranges=ranges)

    async def RepairRanges(self, request: pb.RepairRangesRequest, context: object) -> pb.RepairRangesResponse:
        check_id(request.operation_id, "operation_id")
        ranges = set(request.ranges)
        if not 0 < len(request.ranges) <= limits.MAX_REPAIRED_RANGES:
            limit = limits.MAX_REPAIRED_RANGES
            raise InvalidArgument(
                "a call must name at least one range, and not too many", ranges=len(request.ranges), limit=limit
            )
        if max(ranges) >= limits.DIGEST_RANGES:
            raise InvalidArgument("range is out of bounds", range=max(ranges), ranges=limits.DIGEST_RANGES)
        volume_epoch = await self._parts.nodes.known_volume_epoch(*_volume_of(request))
        runs = runs_from_proto(request.blocks)
        added, removed = await self._parts.writes.run(repair_ranges, self._parts.index, volume_epoch, ranges, runs)
        self._parts.counters.add(metadata_metrics.REPLICAS_REPAIRED, added + removed)
        return pb.RepairRangesResponse(added=added, removed=removed)

    async def RegisterNamespace(self, request: pb.RegisterNamespaceRequest, context: object) -> pb.RegisterNamespaceResponse:
        check_id(request.operation_id, "operation_id")
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        if self._parts.index.spec_of(spec.namespace) is None:
            await self._parts.writes.run(self._namespace_owners.register, spec)
        return pb.RegisterNamespaceResponse(namespace_id=spec.namespace)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: object) -> pb.ListNamespacesResponse:
        known = self._parts.index.namespaces()  # here: in another thread it would ask Valkey, which may be away
        return await self._parts.reads.run(self._namespaces.listed, known, tenant())

    async def ListNodes(self, request: pb.ListNodesRequest, context: object) -> pb.ListNodesResponse:
        if len(request.node_ids) > limits.MAX_NODES:
            raise InvalidArgument("too many node ids", got=len(request.node_ids), limit=limits.MAX_NODES)
        return pb.ListNodesResponse(nodes=self._parts.nodes.statuses(request.node_ids))

    async def Lookup(self, request: pb.LookupRequest, context: object) -> bytes:  # see add_to_server
        await self._namespace_owners.check(request.namespace_id)
        return await self._lookups.answer(request)

    async def LookupHeads(self, request: pb.LookupHeadsRequest, context: object) -> pb.LookupHeadsResponse:
        await self._namespace_owners.check(request.namespace_id)
        return await self._lookups.answer_heads(request)

    async def PlanLoad(self, request: pb.PlanLoadRequest, context: object) -> pb.LoadPlan:
        return self._parts.planner.plan(request)

    async def PriceLoad(self, request: pb.PlanLoadRequest, context: object) -> pb.LoadPrice:
        return self._parts.planner.price(request)

    async def ReportLoads(self, request: pb.ReportLoadsRequest, context: object) -> pb.ReportLoadsResponse:
        return self._parts.planner.report(request)

    async def ReplanLoad(self, request: pb.ReplanLoadRequest, context: object) -> pb.LoadPlan:
        return self._parts.planner.replan(request)

    async def ReportEngines(self, request: pb.ReportEnginesRequest, context: object) -> pb.ReportEnginesResponse:
        return self._parts.scheduler.report(request)

    async def AssignRequest(
        self,
        request: pb.AssignRequestRequest,
        context: grpc.aio.ServicerContext[pb.AssignRequestRequest, pb.Assignment],
    ) -> pb.Assignment:
        left_s = context.time_remaining()
        return await self._parts.scheduler.assign(request, MAX_BUDGET_S if left_s is None else left_s)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: object) -> pb.CancelRequestResponse:
        return pb.CancelRequestResponse(known=self._parts.scheduler.cancel(request), engines=self._parts.scheduler.engines)

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: object) -> AsyncIterator[pb.WatchBlocksResponse]:
        parts = self._parts
        await self._namespace_owners.check_all(request.namespace_ids)
        subscription = parts.events.subscribe(request)
        release = self._subscriptions.acquire()
        try:
            async with aclosing(subscription) as messages:
                async for message in messages:
                    yield message
        finally:
            release()

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext[pb.GetStatsRequest, pb.GetStatsResponse]
    ) -> pb.GetStatsResponse:
        stats = self._parts.index.stats()
        answer = pb.GetStatsResponse(
            blocks=stats.blocks,
            index_bytes=stats.bytes,
            index_epoch=self._parts.index.epoch,
            counters={**self._parts.counters.snapshot(), **self._parts.scheduler.gauges()},
        )
        if request.all_servers:
            add_stats(answer, await self._parts.others.ask(_GET_STATS, request, context, pb.GetStatsResponse))
        return answer

    def _check_space_for(self, info: NodeInfo) -> None:
        """Reject a registration if there are too many nodes, or if another live node has the same id or volume.

        A restarted node may register at once if it serves at the same address as before; else after its old boot has missed
        ``MISSED_BEATS`` heartbeats.
        """
        nodes = self._parts.nodes
        view = nodes.view()
        node_id = NodeId(info.node_id)
        if node_id not in view.nodes and len(view.nodes) >= limits.MAX_NODES:
            raise CapacityExceeded("too many nodes", limit=limits.MAX_NODES)
        known = view.nodes.get(node_id)
        if known is not None and known.boot_id != info.boot_id and known.control_address != info.control_address:
            patience_s = MISSED_BEATS * self._parts.heartbeat_interval_ms / 1000
            if nodes.is_alive(node_id) and nodes.heard_within(node_id, patience_s):
                self._parts.counters.add(metadata_metrics.NODE_IDS_REFUSED)
                raise Conflict(
                    "another live node has this id: change node.node_id of one of them, or stop it",
                    node_id=node_id,
                    control_address=known.control_address,
                )
        for volume in info.volumes:
            for owner in view.owners.get(VolumeId(volume.volume_id), ()):
                if owner != node_id and nodes.is_alive(owner):
                    raise Conflict("another live node has this volume", volume_id=volume.volume_id, node_id=owner)


def add_to_server(service: MetadataService, server: grpc.aio.Server) -> None:
    """Register the handlers. The handler of ``Lookup`` returns encoded bytes."""
    add_MetadataServicer_to_server(service, server)
    lookup = grpc.unary_unary_rpc_method_handler(service.Lookup, request_deserializer=pb.LookupRequest.FromString)
    # takes precedence over the generated handler; the type stubs lack this method
    server.add_registered_method_handlers(SERVICE_NAME, {"Lookup": lookup})  # type: ignore[attr-defined]


def _volume_of(request: pb.CompareDigestsRequest | pb.RepairRangesRequest) -> tuple[NodeId, BootId, VolumeId]:
    return (
        NodeId(check_name(request.node_id, "node_id")),
        BootId(check_id(request.boot_id, "boot_id")),
        VolumeId(check_name(request.volume_id, "volume_id")),
    )


def _check_node(info: NodeInfo) -> None:
    """Check a registration.

    Raises:
        InvalidArgument: a field is missing, too long or unknown.
    """
    check_node_id(check_name(info.node_id, "node_id"))
    check_id(info.boot_id, "boot_id")
    if len(info.roles) > len(_ROLES):
        raise InvalidArgument("too many roles", got=len(info.roles), limit=len(_ROLES))
    if unknown := {check_name(role, "roles") for role in info.roles} - _ROLES:
        raise InvalidArgument("unknown role", got=", ".join(sorted(unknown)), known=", ".join(sorted(_ROLES)))
    if not (info.control_address or info.data_address):
        others = info.storage_address or info.local_socket or info.roles or info.mounts
        if others or any(volume.tier != TIER_HBM for volume in info.volumes):
            raise InvalidArgument("only the cache of an engine may lack addresses", node_id=info.node_id)
    else:
        for name in ("control_address", "data_address"):
            host_and_port(check_name(getattr(info, name), name))
    if info.storage_address:
        host_and_port(info.storage_address)
    if info.local_socket:
        check_name(info.local_socket, "local_socket")
    if len(info.volumes) > limits.MAX_VOLUMES_PER_NODE:
        raise InvalidArgument("too many volumes", got=len(info.volumes), limit=limits.MAX_VOLUMES_PER_NODE)
    for volume in info.volumes:
        check_name(volume.volume_id, "volume_id")
        tier_from_proto(volume.tier)
        if volume.uid:
            check_id(volume.uid, "uid")
    if len({volume.volume_id for volume in info.volumes}) != len(info.volumes):
        raise InvalidArgument("duplicate volume id", node_id=info.node_id)
    if info.zone:
        check_name(info.zone, "zone")
    if len(info.mounts) > limits.MAX_VOLUMES_PER_NODE:
        raise InvalidArgument("too many mounts", got=len(info.mounts), limit=limits.MAX_VOLUMES_PER_NODE)
    for mount in info.mounts:
        check_name(mount, "mounts")


def check_findings(report: HeartbeatRequest) -> None:
    """Check the number and size of a node's findings.

    Raises:
        InvalidArgument: too many, or one is too long.
    """
    if len(report.findings) > limits.MAX_NODE_FINDINGS:
        raise InvalidArgument("too many findings", got=len(report.findings), limit=limits.MAX_NODE_FINDINGS)
    for one in report.findings:
        if len(one.facts) > limits.MAX_REASON:
            raise InvalidArgument("the facts of a finding are too long", got=len(one.facts), limit=limits.MAX_REASON)
        if len(one.code) > limits.MAX_CODE_BYTES or len(one.subject.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("the code or subject of a finding is too long", code=one.code[: limits.MAX_CODE_BYTES])
