"""The NodeAdmin service over gRPC: queries and commands of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import kvstore
from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import admin_pb2_grpc
from kvstore.core.cancel_scope import run_in_pool
from kvstore.core.errors import Conflict, InvalidArgument, KVStoreError, NotFound
from kvstore.core.types import NamespaceId, Tier, VolumeId
from kvstore.node.durability.volume_checks import Check, CheckState
from kvstore.node.eviction.operator_requests import (
    EvictionResult,
    evict_down_to,
    evict_namespace,
    generations,
    invalidate,
    note_invalid,
)
from kvstore.node.hints.session_hints import SessionHints
from kvstore.node.rpc.hint_request import apply_to_known
from kvstore.node.rpc.parts import NodeParts
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import EVENTS
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import PREFIX
from kvstore.observe.slow_loads import SHOWN
from kvstore.rpc.codec import check_id, history_to_proto, tier_to_proto
from kvstore.tiers.contract import Volume

Result = TypeVar("Result")
Context = Any  # grpc.aio.ServicerContext, generic in request and response

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["NodeAdmin"].full_name
THREADS: Final = 2
"""Maximum number of concurrent calls. Others wait within their deadlines: operators call, not engines."""
MAX_WAIT_S: Final = 60.0
_CHECK_STATES: Final = {
    CheckState.WAITING: pb.CHECK_STATE_WAITING,
    CheckState.RUNNING: pb.CHECK_STATE_RUNNING,
    CheckState.DONE: pb.CHECK_STATE_DONE,
    CheckState.CANCELLED: pb.CHECK_STATE_CANCELLED,
    CheckState.FAILED: pb.CHECK_STATE_FAILED,
}
_LOAD_SECONDS: Final = f"{PREFIX}node_load_seconds"


class NodeAdminServicer(admin_pb2_grpc.NodeAdminServicer):
    """The handlers. ``proto/kvstore/v1/admin.proto`` documents them."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._began_s = parts.clock.now_s()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-node-admin")

    def close(self) -> None:
        """Shut the pool down without waiting: ``BlockTable.close`` ends the calls in it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._parts.checks.close()

    async def _run_in_pool(self, work: Callable[[], Result]) -> Result:
        return await run_in_pool(self._pool, work)

    # ---------------------------------------------------------------- queries
    async def DescribeNode(self, request: pb.DescribeNodeRequest, context: Context) -> pb.DescribeNodeResponse:  # noqa: N802, ARG002
        parts = self._parts
        blocks, waiting = parts.table.counts()
        return pb.DescribeNodeResponse(
            version=kvstore.__version__,
            uptime_ms=int((parts.clock.now_s() - self._began_s) * 1000),
            volumes=self._volumes(),
            sessions=parts.sessions.count(),
            blocks=blocks,
            write_back_waiting_blocks=waiting,
            publish_waiting_events=parts.replica_log.waiting(),
            staging=[
                pb.StagingDescription(name=name, used_bytes=buffer.used_bytes, waiting_loads=buffer.waiting)
                for name, buffer in parts.buffers.items()
            ],
            cap_bytes_per_s=parts.traffic.cap_bytes_per_s,
            io_engines=list(parts.io_engines()),
            settings=[
                pb.SettingInForce(key=one.key, value=one.value, source=one.source, detail=one.detail, description=one.description)
                for one in parts.config.settings
            ],
            links=[
                pb.LinkTraffic(network=network, received_bytes=received, sent_bytes=sent)
                for network, (received, sent) in parts.links.traffic().items()
            ],
            loads=_load_times(parts.counters),
            hints=_tenant_hints(parts.hints),
            hints_off=parts.config.hint_share == 0,
            read_ahead_off=parts.config.read_ahead_bytes == 0,
        )

    def _volumes(self) -> list[pb.VolumeDescription]:
        table, by_tenant = self._parts.table, self._parts.enforcer.by_tenant
        described = [_volume(table.dram)]
        described[0].tenants.extend(by_tenant(table.residency.arena_evictor.held_blocks, Tier.DRAM))
        for node_volume in table.node_volumes:
            described.append(
                _volume(node_volume.volume, self._parts.health.why_not_writable(node_volume), node_volume.quarantined)
            )
            described[-1].tenants.extend(by_tenant(table.residency.volume_evictor.held_on(node_volume), Tier.NVME))
        return described

    async def DescribeUsage(self, request: pb.DescribeUsageRequest, context: Context) -> pb.DescribeUsageResponse:  # noqa: N802, ARG002
        namespace = self._namespace(request.namespace_id) if request.namespace_id else None
        if request.namespace_id and namespace is None:
            return pb.DescribeUsageResponse()
        return await self._run_in_pool(lambda: self._usage(namespace))

    def _usage(self, only: NodeNamespace | None) -> pb.DescribeUsageResponse:
        """Count the blocks of a snapshot. A block that moves at the same time counts in its old or its new tier."""
        table = self._parts.table
        found: Counter[tuple[NodeNamespace, Volume]] = Counter()
        for block in table.snapshot():
            if only is None or block.namespace is only:
                if block.dram is not None:
                    found[block.namespace, table.dram] += 1
                node_volume = block.nvme_volume
                if node_volume is not None:
                    found[block.namespace, node_volume.volume] += 1
        return pb.DescribeUsageResponse(
            usages=[
                pb.NamespaceUsage(
                    namespace_id=namespace.namespace_id,
                    volume_id=volume.volume_id,
                    tier=tier_to_proto(volume.tier),
                    blocks=count,
                    bytes=count * namespace.shape.block_bytes,
                )
                for (namespace, volume), count in found.items()
            ]
        )

    async def ListSlowLoads(self, request: pb.ListSlowLoadsRequest, context: Context) -> pb.ListSlowLoadsResponse:  # noqa: N802, ARG002
        records = self._parts.timings.recent.slowest(most=min(request.limit or SHOWN, SHOWN))
        return pb.ListSlowLoadsResponse(
            loads=[
                pb.SlowLoad(
                    request_id=record.request_id,
                    seconds=record.seconds,
                    blocks=record.blocks,
                    hit_blocks=record.hit_blocks,
                    reason=record.reason,
                    figures={name: float(value) for name, value in record.parts.items() if isinstance(value, int | float)},
                    ago_seconds=record.ago_s,
                    action=record.action,
                )
                for record in records
            ]
        )

    async def DescribeHistory(self, request: pb.DescribeHistoryRequest, context: Context) -> pb.DescribeHistoryResponse:  # noqa: N802, ARG002
        return await self._run_in_pool(lambda: history_to_proto(self._parts.history, request))

    # ---------------------------------------------------------------- commands
    async def EvictBlocks(self, request: pb.EvictBlocksRequest, context: Context) -> pb.EvictBlocksResponse:  # noqa: N802, ARG002
        check_id(request.operation_id, "operation_id")  # a retry evicts again, which does no harm
        table = self._parts.table
        if request.namespace_id and request.down_to_bytes:
            raise InvalidArgument("namespace_id and down_to_bytes exclude each other")
        if not request.namespace_id and not request.volume_id:
            raise InvalidArgument("namespace_id or volume_id is required")
        node_volume = self._node_volume(request.volume_id) if request.volume_id else None
        in_dram = not request.volume_id or node_volume is None
        if not request.namespace_id:
            done = await self._run_in_pool(lambda: evict_down_to(table, node_volume, request.down_to_bytes))
        else:
            namespace = self._namespace(request.namespace_id)
            if namespace is None:
                return pb.EvictBlocksResponse()
            nvme = not request.volume_id or node_volume is not None
            done = await self._run_in_pool(lambda: evict_namespace(table, namespace, node_volume, dram=in_dram, nvme=nvme))
        used = 0
        if request.volume_id:
            used = (table.dram if node_volume is None else node_volume.volume).usage().used_bytes
        return pb.EvictBlocksResponse(evicted_blocks=done.blocks, kept_blocks=done.kept, used_bytes=used)

    async def InvalidateNamespace(  # noqa: N802
        self, request: pb.InvalidateNamespaceRequest, context: Context
    ) -> pb.InvalidateNamespaceResponse:
        check_id(request.operation_id, "operation_id")
        table = self._parts.table
        begun = generations(table)  # before the namespace is looked up: blocks that are stored from now on stay
        namespace = self._namespace(request.namespace_id)
        done = EvictionResult(0, 0)
        if namespace is None:  # its blocks left the volumes, but not all were overwritten
            await self._run_in_pool(lambda: note_invalid(table, NamespaceId(request.namespace_id), begun))
        else:
            left_s = context.time_remaining()
            wait_s = min(request.wait_ms / 1000, MAX_WAIT_S, MAX_WAIT_S if left_s is None else left_s)
            deadline_s = self._parts.clock.now_s() + wait_s
            done = await self._run_in_pool(lambda: invalidate(table, namespace, deadline_s))
        return pb.InvalidateNamespaceResponse(dropped_blocks=done.blocks, kept_blocks=done.kept)

    async def HintSession(self, request: pb.HintSessionRequest, context: Context) -> pb.HintSessionResponse:  # noqa: N802, ARG002
        parts, hint = self._parts, request.hint
        try:
            namespace = self._namespace(request.namespace_id)
            result = await parts.hint_calls.run(lambda: apply_to_known(parts.hints, namespace, hint))
        except KVStoreError:
            parts.counters.add(node_metrics.HINTS_REJECTED)
            raise
        return pb.HintSessionResponse(known=result is not None, result=result)

    async def CheckVolume(self, request: pb.CheckVolumeRequest, context: Context) -> pb.VolumeCheck:  # noqa: N802, ARG002
        operation_id = check_id(request.operation_id, "operation_id")
        node_volume = self._durable(request.volume_id)
        return self._check_message(node_volume, self._parts.checks.begin(node_volume, operation_id, request.bytes_per_s))

    async def DescribeCheck(self, request: pb.DescribeCheckRequest, context: Context) -> pb.VolumeCheck:  # noqa: N802, ARG002
        node_volume = self._durable(request.volume_id)
        return self._check_message(node_volume, self._parts.checks.last(node_volume))

    async def CancelCheck(self, request: pb.CancelCheckRequest, context: Context) -> pb.VolumeCheck:  # noqa: N802, ARG002
        node_volume = self._durable(request.volume_id)
        return self._check_message(node_volume, self._parts.checks.cancel(node_volume))

    async def SetTrafficCap(self, request: pb.SetTrafficCapRequest, context: Context) -> pb.SetTrafficCapResponse:  # noqa: N802, ARG002
        expected = request.expected if request.HasField("expected") else None
        before = self._parts.traffic.change_cap(request.bytes_per_s, expected)
        return pb.SetTrafficCapResponse(bytes_per_s=request.bytes_per_s, before=before)

    async def CompareIndex(self, request: pb.CompareIndexRequest, context: Context) -> pb.CompareIndexResponse:  # noqa: N802, ARG002
        publisher = self._parts.publisher
        if publisher is None:
            raise Conflict("this node has no metadata server; set node.metadata")
        return pb.CompareIndexResponse(repaired_ranges=await self._run_in_pool(publisher.compare_now))

    # ---------------------------------------------------------------- helpers
    def _namespace(self, namespace_id: bytes) -> NodeNamespace | None:
        return self._parts.namespaces.find(NamespaceId(check_id(namespace_id, "namespace_id")))

    def _durable(self, volume_id: str) -> NodeVolume:
        """Return a durable volume.

        Raises:
            NotFound: the node has no such volume.
            InvalidArgument: the volume is the arena.
        """
        node_volume = self._node_volume(volume_id)
        if node_volume is None:
            raise InvalidArgument("the arena cannot be checked; name a durable volume", volume_id=volume_id[:64])
        return node_volume

    def _check_message(self, node_volume: NodeVolume, check: Check | None) -> pb.VolumeCheck:
        volume_id = node_volume.volume_id
        if check is None:
            return pb.VolumeCheck(volume_id=volume_id, state=pb.CHECK_STATE_NONE)
        now_s = self._parts.clock.now_s()
        return pb.VolumeCheck(
            volume_id=volume_id,
            state=_CHECK_STATES[check.state],
            blocks=check.blocks,
            checked_blocks=check.checked_blocks,
            good_blocks=check.good,
            bad_blocks=check.bad,
            unreadable_blocks=check.unreadable,
            gone_blocks=check.gone,
            rewritten_blocks=check.rewritten_blocks,
            checked_bytes=check.checked_bytes,
            bytes_per_s=check.bytes_per_s,
            began_ago_ms=int((now_s - check.began_s) * 1000),
            took_ms=int(((now_s if check.ended_s is None else check.ended_s) - check.began_s) * 1000),
            why=check.why,
        )

    def _node_volume(self, volume_id: str) -> NodeVolume | None:
        """Return a durable volume; None: the arena.

        Raises:
            NotFound: the node has no such volume.
        """
        if VolumeId(volume_id) == self._parts.table.dram.volume_id:
            return None
        for node_volume in self._parts.table.node_volumes:
            if node_volume.volume_id == volume_id:
                return node_volume
        raise NotFound("this node has no such volume", volume_id=volume_id[:64])


def _tenant_hints(hints: SessionHints) -> list[pb.TenantHints]:
    """Return the blocks that hints of each tenant protect, and counts of their effects."""
    sessions, protected = hints.sessions(), hints.protected_bytes()
    return [
        pb.TenantHints(
            tenant=tenant,
            sessions=sessions.get(tenant, 0),
            protected_bytes=protected.get(tenant, 0),
            keeps=totals.keeps,
            ends=totals.ends,
            beyond_limit_blocks=totals.beyond_limit_blocks,
            dropped_blocks=totals.dropped_blocks,
        )
        for tenant, totals in sorted(hints.totals().items())
    ]


def _load_times(counters: Counters) -> list[pb.LoadTimes]:
    """Return the distributions of ``node_load_seconds``."""
    return [
        pb.LoadTimes(
            reach=EVENTS[name].events[name][0], bounds_seconds=found.bounds, counts=found.counts, total_seconds=found.total
        )
        for name, found in counters.distributions().items()
        if name in EVENTS and EVENTS[name].name == _LOAD_SECONDS
    ]


def _volume(volume: Volume, read_only: str = "", quarantined: int = 0) -> pb.VolumeDescription:
    usage = volume.usage()
    return pb.VolumeDescription(
        volume_id=volume.volume_id,
        tier=tier_to_proto(volume.tier),
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        blocks=usage.blocks,
        read_only=read_only,
        quarantined_blocks=quarantined,
    )
