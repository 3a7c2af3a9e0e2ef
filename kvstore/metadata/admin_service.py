# ruff: noqa: N802, ARG002  # names and signatures of the handlers are gRPC's
"""Handlers of the MetadataAdmin service, for operators who inspect and change the metadata server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

import kvstore
from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import admin_pb2_grpc
from kvproto.v1.common_pb2 import BANDWIDTH_SOURCE_UNSPECIFIED, BandwidthSource, CacheSpec
from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict, NotFound
from kvstore.core.types import NamespaceId
from kvstore.dualpath.contract import LoadPlan, NodeState, PlanUnderWay
from kvstore.dualpath.planner import DECISIONS_KEPT
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.cluster.event_journal import EventJournal
from kvstore.metadata.cluster.health_monitor import HealthMonitor
from kvstore.metadata.cluster.other_servers import OtherServers
from kvstore.metadata.cluster.server_sums import add_namespaces, add_servers, merged_events, merged_histories
from kvstore.metadata.cluster.shards import describe_shards
from kvstore.metadata.indexing.explain import describe_blocks
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.lookup import Lookups
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.server_table import ServerTable
from kvstore.metadata.membership.view import is_engine_cache
from kvstore.metadata.retention.policies import (
    RetentionPolicies,
    format_quota,
    format_rule,
    quota_from_proto,
    rule_from_proto,
)
from kvstore.metadata.scheduling.path_policy import PathPolicyOrder
from kvstore.metadata.scheduling.planner_service import SIDES, PlannerService
from kvstore.observe.history import INTERVAL_S, History
from kvstore.process.effective_config import EffectiveSetting
from kvstore.rpc.auth.interceptor import caller_name
from kvstore.rpc.codec import check_id, history_to_proto, keys_from_packed

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["MetadataAdmin"].full_name
MOST_NAMESPACES: Final = 1_000
MOST_LIVE: Final = 1_000
MOST_EVENTS: Final = 1_000
MOST_FINDINGS: Final = 100
Context = Any
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class MetadataAdminParts:
    """Components that the handlers use.

    Args:
        index: the index.
        nodes: registrations and liveness.
        reads: thread for long reads of the index.
        lookups: statistics of lookups.
        planner: load plans.
        clock: clock of the planner.
        path_policy: the path policy in force.
        settings: the effective configuration.
        rebuild: drops the index and creates a new one.
        retention: quotas and retention rules.
        health: findings about the whole store.
        history: figures of the last hour.
        journal: cluster events; receives operators' orders.
        servers: the metadata servers that serve the index.
        others: asks the other ones.
    """

    index: PrefixIndex
    nodes: NodeTable
    reads: IndexThread
    lookups: Lookups
    planner: PlannerService
    clock: Clock
    path_policy: PathPolicyOrder
    settings: Sequence[EffectiveSetting]
    rebuild: Callable[[], None]
    retention: RetentionPolicies
    health: HealthMonitor
    history: History
    journal: EventJournal
    servers: ServerTable
    others: OtherServers


class MetadataAdminServicer(admin_pb2_grpc.MetadataAdminServicer):
    """The handlers. ``proto/kvstore/v1/admin.proto`` documents each method."""

    def __init__(self, parts: MetadataAdminParts) -> None:
        self._parts = parts
        self._began_s = parts.clock.now_s()

    # ---- inspection ----
    async def DescribeServer(self, request: pb.DescribeServerRequest, context: Context) -> pb.DescribeServerResponse:
        parts = self._parts
        stats = parts.index.stats()
        statuses = [status for status in parts.nodes.statuses() if not is_engine_cache(status.node)]
        alive = sum(status.alive for status in statuses)
        refused = sum(bool(status.refused) for status in statuses)
        answer = pb.DescribeServerResponse(
            version=kvstore.__version__,
            index_epoch=parts.index.epoch,
            blocks=stats.blocks,
            index_bytes=stats.bytes,
            namespaces=len(parts.index.namespaces()),
            nodes_alive=alive,
            nodes_silent=len(statuses) - alive - refused,
            nodes_refused=refused,
            live_plans=len(parts.planner.planner),
            uptime_ms=int((parts.clock.now_s() - self._began_s) * 1000),
            path_policy=parts.planner.default_policy,
            settings=[
                pb.SettingInForce(key=one.key, value=one.value, source=one.source, detail=one.detail, description=one.description)
                for one in parts.settings
            ],
            findings=[one.to_proto() for one in parts.health.findings()],
        )
        add_servers(answer, await self._ask("DescribeServer", request, context, pb.DescribeServerResponse), MOST_FINDINGS)
        return answer

    async def _ask(self, name: str, request: Message, context: Context, kind: type[M]) -> list[M]:
        """Ask the other metadata servers the same."""
        return await self._parts.others.ask(f"/{SERVICE_NAME}/{name}", request, context, kind)

    async def DescribeNamespaces(self, request: pb.DescribeNamespacesRequest, context: Context) -> pb.DescribeNamespacesResponse:
        entries = self._parts.index.namespaces()
        if request.namespace_id:
            selected = check_id(request.namespace_id, "namespace_id")
            entries = [entry for entry in entries if entry[0] == selected]
        elif request.after:
            after = check_id(request.after, "after")
            found = next((position for position, entry in enumerate(entries) if entry[0] == after), None)
            if found is None:
                raise NotFound("the namespace in after is unknown: list from the beginning", namespace=after.hex())
            entries = entries[found + 1 :]
        limit = min(request.limit or MOST_NAMESPACES, MOST_NAMESPACES)
        answer = pb.DescribeNamespacesResponse(
            namespaces=[self._namespace(namespace, spec) for namespace, spec in entries[:limit]], more=len(entries) > limit
        )
        add_namespaces(answer, await self._ask("DescribeNamespaces", request, context, pb.DescribeNamespacesResponse))
        return answer

    def _namespace(self, namespace: NamespaceId, spec: bytes) -> pb.NamespaceDescription:
        stats, rule = self._parts.lookups.stats(namespace), self._parts.retention.rule(namespace)
        return pb.NamespaceDescription(
            namespace_id=namespace,
            spec=CacheSpec.FromString(spec),
            lookups=stats.lookups,
            asked_blocks=stats.keys,
            hit_blocks=stats.hit_blocks,
            ttl_ms=rule.ttl_ms,
            kept=rule.kept,
            copies=rule.copies,
        )

    async def DescribeBlocks(self, request: pb.DescribeBlocksRequest, context: object) -> pb.DescribeBlocksResponse:
        namespace = NamespaceId(check_id(request.namespace_id, "namespace_id")) if request.namespace_id else None
        keys = keys_from_packed(request.keys)
        return await describe_blocks(self._parts.index, self._parts.nodes, self._parts.reads, namespace, keys)

    async def DescribePlanning(self, request: pb.DescribePlanningRequest, context: object) -> pb.DescribePlanningResponse:
        service, now_s = self._parts.planner, self._parts.clock.now_s()
        planner = service.planner
        most = min(request.live, MOST_LIVE)
        live = planner.live(most + 1, request.after_plan)
        kept = min(request.decisions, DECISIONS_KEPT)
        states = [planner.queues.state(node, now_s) for node in sorted(planner.queues.nodes())]
        return pb.DescribePlanningResponse(
            path_policy=service.default_policy,
            configured_policy=self._parts.path_policy.configured,
            live=[_live(plan, now_s) for plan in live[:most]],
            more=len(live) > most,
            decisions=[_decision(plan, now_s) for plan in reversed(planner.decisions()[-kept:] if kept else [])],
            queues=[_queue(state, *service.sources(state.node, now_s)) for state in states if state is not None],
        )

    async def DescribeTenants(self, request: pb.DescribeTenantsRequest, context: object) -> pb.DescribeTenantsResponse:
        return self._parts.retention.describe(request)

    async def ListNamespaceRules(self, request: pb.ListNamespaceRulesRequest, context: object) -> pb.ListNamespaceRulesResponse:
        return pb.ListNamespaceRulesResponse(rules=self._parts.retention.rules())

    async def DescribeHistory(self, request: pb.DescribeHistoryRequest, context: Context) -> pb.DescribeHistoryResponse:
        mine = history_to_proto(self._parts.history, request)
        others = await self._ask("DescribeHistory", request, context, pb.DescribeHistoryResponse)
        return merged_histories([mine, *others], request.step_seconds or INTERVAL_S) if others else mine

    async def ListClusterEvents(self, request: pb.ListClusterEventsRequest, context: Context) -> pb.ListClusterEventsResponse:
        oldest_s = time.time() - request.since_ms / 1000 if request.since_ms else 0.0
        events = await asyncio.to_thread(self._parts.journal.read)
        found = [one for one in events if one.id > request.after_id and one.at_s >= oldest_s]
        limit = min(request.limit or MOST_EVENTS, MOST_EVENTS)
        mine = pb.ListClusterEventsResponse(
            events=[pb.ClusterEvent(**asdict(one)) for one in found[:limit]], more=len(found) > limit
        )
        others = await self._ask("ListClusterEvents", request, context, pb.ListClusterEventsResponse)
        return merged_events([mine, *others], limit) if others else mine

    async def DescribeShards(self, request: pb.DescribeShardsRequest, context: object) -> pb.DescribeShardsResponse:
        return describe_shards(self._parts.index, self._parts.servers)

    def _order(self, subject: str, text: str) -> None:
        """Record an operator's order."""
        self._parts.journal.record("order", subject, text, who=caller_name())

    # ---- changes ----
    async def SetTenantQuota(self, request: pb.SetTenantQuotaRequest, context: object) -> pb.SetTenantQuotaResponse:
        answer = await self._parts.retention.set_quota(request)
        quota, before = format_quota(quota_from_proto(answer.quota)), format_quota(quota_from_proto(answer.before))
        self._order(request.tenant or "(default)", f"Quota of the tenant set: {quota} (before: {before}).")
        return answer

    async def SetNamespaceRule(self, request: pb.SetNamespaceRuleRequest, context: object) -> pb.SetNamespaceRuleResponse:
        answer = await self._parts.retention.set_rule(request)
        rule, before = format_rule(rule_from_proto(answer.rule)), format_rule(rule_from_proto(answer.before))
        self._order(answer.rule.namespace_id.hex(), f"Retention rule of the namespace set: {rule} (before: {before}).")
        return answer

    async def SetPathPolicy(self, request: pb.SetPathPolicyRequest, context: object) -> pb.SetPathPolicyResponse:
        expected = request.expected if request.HasField("expected") else None
        before = await self._parts.path_policy.set(request.policy, expected)
        self._order("", f"Path policy set: {request.policy} (before: {before}).")
        return pb.SetPathPolicyResponse(policy=request.policy, before=before)

    async def RebuildIndex(self, request: pb.RebuildIndexRequest, context: object) -> pb.RebuildIndexResponse:
        expected, epoch = check_id(request.expected_epoch, "expected_epoch"), self._parts.index.epoch
        if expected != epoch:
            raise Conflict(
                "the index epoch differs from the expected one: the index was rebuilt already",
                epoch=epoch.hex(),
                expected=expected.hex(),
            )
        self._order("", f"Rebuild of the index requested (dropped epoch {epoch.hex()}).")
        self._parts.rebuild()
        return pb.RebuildIndexResponse(dropped_epoch=epoch)


