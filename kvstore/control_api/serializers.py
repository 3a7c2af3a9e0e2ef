"""Conversion of gRPC responses to the JSON schemas. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, get_args

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import common_pb2, metadata_pb2
from kvproto.v1.node_pb2 import HintResponse
from kvstore.control_api.schemas import configuration
from kvstore.control_api.schemas import health as health_models
from kvstore.control_api.schemas import hints as hint_models
from kvstore.control_api.schemas import retention as retention_models
from kvstore.control_api.schemas import shards as shard_models
from kvstore.control_api.schemas import store as models
from kvstore.control_api.schemas.base import ResponseModel
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Tier
from kvstore.health.findings import HealthFinding, overall
from kvstore.observe.fault_counters import faults
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metric_definitions import transport as transport_metrics

_STATES: Final[Mapping[int, models.BlockStateName]] = {
    pb.BLOCK_STATE_HELD: "held",
    pb.BLOCK_STATE_SILENT: "silent",
    pb.BLOCK_STATE_GONE: "gone",
    pb.BLOCK_STATE_MISPLACED: "misplaced",
    pb.BLOCK_STATE_UNKNOWN: "unknown",
}
_NODE_STATES: Final[Mapping[int, models.NodeStateName]] = {
    common_pb2.NODE_STATE_DRAINING: "draining",
    common_pb2.NODE_STATE_DRAINED: "drained",
    common_pb2.NODE_STATE_DRAIN_BLOCKED: "drain_blocked",
}
"""All other states are ``active``."""
_SIDES: Final[Mapping[int, models.SideName]] = {
    metadata_pb2.READ_SIDE_PREFILL: "prefill",
    metadata_pb2.READ_SIDE_DECODE: "decode",
    metadata_pb2.READ_SIDE_RELAY: "relay",
}


_Model = TypeVar("_Model", bound=ResponseModel)


def _shown(model: type[_Model], found: object, **given: Any) -> _Model:  # noqa: ANN401
    """Make a response from the equally named fields of a message, and from those that are given."""
    return model(**{name: getattr(found, name) for name in model.model_fields if name not in given}, **given)


def tier_name(tier: int) -> models.TierName:
    """Name of a tier."""
    return cast("models.TierName", Tier(tier).name.lower())


def shown_id(value: bytes) -> str | None:
    """Hexadecimal text; None if empty."""
    return value.hex() or None


# ---- nodes and volumes ----
SOURCES: Final[dict[int, models.BandwidthSource | None]] = {
    common_pb2.BANDWIDTH_SOURCE_UNSPECIFIED: None,
    common_pb2.BANDWIDTH_SOURCE_CONFIGURED: "configured",
    common_pb2.BANDWIDTH_SOURCE_MEASURED: "measured",
    common_pb2.BANDWIDTH_SOURCE_LINK: "link",
    common_pb2.BANDWIDTH_SOURCE_ASSUMED: "assumed",
}


def node(status: metadata_pb2.NodeStatus, queue: pb.ReadQueue | None) -> models.Node:
    """A node with its links as the planner sees them."""
    return models.Node(**node_fields(status, queue))


def _configured(bytes_per_s: int, source: int) -> int:
    return 0 if source == common_pb2.BANDWIDTH_SOURCE_LINK else bytes_per_s


def node_fields(status: metadata_pb2.NodeStatus, queue: pb.ReadQueue | None) -> dict[str, Any]:
    """Fields of ``models.Node``."""
    info = status.node
    storage_address = info.storage_address or info.data_address
    storage = models.Nic(
        network="storage",
        address=storage_address,
        configured_bytes_per_s=_configured(info.storage_bytes_per_s, info.storage_source),
        planned_bytes_per_s=None if queue is None else queue.storage_bytes_per_s,
        planned_source=None if queue is None else SOURCES[queue.storage_source],
        pending_bytes=0 if queue is None else queue.pending_bytes,
        pending_tokens=0 if queue is None else queue.pending_tokens,
    )
    compute = models.Nic(
        network="compute",
        address=info.data_address,
        configured_bytes_per_s=_configured(info.compute_bytes_per_s, info.compute_source),
        planned_bytes_per_s=None if queue is None else queue.compute_bytes_per_s,
        planned_source=None if queue is None else SOURCES[queue.compute_source],
        pending_bytes=0 if queue is None else queue.sending_bytes + queue.receiving_bytes,
        pending_tokens=None,
    )
    return {
        **participation(status).model_dump(),
        "alive": status.alive,
        "stopped": status.stopped,
        "refused": status.refused or None,
        "heartbeat_age_s": status.heartbeat_age_ms / 1000,
        "boot_id": info.boot_id.hex(),
        "roles": list(info.roles),
        "control_address": info.control_address,
        "data_address": info.data_address,
        "storage_address": storage_address,
        "nics": [storage, compute],
        "volumes": [volume.volume_id for volume in info.volumes],
        "mounts": list(info.mounts),
    }


def participation(status: metadata_pb2.NodeStatus) -> models.Participation:
    """State of a node, and progress of its drain."""
    drain = None
    if status.HasField("order"):
        said = status.drain
        drain = _shown(models.Drain, said, move=status.order.move, why=said.why or None)
    return models.Participation(node_id=status.node.node_id, state=_NODE_STATES.get(status.state, "active"), drain=drain)


def node_process(found: pb.DescribeNodeResponse) -> models.NodeProcess:
    """State that a node reports."""
    return _shown(
        models.NodeProcess,
        found,
        uptime_s=found.uptime_ms / 1000,
        staging=[_shown(models.Staging, one) for one in found.staging],
        traffic_cap_bytes_per_s=found.cap_bytes_per_s if found.HasField("cap_bytes_per_s") else None,
        io_engines=list(found.io_engines),
        hinted_sessions=sum(one.sessions for one in found.hints),
        hinted_bytes=sum(one.protected_bytes for one in found.hints),
    )


def activity(node_id: str, node: pb.DescribeNodeResponse, counters: Mapping[str, int]) -> models.Activity:
    """Totals of a node."""
    return models.Activity(
        node_id=node_id,
        uptime_s=node.uptime_ms / 1000,
        links=[
            models.LinkTraffic(
                network="storage" if link.network == "storage" else "compute",
                received_bytes=link.received_bytes,
                sent_bytes=link.sent_bytes,
            )
            for link in node.links
        ],
        data_plane=models.DataPlane(
            served_bytes=counters.get(transport_metrics.BYTES_SENT, 0),
            taken_bytes=counters.get(transport_metrics.BYTES_RECEIVED, 0),
            fetched_bytes=counters.get(transport_metrics.PEER_BYTES_RECEIVED, 0),
            written_bytes=counters.get(transport_metrics.PEER_BYTES_SENT, 0),
        ),
        loads=[
            models.LoadTimes(
                reach=cast("models.ReachName", one.reach),
                total_s=one.total_seconds,
                buckets=[
                    models.LoadBucket(up_to_s=bound, loads=loads)
                    for bound, loads in zip([*one.bounds_seconds, None], one.counts, strict=True)
                ],
            )
            for one in node.loads
            if one.reach in get_args(models.ReachName) and len(one.counts) == len(one.bounds_seconds) + 1
        ],
        loaded=models.LoadedBytes(
            dram=counters.get(node_metrics.LOADED_BYTES["dram"], 0),
            nvme=counters.get(node_metrics.LOADED_BYTES["nvme"], 0),
            peer=counters.get(node_metrics.LOADED_BYTES["peer"], 0),
        ),
        read_ahead=models.ReadAheadTotals(
            read_bytes=counters.get(node_metrics.READ_AHEAD_BYTES, 0),
            unused_bytes=counters.get(node_metrics.READ_AHEAD_UNUSED_BYTES, 0),
            refused=counters.get(node_metrics.READ_AHEAD_REFUSED, 0),
        ),
        faults=[models.Fault(metric=metric.name, what=metric.help, total=total) for metric, total in faults(counters)],
        hints=[_shown(models.TenantHints, one) for one in node.hints],
    )


def is_arriving(status: metadata_pb2.NodeStatus, volume_id: str) -> bool:
    """Whether the inventory of a live node's volume, or a part of it, has yet to arrive."""
    return status.alive and volume_id in status.arriving


