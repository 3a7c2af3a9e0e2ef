from kvproto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_SIDE_UNSPECIFIED: _ClassVar[ReadSide]
    READ_SIDE_PREFILL: _ClassVar[ReadSide]
    READ_SIDE_DECODE: _ClassVar[ReadSide]
    READ_SIDE_RELAY: _ClassVar[ReadSide]

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]

class ResyncReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESYNC_REASON_UNSPECIFIED: _ClassVar[ResyncReason]
    RESYNC_REASON_ASKED: _ClassVar[ResyncReason]
    RESYNC_REASON_RESTARTED: _ClassVar[ResyncReason]
    RESYNC_REASON_GONE: _ClassVar[ResyncReason]
    RESYNC_REASON_SLOW: _ClassVar[ResyncReason]
READ_SIDE_UNSPECIFIED: ReadSide
READ_SIDE_PREFILL: ReadSide
READ_SIDE_DECODE: ReadSide
READ_SIDE_RELAY: ReadSide
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
RESYNC_REASON_UNSPECIFIED: ResyncReason
RESYNC_REASON_ASKED: ResyncReason
RESYNC_REASON_RESTARTED: ResyncReason
RESYNC_REASON_GONE: ResyncReason
RESYNC_REASON_SLOW: ResyncReason

class RegisterNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node: _common_pb2.NodeInfo
    def __init__(self, operation_id: _Optional[bytes] = ..., node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("index_epoch", "heartbeat_interval_ms", "volume_needs", "drain")
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    VOLUME_NEEDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    index_epoch: bytes
    heartbeat_interval_ms: int
    volume_needs: _containers.RepeatedCompositeFieldContainer[VolumeNeed]
    drain: _common_pb2.DrainOrder
    def __init__(self, index_epoch: _Optional[bytes] = ..., heartbeat_interval_ms: _Optional[int] = ..., volume_needs: _Optional[_Iterable[_Union[VolumeNeed, _Mapping]]] = ..., drain: _Optional[_Union[_common_pb2.DrainOrder, _Mapping]] = ...) -> None: ...

class VolumeNeed(_message.Message):
    __slots__ = ("volume_id", "inventory_needed")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_NEEDED_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    inventory_needed: bool
    def __init__(self, volume_id: _Optional[str] = ..., inventory_needed: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "boot_id", "usages", "drain", "tenants", "sequence", "findings", "read_bytes_per_s", "unix_ms", "checked", "clock_offset_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    USAGES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    usages: _containers.RepeatedCompositeFieldContainer[VolumeUsage]
    drain: _common_pb2.DrainProgress
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    sequence: int
    findings: _containers.RepeatedCompositeFieldContainer[_common_pb2.Finding]
    read_bytes_per_s: int
    unix_ms: int
    checked: _containers.RepeatedScalarFieldContainer[int]
    clock_offset_ms: int
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., usages: _Optional[_Iterable[_Union[VolumeUsage, _Mapping]]] = ..., drain: _Optional[_Union[_common_pb2.DrainProgress, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ..., sequence: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[_common_pb2.Finding, _Mapping]]] = ..., read_bytes_per_s: _Optional[int] = ..., unix_ms: _Optional[int] = ..., checked: _Optional[_Iterable[int]] = ..., clock_offset_ms: _Optional[int] = ...) -> None: ...

class VolumeUsage(_message.Message):
    __slots__ = ("volume_id", "used_bytes", "blocks", "read_only")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    used_bytes: int
    blocks: int
    read_only: str
    def __init__(self, volume_id: _Optional[str] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., read_only: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("index_epoch", "register_again", "drain", "retention", "checks", "membership_version")
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    index_epoch: bytes
    register_again: bool
    drain: _common_pb2.DrainOrder
    retention: Retention
    checks: _containers.RepeatedCompositeFieldContainer[RangeCheck]
    membership_version: int
    def __init__(self, index_epoch: _Optional[bytes] = ..., register_again: _Optional[bool] = ..., drain: _Optional[_Union[_common_pb2.DrainOrder, _Mapping]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., checks: _Optional[_Iterable[_Union[RangeCheck, _Mapping]]] = ..., membership_version: _Optional[int] = ...) -> None: ...

class RangeCheck(_message.Message):
    __slots__ = ("token", "ranges", "lost")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    token: int
    ranges: bytes
    lost: bool
    def __init__(self, token: _Optional[int] = ..., ranges: _Optional[bytes] = ..., lost: _Optional[bool] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "dram_bytes", "nvme_bytes", "unknown")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    dram_bytes: int
    nvme_bytes: int
    unknown: bool
    def __init__(self, tenant: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., unknown: _Optional[bool] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("shares", "rules", "from_sequence")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[TenantShare]
    rules: _containers.RepeatedCompositeFieldContainer[NamespaceRule]
    from_sequence: int
    def __init__(self, shares: _Optional[_Iterable[_Union[TenantShare, _Mapping]]] = ..., rules: _Optional[_Iterable[_Union[NamespaceRule, _Mapping]]] = ..., from_sequence: _Optional[int] = ...) -> None: ...

class NamespaceRule(_message.Message):
    __slots__ = ("namespace_id", "ttl_ms", "kept", "copies")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    ttl_ms: int
    kept: bool
    copies: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., kept: _Optional[bool] = ..., copies: _Optional[int] = ...) -> None: ...

class TenantShare(_message.Message):
    __slots__ = ("tenant", "dram_bytes", "nvme_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    dram_bytes: int
    nvme_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ...) -> None: ...

class UnregisterNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node_id", "boot_id")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    boot_id: bytes
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class UnregisterNodeResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node_id", "move")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    move: bool
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., move: _Optional[bool] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: NodeStatus
    def __init__(self, status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class UndrainNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node_id")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ...) -> None: ...

class UndrainNodeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: NodeStatus
    def __init__(self, status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class RemoveNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node_id", "force")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    force: bool
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class RemoveNodeResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class LocateBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LocateBlocksResponse(_message.Message):
    __slots__ = ("volumes", "replicas")
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedCompositeFieldContainer[LocatedVolume]
    replicas: _containers.RepeatedCompositeFieldContainer[LocatedReplica]
    def __init__(self, volumes: _Optional[_Iterable[_Union[LocatedVolume, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[LocatedReplica, _Mapping]]] = ...) -> None: ...

class LocatedVolume(_message.Message):
    __slots__ = ("node_id", "volume_id", "tier", "alive", "state")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    volume_id: str
    tier: _common_pb2.Tier
    alive: bool
    state: _common_pb2.NodeState
    def __init__(self, node_id: _Optional[str] = ..., volume_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., alive: _Optional[bool] = ..., state: _Optional[_Union[_common_pb2.NodeState, str]] = ...) -> None: ...

class LocatedReplica(_message.Message):
    __slots__ = ("key", "volume")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    key: int
    volume: int
    def __init__(self, key: _Optional[int] = ..., volume: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("node_id", "boot_id", "sequence", "volume_id", "stored", "removed", "sync_end")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    SYNC_END_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    sequence: int
    volume_id: str
    stored: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    removed: bytes
    sync_end: bool
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., volume_id: _Optional[str] = ..., stored: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., removed: _Optional[bytes] = ..., sync_end: _Optional[bool] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class CompareDigestsRequest(_message.Message):
    __slots__ = ("node_id", "boot_id", "volume_id", "first_range", "digests", "counts", "max_age_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANGE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    volume_id: str
    first_range: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    max_age_ms: int
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., first_range: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., max_age_ms: _Optional[int] = ...) -> None: ...

class CompareDigestsResponse(_message.Message):
    __slots__ = ("differing_ranges",)
    DIFFERING_RANGES_FIELD_NUMBER: _ClassVar[int]
    differing_ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, differing_ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class RepairRangesRequest(_message.Message):
    __slots__ = ("operation_id", "node_id", "boot_id", "volume_id", "ranges", "blocks")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    boot_id: bytes
    volume_id: str
    ranges: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., ranges: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ...) -> None: ...

class RepairRangesResponse(_message.Message):
    __slots__ = ("added", "removed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: int
    removed: int
    def __init__(self, added: _Optional[int] = ..., removed: _Optional[int] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("operation_id", "spec")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    spec: _common_pb2.CacheSpec
    def __init__(self, operation_id: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace_id", "spec")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    spec: _common_pb2.CacheSpec
    def __init__(self, namespace_id: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "alive", "heartbeat_age_ms", "usages", "state", "stopped", "order", "drain", "findings", "refused", "clock_offset_ms", "arriving")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    USAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_MS_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    alive: bool
    heartbeat_age_ms: int
    usages: _containers.RepeatedCompositeFieldContainer[VolumeUsage]
    state: _common_pb2.NodeState
    stopped: bool
    order: _common_pb2.DrainOrder
    drain: _common_pb2.DrainProgress
    findings: _containers.RepeatedCompositeFieldContainer[_common_pb2.Finding]
    refused: str
    clock_offset_ms: int
    arriving: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., alive: _Optional[bool] = ..., heartbeat_age_ms: _Optional[int] = ..., usages: _Optional[_Iterable[_Union[VolumeUsage, _Mapping]]] = ..., state: _Optional[_Union[_common_pb2.NodeState, str]] = ..., stopped: _Optional[bool] = ..., order: _Optional[_Union[_common_pb2.DrainOrder, _Mapping]] = ..., drain: _Optional[_Union[_common_pb2.DrainProgress, _Mapping]] = ..., findings: _Optional[_Iterable[_Union[_common_pb2.Finding, _Mapping]]] = ..., refused: _Optional[str] = ..., clock_offset_ms: _Optional[int] = ..., arriving: _Optional[_Iterable[str]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "ends")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hit_blocks", "runs", "nodes")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[ReplicaRun]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeInfo]
    def __init__(self, hit_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[ReplicaRun, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeInfo, _Mapping]]] = ...) -> None: ...

class LookupHeadsRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupHeadsResponse(_message.Message):
    __slots__ = ("runs", "nodes")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[ReplicaRun]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeInfo]
    def __init__(self, runs: _Optional[_Iterable[_Union[ReplicaRun, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeInfo, _Mapping]]] = ...) -> None: ...

class ReplicaRun(_message.Message):
    __slots__ = ("start", "count", "node", "volume")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    node: int
    volume: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., node: _Optional[int] = ..., volume: _Optional[int] = ...) -> None: ...

class PlanLoadRequest(_message.Message):
    __slots__ = ("operation_id", "policy", "prefill_node", "decode_node", "relays", "blocks", "block_bytes", "block_tokens", "budget_ms")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    policy: str
    prefill_node: str
    decode_node: str
    relays: bool
    blocks: int
    block_bytes: int
    block_tokens: int
    budget_ms: int
    def __init__(self, operation_id: _Optional[bytes] = ..., policy: _Optional[str] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., relays: _Optional[bool] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class PlanPart(_message.Message):
    __slots__ = ("index", "start", "count", "side", "node_id", "control_address", "data_address")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    count: int
    side: ReadSide
    node_id: str
    control_address: str
    data_address: str
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., side: _Optional[_Union[ReadSide, str]] = ..., node_id: _Optional[str] = ..., control_address: _Optional[str] = ..., data_address: _Optional[str] = ...) -> None: ...

class LoadPlan(_message.Message):
    __slots__ = ("plan_id", "attempt", "parts", "policy", "reason", "predicted_seconds")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    attempt: int
    parts: _containers.RepeatedCompositeFieldContainer[PlanPart]
    policy: str
    reason: str
    predicted_seconds: float
    def __init__(self, plan_id: _Optional[int] = ..., attempt: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PlanPart, _Mapping]]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., predicted_seconds: _Optional[float] = ...) -> None: ...

class LoadPrice(_message.Message):
    __slots__ = ("first_seconds", "seconds")
    FIRST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    first_seconds: float
    seconds: float
    def __init__(self, first_seconds: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReportLoadsRequest(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[LoadReport]
    def __init__(self, loads: _Optional[_Iterable[_Union[LoadReport, _Mapping]]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("plan_id", "parts", "finished", "restored_plan")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_PLAN_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    parts: _containers.RepeatedCompositeFieldContainer[PartReport]
    finished: bool
    restored_plan: PlanInProgress
    def __init__(self, plan_id: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartReport, _Mapping]]] = ..., finished: _Optional[bool] = ..., restored_plan: _Optional[_Union[PlanInProgress, _Mapping]] = ...) -> None: ...

class PlanInProgress(_message.Message):
    __slots__ = ("load", "parts")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    load: PlanLoadRequest
    parts: _containers.RepeatedCompositeFieldContainer[PlanPart]
    def __init__(self, load: _Optional[_Union[PlanLoadRequest, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[PlanPart, _Mapping]]] = ...) -> None: ...

class PartReport(_message.Message):
    __slots__ = ("index", "blocks_done")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    index: int
    blocks_done: int
    def __init__(self, index: _Optional[int] = ..., blocks_done: _Optional[int] = ...) -> None: ...

class ReportLoadsResponse(_message.Message):
    __slots__ = ("forgotten",)
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    forgotten: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, forgotten: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplanLoadRequest(_message.Message):
    __slots__ = ("plan_id", "index", "arrived", "why")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    index: int
    arrived: _containers.RepeatedCompositeFieldContainer[BlockRange]
    why: str
    def __init__(self, plan_id: _Optional[int] = ..., index: _Optional[int] = ..., arrived: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ..., why: _Optional[str] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ReportEnginesRequest(_message.Message):
    __slots__ = ("group", "boot_id", "role", "sequence", "engines", "prefilled", "finished", "membership", "acknowledged")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    group: str
    boot_id: bytes
    role: EngineRole
    sequence: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    prefilled: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[int]
    membership: bytes
    acknowledged: int
    def __init__(self, group: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., role: _Optional[_Union[EngineRole, str]] = ..., sequence: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., prefilled: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[int]] = ..., membership: _Optional[bytes] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("engine", "node", "address", "hbm_tokens", "sequences", "tokens", "free_hbm_tokens", "read_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HBM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_HBM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    node: str
    address: str
    hbm_tokens: int
    sequences: int
    tokens: int
    free_hbm_tokens: int
    read_tokens: int
    def __init__(self, engine: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., hbm_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., free_hbm_tokens: _Optional[int] = ..., read_tokens: _Optional[int] = ...) -> None: ...

class ReportEnginesResponse(_message.Message):
    __slots__ = ("membership", "events")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    membership: bytes
    events: _containers.RepeatedCompositeFieldContainer[SchedulerEvent]
    def __init__(self, membership: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[SchedulerEvent, _Mapping]]] = ...) -> None: ...

class SchedulerEvent(_message.Message):
    __slots__ = ("number", "assigned", "revoked")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    number: int
    assigned: ScheduledRequest
    revoked: RevokedRequest
    def __init__(self, number: _Optional[int] = ..., assigned: _Optional[_Union[ScheduledRequest, _Mapping]] = ..., revoked: _Optional[_Union[RevokedRequest, _Mapping]] = ...) -> None: ...

class ScheduledRequest(_message.Message):
    __slots__ = ("request_id", "generation", "engine", "prompt_tokens", "hit_tokens", "expected_output_tokens", "prefill", "decode", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    engine: str
    prompt_tokens: int
    hit_tokens: int
    expected_output_tokens: int
    prefill: EngineRef
    decode: EngineRef
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., engine: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., prefill: _Optional[_Union[EngineRef, _Mapping]] = ..., decode: _Optional[_Union[EngineRef, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RevokedRequest(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class EngineRef(_message.Message):
    __slots__ = ("engine", "node", "group", "address")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    node: str
    group: str
    address: str
    def __init__(self, engine: _Optional[str] = ..., node: _Optional[str] = ..., group: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class AssignRequestRequest(_message.Message):
    __slots__ = ("operation_id", "request_id", "prompt_tokens", "hit_tokens", "expected_output_tokens", "budget_ms", "after_generation", "cached_prefixes")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    request_id: str
    prompt_tokens: int
    hit_tokens: int
    expected_output_tokens: int
    budget_ms: int
    after_generation: int
    cached_prefixes: _containers.RepeatedCompositeFieldContainer[CachedPrefix]
    def __init__(self, operation_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., budget_ms: _Optional[int] = ..., after_generation: _Optional[int] = ..., cached_prefixes: _Optional[_Iterable[_Union[CachedPrefix, _Mapping]]] = ...) -> None: ...

class CachedPrefix(_message.Message):
    __slots__ = ("engine", "tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tokens: int
    def __init__(self, engine: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("generation", "prefill", "decode")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    prefill: EngineRef
    decode: EngineRef
    def __init__(self, generation: _Optional[int] = ..., prefill: _Optional[_Union[EngineRef, _Mapping]] = ..., decode: _Optional[_Union[EngineRef, _Mapping]] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("operation_id", "request_id")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    request_id: str
    def __init__(self, operation_id: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("known", "engines")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    known: bool
    engines: int
    def __init__(self, known: _Optional[bool] = ..., engines: _Optional[int] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("feed_id", "sequence", "namespace_ids", "node_ids", "tiers", "position")
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    feed_id: bytes
    sequence: int
    namespace_ids: _containers.RepeatedScalarFieldContainer[bytes]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    position: bytes
    def __init__(self, feed_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., namespace_ids: _Optional[_Iterable[bytes]] = ..., node_ids: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., position: _Optional[bytes] = ...) -> None: ...

class WatchBlocksResponse(_message.Message):
    __slots__ = ("resumed", "resync", "events", "snapshot_end")
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    resumed: WatchResumed
    resync: Resync
    events: BlockEvents
    snapshot_end: SnapshotEnd
    def __init__(self, resumed: _Optional[_Union[WatchResumed, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., events: _Optional[_Union[BlockEvents, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ...) -> None: ...

class WatchResumed(_message.Message):
    __slots__ = ("feed_id", "open")
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    feed_id: bytes
    open: OpenVolumes
    def __init__(self, feed_id: _Optional[bytes] = ..., open: _Optional[_Union[OpenVolumes, _Mapping]] = ...) -> None: ...

class OpenVolumes(_message.Message):
    __slots__ = ("volumes",)
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, volumes: _Optional[_Iterable[int]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("feed_id", "reason")
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    feed_id: bytes
    reason: ResyncReason
    def __init__(self, feed_id: _Optional[bytes] = ..., reason: _Optional[_Union[ResyncReason, str]] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("sequence", "position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: bytes
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[bytes] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("sequence", "events", "position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    position: bytes
    def __init__(self, sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., position: _Optional[bytes] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("opened", "closed", "served", "stored", "removed", "held")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    opened: VolumeOpened
    closed: VolumeClosed
    served: VolumeServed
    stored: BlocksStored
    removed: BlocksRemoved
    held: BlocksHeld
    def __init__(self, opened: _Optional[_Union[VolumeOpened, _Mapping]] = ..., closed: _Optional[_Union[VolumeClosed, _Mapping]] = ..., served: _Optional[_Union[VolumeServed, _Mapping]] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., held: _Optional[_Union[BlocksHeld, _Mapping]] = ...) -> None: ...

class VolumeOpened(_message.Message):
    __slots__ = ("volume", "volume_id", "node_id", "tier", "boot_id", "served")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    volume: int
    volume_id: str
    node_id: str
    tier: _common_pb2.Tier
    boot_id: bytes
    served: bool
    def __init__(self, volume: _Optional[int] = ..., volume_id: _Optional[str] = ..., node_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., boot_id: _Optional[bytes] = ..., served: _Optional[bool] = ...) -> None: ...

class VolumeClosed(_message.Message):
    __slots__ = ("volume",)
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    volume: int
    def __init__(self, volume: _Optional[int] = ...) -> None: ...

class VolumeServed(_message.Message):
    __slots__ = ("volume", "served")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    volume: int
    served: bool
    def __init__(self, volume: _Optional[int] = ..., served: _Optional[bool] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("volume", "runs")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    volume: int
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    def __init__(self, volume: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("volume", "namespace_id", "keys")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    volume: int
    namespace_id: bytes
    keys: bytes
    def __init__(self, volume: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class BlocksHeld(_message.Message):
    __slots__ = ("volume", "namespace_id", "keys", "depths")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    volume: int
    namespace_id: bytes
    keys: bytes
    depths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, volume: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., depths: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("all_servers",)
    ALL_SERVERS_FIELD_NUMBER: _ClassVar[int]
    all_servers: bool
    def __init__(self, all_servers: _Optional[bool] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("blocks", "index_bytes", "index_epoch", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    index_bytes: int
    index_epoch: bytes
    counters: _containers.ScalarMap[str, int]
    def __init__(self, blocks: _Optional[int] = ..., index_bytes: _Optional[int] = ..., index_epoch: _Optional[bytes] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