def _queue(
    state: NodeState,
    storage_source: BandwidthSource = BANDWIDTH_SOURCE_UNSPECIFIED,
    compute_source: BandwidthSource = BANDWIDTH_SOURCE_UNSPECIFIED,
) -> pb.ReadQueue:
    return pb.ReadQueue(
        node_id=state.node,
        alive=state.alive,
        pending_bytes=state.pending_bytes,
        pending_tokens=state.pending_tokens,
        storage_bytes_per_s=state.snic,
        compute_bytes_per_s=state.cnic,
        sending_bytes=state.sending_bytes,
        receiving_bytes=state.receiving_bytes,
        storage_source=storage_source,
        compute_source=compute_source,
    )


def _live(plan: PlanUnderWay, now_s: float) -> pb.LivePlan:
    return pb.LivePlan(
        plan_id=plan.plan_id,
        attempt=plan.attempt,
        policy=plan.policy,
        prefill_node=plan.request.prefill_node,
        decode_node=plan.request.decode_node or "",
        blocks=plan.request.blocks,
        block_bytes=plan.request.block_bytes,
        parts=[
            pb.LivePlanPart(
                index=part.index,
                start=part.start,
                count=part.count,
                side=SIDES[part.side],
                node_id=part.node,
                left=left or 0,
                failed=left is None,
            )
            for part, left in plan.parts
        ],
        expires_in_ms=max(0, int((plan.deadline - now_s) * 1000)),
    )


def _decision(plan: LoadPlan, now_s: float) -> pb.PlanDecision:
    return pb.PlanDecision(
        plan_id=plan.plan_id,
        attempt=plan.attempt,
        ago_ms=max(0, int((now_s - plan.reasons.now) * 1000)),
        policy=plan.reasons.policy,
        prefill_node=plan.request.prefill_node,
        decode_node=plan.request.decode_node or "",
        blocks=plan.request.blocks,
        block_bytes=plan.request.block_bytes,
        predicted_seconds=plan.reasons.predicted_seconds,
        considered=[_queue(state) for state in plan.reasons.nodes],
        excluded=plan.reasons.excluded,
        parts=[
            pb.PlannedPart(index=part.index, start=part.start, count=part.count, side=SIDES[part.side], node_id=part.node)
            for part in plan.parts
        ],
    )