def volume(
    status: metadata_pb2.NodeStatus, info: common_pb2.VolumeInfo, described: pb.DescribeNodeResponse | None
) -> models.Volume:
    """A volume with current values, or those of the last heartbeat if the node does not answer."""
    beat = next((usage for usage in status.usages if usage.volume_id == info.volume_id), None)
    volumes = () if described is None else described.volumes
    now = next((one for one in volumes if one.volume_id == info.volume_id), None)
    said = now or beat
    return models.Volume(
        volume_id=info.volume_id,
        node_id=status.node.node_id,
        tier=tier_name(info.tier),
        node_alive=status.alive,
        capacity_bytes=info.capacity_bytes,
        used_bytes=0 if said is None else said.used_bytes,
        blocks=0 if said is None else said.blocks,
        arriving=is_arriving(status, info.volume_id),
        read_only=(said.read_only or None) if said is not None else None,
        quarantined_blocks=None if now is None else now.quarantined_blocks,
        tenants=None
        if now is None
        else [
            models.VolumeTenant(tenant=None if one.unknown else one.tenant, bytes=one.dram_bytes + one.nvme_bytes)
            for one in now.tenants
        ],
    )


# ---- tenants ----
def tenant(found: pb.TenantDescription) -> retention_models.Tenant:
    """A tenant with usage and quota."""
    bound = quota(found.tenant, found.quota)
    return retention_models.Tenant(
        tenant=found.tenant,
        dram=retention_models.TenantTier(held_bytes=found.dram_bytes, quota_bytes=bound.dram_bytes),
        nvme=retention_models.TenantTier(held_bytes=found.nvme_bytes, quota_bytes=bound.nvme_bytes),
        nodes=found.nodes,
    )


def quota(name: str, found: pb.TenantQuota) -> retention_models.Quota:
    """Quota of a tenant."""
    return retention_models.Quota(
        tenant=name,
        dram_bytes=found.dram_bytes if found.HasField("dram_bytes") else None,
        nvme_bytes=found.nvme_bytes if found.HasField("nvme_bytes") else None,
    )


def unreached(failed: Mapping[str, KVStoreError]) -> list[models.UnreachableNode]:
    """Nodes that did not answer, with the reasons."""
    return [
        models.UnreachableNode(node_id=node_id, kind=error.kind.value, detail=error.message)
        for node_id, error in sorted(failed.items())
    ]


# ---- namespaces ----
def spec(found: common_pb2.CacheSpec) -> models.Spec:
    """A spec without its salt, which is a shared secret."""
    return _shown(models.Spec, found, salted=bool(found.salt))


def namespace(found: pb.NamespaceDescription) -> models.Namespace:
    """A namespace with its lookup counts."""
    return _shown(
        models.Namespace,
        found,
        namespace_id=found.namespace_id.hex(),
        spec=spec(found.spec),
        hit_ratio=found.hit_blocks / found.asked_blocks if found.asked_blocks else None,
        ttl_s=found.ttl_ms / 1000 or None,
        copies=found.copies or 1,
    )


def rule(found: metadata_pb2.NamespaceRule) -> retention_models.Rule:
    """Retention rule of a namespace."""
    return retention_models.Rule(
        namespace_id=found.namespace_id.hex(),
        ttl_s=found.ttl_ms / 1000 or None,
        kept=found.kept,
        copies=found.copies or 1,
    )


def rule_to_proto(rule: retention_models.Rule) -> metadata_pb2.NamespaceRule:
    """Encode a retention rule."""
    return metadata_pb2.NamespaceRule(
        namespace_id=bytes.fromhex(rule.namespace_id),
        ttl_ms=round((rule.ttl_s or 0) * 1000),
        kept=rule.kept,
        copies=rule.copies,
    )


def usage_entries(node_id: str, found: pb.DescribeUsageResponse) -> list[models.UsageEntry]:
    """Usage of a namespace on one node."""
    return [_shown(models.UsageEntry, one, node_id=node_id, tier=tier_name(one.tier)) for one in found.usages]


def usage(namespace_id: str, answers: Mapping[str, list[models.UsageEntry]], failed: Mapping[str, KVStoreError]) -> models.Usage:
    """Usage of a namespace."""
    entries = [entry for node_id in sorted(answers) for entry in answers[node_id]]
    tiers: list[models.TierName] = sorted({entry.tier for entry in entries})
    totals = [
        models.TierTotal(
            tier=tier,
            blocks=sum(entry.blocks for entry in entries if entry.tier == tier),
            bytes=sum(entry.bytes for entry in entries if entry.tier == tier),
        )
        for tier in tiers
    ]
    return models.Usage(namespace_id=namespace_id, tiers=totals, volumes=entries, unreached=unreached(failed))


# ---- blocks ----
def block_run(run: pb.DescribedRun, hit_blocks: int) -> models.BlockRun:
    """A run of a chain, with the reason of hit or miss."""
    hit = run.start < hit_blocks
    return _shown(
        models.BlockRun,
        run,
        hit=hit,
        state=_STATES[run.state],
        why=_why(run, hit_blocks, in_chain=True),
        namespace_id=shown_id(run.namespace_id),
        replicas=_replicas(run),
    )


def block(key: str, run: pb.DescribedRun) -> models.Block:
    """A single block."""
    known = run.state != pb.BLOCK_STATE_UNKNOWN
    return models.Block(
        key=key,
        state=_STATES[run.state],
        why=_why(run, 0, in_chain=False),
        namespace_id=shown_id(run.namespace_id),
        depth=run.depth if known else None,
        replicas=_replicas(run),
    )


def _replicas(run: pb.DescribedRun) -> list[models.Replica]:
    return [
        models.Replica(
            volume_id=one.volume_id or None,
            node_id=one.node_id or None,
            tier=tier_name(one.tier) if one.tier else None,
            visible=one.visible,
            run_start=one.run_start,
        )
        for one in run.replicas
    ]


def _why(run: pb.DescribedRun, hit_blocks: int, *, in_chain: bool) -> str:
    """Reason of a hit or miss."""
    holders = ", ".join(sorted({one.node_id for one in run.replicas if one.visible}))
    silent = ", ".join(sorted({one.node_id for one in run.replicas if one.node_id and not one.visible}))
    match run.state:
        case pb.BLOCK_STATE_HELD if in_chain and run.start >= hit_blocks:
            return f"held by {holders}, but the chain has a gap before it, at depth {hit_blocks}"
        case pb.BLOCK_STATE_HELD:
            return f"held by {holders}"
        case pb.BLOCK_STATE_SILENT:
            return f"only on nodes without heartbeats: {silent}"
        case pb.BLOCK_STATE_GONE:
            return "every holder has restarted or given up the volume since"
        case pb.BLOCK_STATE_MISPLACED:
            return f"held for namespace {run.namespace_id.hex()} at depth {run.depth}, not here"
        case _ if in_chain and run.start < hit_blocks:
            return "the index has no record of its own for it, but says that it lies within a run that is held"
        case _:
            return "never stored, or evicted everywhere"


# ---- planning ----
def read_queue(found: pb.ReadQueue) -> models.ReadQueue:
    """Read queue of a node."""
    return _shown(
        models.ReadQueue, found, storage_source=SOURCES[found.storage_source], compute_source=SOURCES[found.compute_source]
    )


def live_plan(found: pb.LivePlan) -> models.LivePlan:
    """A plan in progress."""
    return _shown(
        models.LivePlan,
        found,
        plan_id=str(found.plan_id),
        decode_node=found.decode_node or None,
        parts=[_shown(models.LivePart, part, side=_SIDES[part.side]) for part in found.parts],
        expires_in_s=found.expires_in_ms / 1000,
    )


def decision(found: pb.PlanDecision) -> models.Decision:
    """A load decision."""
    return _shown(
        models.Decision,
        found,
        plan_id=str(found.plan_id),
        ago_s=found.ago_ms / 1000,
        decode_node=found.decode_node or None,
        predicted_s=found.predicted_seconds,
        considered=[read_queue(queue) for queue in found.considered],
        excluded=list(found.excluded),
        parts=[_shown(models.DecidedPart, part, side=_SIDES[part.side]) for part in found.parts],
    )


# ---- loads ----
def slow_loads(node_id: str, found: pb.ListSlowLoadsResponse) -> list[models.SlowLoad]:
    """Slow loads of one node."""
    return [
        _shown(
            models.SlowLoad, load, node_id=node_id, ago_s=load.ago_seconds, action=load.action or None, figures=dict(load.figures)
        )
        for load in found.loads
    ]


def slowest(answers: Iterable[Sequence[models.SlowLoad]], most: int) -> list[models.SlowLoad]:
    """The ``most`` slowest loads of all nodes, slowest first."""
    return sorted((load for loads in answers for load in loads), key=lambda load: -load.seconds)[:most]


# ---- changes ----
def namespace_evicted(
    namespace_id: str, done: Mapping[str, tuple[int, int]], failed: Mapping[str, KVStoreError]
) -> models.NamespaceEvicted:
    """Result of an eviction, from (evicted blocks, kept blocks) by node."""
    kept = sum(stay for _, stay in done.values())
    return models.NamespaceEvicted(
        namespace_id=namespace_id,
        complete=not kept and not failed,
        evicted_blocks=sum(left for left, _ in done.values()),
        kept_blocks=kept,
        nodes=[
            models.NodeEvicted(node_id=node_id, evicted_blocks=left, kept_blocks=stay)
            for node_id, (left, stay) in sorted(done.items())
        ],
        unreached=unreached(failed),
    )


def session_hinted(
    namespace_id: str, session: str, done: Mapping[str, HintResponse], failed: Mapping[str, KVStoreError]
) -> hint_models.SessionHinted:
    """Effect of a hint, from the answers of the nodes that know the session."""
    return hint_models.SessionHinted(
        namespace_id=namespace_id,
        session=session,
        nodes=[
            hint_models.NodeHinted(
                node_id=node_id, protected_blocks=result.protected_blocks, dropped_blocks=result.dropped_blocks
            )
            for node_id, result in sorted(done.items())
        ],
        unreached=unreached(failed),
    )


def settings(process: str, found: Iterable[pb.SettingInForce]) -> configuration.Settings:
    """Effective settings of a process."""
    return configuration.Settings(
        process=process,
        settings=[_shown(configuration.Setting, one) for one in found],
    )


# ---- servers of the index ----
def shards(found: pb.DescribeShardsResponse) -> shard_models.Shards:
    """Servers that hold the index, and the metadata servers that serve it."""
    return shard_models.Shards(
        servers=[_index_server(one) for one in found.servers],
        unserved_slots=found.unserved_slots,
        lost_ranges=found.lost_ranges,
        suspect_ranges=found.suspect_ranges,
        metadata_servers=[
            _shown(shard_models.ServingMetadataServer, one, started_s=one.started_seconds, roles=list(one.roles))
            for one in found.metadata_servers
        ],
    )


_OPTIONAL_FIGURES: Final = (
    "shard", "lag_bytes", "compare_and_set", "keys", "used_bytes", "limit_bytes", "snapshots", "append_only", "node_timeout_ms",
)  # fmt: skip


def _index_server(one: pb.IndexServer) -> shard_models.IndexServerEntry:
    optional = {name: getattr(one, name) if one.HasField(name) else None for name in _OPTIONAL_FIGURES}
    return _shown(
        shard_models.IndexServerEntry,
        one,
        **optional,
        away_s=one.away_ms / 1000 if one.HasField("away_ms") else None,
        version=one.version or None,
        eviction_policy=one.eviction_policy or None,
    )


# ---- health ----
def finding(one: HealthFinding) -> health_models.FindingDetail:
    """A finding with the texts of its code."""
    return health_models.FindingDetail(
        code=one.code.name,
        severity=one.severity.value,
        subject=one.subject or None,
        facts=one.facts,
        title=one.code.title,
        meaning=one.code.meaning,
        action=one.code.action,
        docs=one.code.docs,
    )


def cluster_event(one: pb.ClusterEvent) -> health_models.ClusterEventEntry:
    """An event of the last 24 hours."""
    return health_models.ClusterEventEntry(
        id=str(one.id),
        at_s=one.id / 1e6,
        kind=one.kind,
        subject=one.subject or None,
        text=one.text,
        code=one.code or None,
        who=one.who or None,
    )


def health(found: Sequence[HealthFinding]) -> health_models.ClusterHealth:
    """Health of the store."""
    return health_models.ClusterHealth(health=overall(found), findings=[finding(one) for one in found])
