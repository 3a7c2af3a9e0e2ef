from kvproto.v1 import common_pb2 as _common_pb2
from kvproto.v1 import metadata_pb2 as _metadata_pb2
from kvproto.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_HELD: _ClassVar[BlockState]
    BLOCK_STATE_SILENT: _ClassVar[BlockState]
    BLOCK_STATE_GONE: _ClassVar[BlockState]
    BLOCK_STATE_MISPLACED: _ClassVar[BlockState]
    BLOCK_STATE_UNKNOWN: _ClassVar[BlockState]

class CheckState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECK_STATE_UNSPECIFIED: _ClassVar[CheckState]
    CHECK_STATE_NONE: _ClassVar[CheckState]
    CHECK_STATE_WAITING: _ClassVar[CheckState]
    CHECK_STATE_RUNNING: _ClassVar[CheckState]
    CHECK_STATE_DONE: _ClassVar[CheckState]
    CHECK_STATE_CANCELLED: _ClassVar[CheckState]
    CHECK_STATE_FAILED: _ClassVar[CheckState]
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_HELD: BlockState
BLOCK_STATE_SILENT: BlockState
BLOCK_STATE_GONE: BlockState
BLOCK_STATE_MISPLACED: BlockState
BLOCK_STATE_UNKNOWN: BlockState
CHECK_STATE_UNSPECIFIED: CheckState
CHECK_STATE_NONE: CheckState
CHECK_STATE_WAITING: CheckState
CHECK_STATE_RUNNING: CheckState
CHECK_STATE_DONE: CheckState
CHECK_STATE_CANCELLED: CheckState
CHECK_STATE_FAILED: CheckState

class SettingInForce(_message.Message):
    __slots__ = ("key", "value", "source", "detail", "description")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    source: str
    detail: str
    description: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ..., detail: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class DescribeServerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeServerResponse(_message.Message):
    __slots__ = ("version", "index_epoch", "blocks", "index_bytes", "namespaces", "nodes_alive", "nodes_silent", "live_plans", "uptime_ms", "path_policy", "settings", "findings", "nodes_refused")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NODES_ALIVE_FIELD_NUMBER: _ClassVar[int]
    NODES_SILENT_FIELD_NUMBER: _ClassVar[int]
    LIVE_PLANS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    PATH_POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    NODES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    version: str
    index_epoch: bytes
    blocks: int
    index_bytes: int
    namespaces: int
    nodes_alive: int
    nodes_silent: int
    live_plans: int
    uptime_ms: int
    path_policy: str
    settings: _containers.RepeatedCompositeFieldContainer[SettingInForce]
    findings: _containers.RepeatedCompositeFieldContainer[_common_pb2.Finding]
    nodes_refused: int
    def __init__(self, version: _Optional[str] = ..., index_epoch: _Optional[bytes] = ..., blocks: _Optional[int] = ..., index_bytes: _Optional[int] = ..., namespaces: _Optional[int] = ..., nodes_alive: _Optional[int] = ..., nodes_silent: _Optional[int] = ..., live_plans: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., path_policy: _Optional[str] = ..., settings: _Optional[_Iterable[_Union[SettingInForce, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[_common_pb2.Finding, _Mapping]]] = ..., nodes_refused: _Optional[int] = ...) -> None: ...

class DescribeShardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeShardsResponse(_message.Message):
    __slots__ = ("servers", "unserved_slots", "metadata_servers", "lost_ranges", "suspect_ranges")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    METADATA_SERVERS_FIELD_NUMBER: _ClassVar[int]
    LOST_RANGES_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_RANGES_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[IndexServer]
    unserved_slots: int
    metadata_servers: _containers.RepeatedCompositeFieldContainer[MetadataServerInfo]
    lost_ranges: int
    suspect_ranges: int
    def __init__(self, servers: _Optional[_Iterable[_Union[IndexServer, _Mapping]]] = ..., unserved_slots: _Optional[int] = ..., metadata_servers: _Optional[_Iterable[_Union[MetadataServerInfo, _Mapping]]] = ..., lost_ranges: _Optional[int] = ..., suspect_ranges: _Optional[int] = ...) -> None: ...

class IndexServer(_message.Message):
    __slots__ = ("address", "primary", "shard", "slots", "replicas", "lag_bytes", "away_ms", "version", "compare_and_set", "keys", "used_bytes", "limit_bytes", "eviction_policy", "snapshots", "append_only", "node_timeout_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    AWAY_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPARE_AND_SET_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_ONLY_FIELD_NUMBER: _ClassVar[int]
    NODE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    primary: bool
    shard: int
    slots: int
    replicas: int
    lag_bytes: int
    away_ms: int
    version: str
    compare_and_set: bool
    keys: int
    used_bytes: int
    limit_bytes: int
    eviction_policy: str
    snapshots: bool
    append_only: bool
    node_timeout_ms: int
    def __init__(self, address: _Optional[str] = ..., primary: _Optional[bool] = ..., shard: _Optional[int] = ..., slots: _Optional[int] = ..., replicas: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., away_ms: _Optional[int] = ..., version: _Optional[str] = ..., compare_and_set: _Optional[bool] = ..., keys: _Optional[int] = ..., used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., eviction_policy: _Optional[str] = ..., snapshots: _Optional[bool] = ..., append_only: _Optional[bool] = ..., node_timeout_ms: _Optional[int] = ...) -> None: ...

class MetadataServerInfo(_message.Message):
    __slots__ = ("server_id", "address", "version", "started_seconds", "answers_here", "roles")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_HERE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    address: str
    version: str
    started_seconds: float
    answers_here: bool
    roles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server_id: _Optional[str] = ..., address: _Optional[str] = ..., version: _Optional[str] = ..., started_seconds: _Optional[float] = ..., answers_here: _Optional[bool] = ..., roles: _Optional[_Iterable[str]] = ...) -> None: ...

class ListClusterEventsRequest(_message.Message):
    __slots__ = ("after_id", "since_ms", "limit")
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after_id: int
    since_ms: int
    limit: int
    def __init__(self, after_id: _Optional[int] = ..., since_ms: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListClusterEventsResponse(_message.Message):
    __slots__ = ("events", "more")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    more: bool
    def __init__(self, events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("id", "kind", "subject", "text", "code", "who")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    subject: str
    text: str
    code: str
    who: str
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ..., code: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class DescribeHistoryRequest(_message.Message):
    __slots__ = ("since_seconds", "step_seconds")
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    since_seconds: float
    step_seconds: int
    def __init__(self, since_seconds: _Optional[float] = ..., step_seconds: _Optional[int] = ...) -> None: ...

class DescribeHistoryResponse(_message.Message):
    __slots__ = ("at_seconds", "lengths_seconds", "counts", "durations", "levels")
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    at_seconds: _containers.RepeatedScalarFieldContainer[int]
    lengths_seconds: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedCompositeFieldContainer[HistoryCounts]
    durations: _containers.RepeatedCompositeFieldContainer[HistoryDurations]
    levels: _containers.RepeatedCompositeFieldContainer[HistoryLevels]
    def __init__(self, at_seconds: _Optional[_Iterable[int]] = ..., lengths_seconds: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[_Union[HistoryCounts, _Mapping]]] = ..., durations: _Optional[_Iterable[_Union[HistoryDurations, _Mapping]]] = ..., levels: _Optional[_Iterable[_Union[HistoryLevels, _Mapping]]] = ...) -> None: ...

class HistoryCounts(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class HistoryDurations(_message.Message):
    __slots__ = ("name", "bounds_seconds", "counts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    bounds_seconds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., bounds_seconds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class HistoryLevels(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class DescribeNamespacesRequest(_message.Message):
    __slots__ = ("namespace_id", "after", "limit")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    after: bytes
    limit: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., after: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class DescribeNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "more")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceDescription]
    more: bool
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceDescription, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class NamespaceDescription(_message.Message):
    __slots__ = ("namespace_id", "spec", "lookups", "asked_blocks", "hit_blocks", "ttl_ms", "kept", "copies")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    spec: _common_pb2.CacheSpec
    lookups: int
    asked_blocks: int
    hit_blocks: int
    ttl_ms: int
    kept: bool
    copies: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ..., lookups: _Optional[int] = ..., asked_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., kept: _Optional[bool] = ..., copies: _Optional[int] = ...) -> None: ...

class DescribeBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DescribeBlocksResponse(_message.Message):
    __slots__ = ("hit_blocks", "runs")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[DescribedRun]
    def __init__(self, hit_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[DescribedRun, _Mapping]]] = ...) -> None: ...

class DescribedRun(_message.Message):
    __slots__ = ("start", "count", "state", "namespace_id", "depth", "replicas")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    state: BlockState
    namespace_id: bytes
    depth: int
    replicas: _containers.RepeatedCompositeFieldContainer[DescribedReplica]
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., namespace_id: _Optional[bytes] = ..., depth: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[DescribedReplica, _Mapping]]] = ...) -> None: ...

class DescribedReplica(_message.Message):
    __slots__ = ("volume_id", "node_id", "tier", "visible", "run_start")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    RUN_START_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    node_id: str
    tier: _common_pb2.Tier
    visible: bool
    run_start: int
    def __init__(self, volume_id: _Optional[str] = ..., node_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., visible: _Optional[bool] = ..., run_start: _Optional[int] = ...) -> None: ...

class DescribePlanningRequest(_message.Message):
    __slots__ = ("decisions", "live", "after_plan")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    AFTER_PLAN_FIELD_NUMBER: _ClassVar[int]
    decisions: int
    live: int
    after_plan: int
    def __init__(self, decisions: _Optional[int] = ..., live: _Optional[int] = ..., after_plan: _Optional[int] = ...) -> None: ...

class DescribePlanningResponse(_message.Message):
    __slots__ = ("path_policy", "configured_policy", "live", "more", "decisions", "queues")
    PATH_POLICY_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_POLICY_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    path_policy: str
    configured_policy: str
    live: _containers.RepeatedCompositeFieldContainer[LivePlan]
    more: bool
    decisions: _containers.RepeatedCompositeFieldContainer[PlanDecision]
    queues: _containers.RepeatedCompositeFieldContainer[ReadQueue]
    def __init__(self, path_policy: _Optional[str] = ..., configured_policy: _Optional[str] = ..., live: _Optional[_Iterable[_Union[LivePlan, _Mapping]]] = ..., more: _Optional[bool] = ..., decisions: _Optional[_Iterable[_Union[PlanDecision, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[ReadQueue, _Mapping]]] = ...) -> None: ...

class LivePlan(_message.Message):
    __slots__ = ("plan_id", "attempt", "policy", "prefill_node", "decode_node", "blocks", "block_bytes", "parts", "expires_in_ms")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    attempt: int
    policy: str
    prefill_node: str
    decode_node: str
    blocks: int
    block_bytes: int
    parts: _containers.RepeatedCompositeFieldContainer[LivePlanPart]
    expires_in_ms: int
    def __init__(self, plan_id: _Optional[int] = ..., attempt: _Optional[int] = ..., policy: _Optional[str] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[LivePlanPart, _Mapping]]] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class LivePlanPart(_message.Message):
    __slots__ = ("index", "start", "count", "side", "node_id", "left", "failed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    count: int
    side: _metadata_pb2.ReadSide
    node_id: str
    left: int
    failed: bool
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., side: _Optional[_Union[_metadata_pb2.ReadSide, str]] = ..., node_id: _Optional[str] = ..., left: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class PlanDecision(_message.Message):
    __slots__ = ("plan_id", "attempt", "ago_ms", "policy", "prefill_node", "decode_node", "blocks", "block_bytes", "predicted_seconds", "considered", "excluded", "parts")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGO_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    attempt: int
    ago_ms: int
    policy: str
    prefill_node: str
    decode_node: str
    blocks: int
    block_bytes: int
    predicted_seconds: float
    considered: _containers.RepeatedCompositeFieldContainer[ReadQueue]
    excluded: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[PlannedPart]
    def __init__(self, plan_id: _Optional[int] = ..., attempt: _Optional[int] = ..., ago_ms: _Optional[int] = ..., policy: _Optional[str] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., predicted_seconds: _Optional[float] = ..., considered: _Optional[_Iterable[_Union[ReadQueue, _Mapping]]] = ..., excluded: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[PlannedPart, _Mapping]]] = ...) -> None: ...

class PlannedPart(_message.Message):
    __slots__ = ("index", "start", "count", "side", "node_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    count: int
    side: _metadata_pb2.ReadSide
    node_id: str
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., side: _Optional[_Union[_metadata_pb2.ReadSide, str]] = ..., node_id: _Optional[str] = ...) -> None: ...

class ReadQueue(_message.Message):
    __slots__ = ("node_id", "alive", "pending_bytes", "pending_tokens", "storage_bytes_per_s", "compute_bytes_per_s", "sending_bytes", "receiving_bytes", "storage_source", "compute_source")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    alive: bool
    pending_bytes: int
    pending_tokens: int
    storage_bytes_per_s: float
    compute_bytes_per_s: float
    sending_bytes: int
    receiving_bytes: int
    storage_source: _common_pb2.BandwidthSource
    compute_source: _common_pb2.BandwidthSource
    def __init__(self, node_id: _Optional[str] = ..., alive: _Optional[bool] = ..., pending_bytes: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., storage_bytes_per_s: _Optional[float] = ..., compute_bytes_per_s: _Optional[float] = ..., sending_bytes: _Optional[int] = ..., receiving_bytes: _Optional[int] = ..., storage_source: _Optional[_Union[_common_pb2.BandwidthSource, str]] = ..., compute_source: _Optional[_Union[_common_pb2.BandwidthSource, str]] = ...) -> None: ...

class SetPathPolicyRequest(_message.Message):
    __slots__ = ("policy", "expected")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    expected: str
    def __init__(self, policy: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class SetPathPolicyResponse(_message.Message):
    __slots__ = ("policy", "before")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    policy: str
    before: str
    def __init__(self, policy: _Optional[str] = ..., before: _Optional[str] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("dram_bytes", "nvme_bytes")
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    dram_bytes: int
    nvme_bytes: int
    def __init__(self, dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ...) -> None: ...

class TenantDescription(_message.Message):
    __slots__ = ("tenant", "quota", "dram_bytes", "nvme_bytes", "nodes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota: TenantQuota
    dram_bytes: int
    nvme_bytes: int
    nodes: int
    def __init__(self, tenant: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class DescribeTenantsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class DescribeTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantDescription]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantDescription, _Mapping]]] = ...) -> None: ...

class ListNamespaceRulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespaceRulesResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[_metadata_pb2.NamespaceRule]
    def __init__(self, rules: _Optional[_Iterable[_Union[_metadata_pb2.NamespaceRule, _Mapping]]] = ...) -> None: ...

class SetTenantQuotaRequest(_message.Message):
    __slots__ = ("operation_id", "tenant", "quota", "expected")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    tenant: str
    quota: TenantQuota
    expected: TenantQuota
    def __init__(self, operation_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., expected: _Optional[_Union[TenantQuota, _Mapping]] = ...) -> None: ...

class SetTenantQuotaResponse(_message.Message):
    __slots__ = ("quota", "before")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    quota: TenantQuota
    before: TenantQuota
    def __init__(self, quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., before: _Optional[_Union[TenantQuota, _Mapping]] = ...) -> None: ...

class SetNamespaceRuleRequest(_message.Message):
    __slots__ = ("operation_id", "rule", "expected")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    rule: _metadata_pb2.NamespaceRule
    expected: _metadata_pb2.NamespaceRule
    def __init__(self, operation_id: _Optional[bytes] = ..., rule: _Optional[_Union[_metadata_pb2.NamespaceRule, _Mapping]] = ..., expected: _Optional[_Union[_metadata_pb2.NamespaceRule, _Mapping]] = ...) -> None: ...

class SetNamespaceRuleResponse(_message.Message):
    __slots__ = ("rule", "before")
    RULE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    rule: _metadata_pb2.NamespaceRule
    before: _metadata_pb2.NamespaceRule
    def __init__(self, rule: _Optional[_Union[_metadata_pb2.NamespaceRule, _Mapping]] = ..., before: _Optional[_Union[_metadata_pb2.NamespaceRule, _Mapping]] = ...) -> None: ...

class RebuildIndexRequest(_message.Message):
    __slots__ = ("expected_epoch",)
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    expected_epoch: bytes
    def __init__(self, expected_epoch: _Optional[bytes] = ...) -> None: ...

class RebuildIndexResponse(_message.Message):
    __slots__ = ("dropped_epoch",)
    DROPPED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    dropped_epoch: bytes
    def __init__(self, dropped_epoch: _Optional[bytes] = ...) -> None: ...

class DescribeNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeNodeResponse(_message.Message):
    __slots__ = ("version", "uptime_ms", "volumes", "sessions", "blocks", "write_back_waiting_blocks", "publish_waiting_events", "staging", "cap_bytes_per_s", "io_engines", "settings", "links", "loads", "hints", "hints_off", "read_ahead_off")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_WAITING_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    IO_ENGINES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    HINTS_OFF_FIELD_NUMBER: _ClassVar[int]
    READ_AHEAD_OFF_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_ms: int
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeDescription]
    sessions: int
    blocks: int
    write_back_waiting_blocks: int
    publish_waiting_events: int
    staging: _containers.RepeatedCompositeFieldContainer[StagingDescription]
    cap_bytes_per_s: int
    io_engines: _containers.RepeatedScalarFieldContainer[str]
    settings: _containers.RepeatedCompositeFieldContainer[SettingInForce]
    links: _containers.RepeatedCompositeFieldContainer[LinkTraffic]
    loads: _containers.RepeatedCompositeFieldContainer[LoadTimes]
    hints: _containers.RepeatedCompositeFieldContainer[TenantHints]
    hints_off: bool
    read_ahead_off: bool
    def __init__(self, version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., volumes: _Optional[_Iterable[_Union[VolumeDescription, _Mapping]]] = ..., sessions: _Optional[int] = ..., blocks: _Optional[int] = ..., write_back_waiting_blocks: _Optional[int] = ..., publish_waiting_events: _Optional[int] = ..., staging: _Optional[_Iterable[_Union[StagingDescription, _Mapping]]] = ..., cap_bytes_per_s: _Optional[int] = ..., io_engines: _Optional[_Iterable[str]] = ..., settings: _Optional[_Iterable[_Union[SettingInForce, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkTraffic, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadTimes, _Mapping]]] = ..., hints: _Optional[_Iterable[_Union[TenantHints, _Mapping]]] = ..., hints_off: _Optional[bool] = ..., read_ahead_off: _Optional[bool] = ...) -> None: ...

class TenantHints(_message.Message):
    __slots__ = ("tenant", "sessions", "protected_bytes", "keeps", "ends", "beyond_limit_blocks", "dropped_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    BEYOND_LIMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    sessions: int
    protected_bytes: int
    keeps: int
    ends: int
    beyond_limit_blocks: int
    dropped_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., sessions: _Optional[int] = ..., protected_bytes: _Optional[int] = ..., keeps: _Optional[int] = ..., ends: _Optional[int] = ..., beyond_limit_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ...) -> None: ...

class LinkTraffic(_message.Message):
    __slots__ = ("network", "received_bytes", "sent_bytes")
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    network: str
    received_bytes: int
    sent_bytes: int
    def __init__(self, network: _Optional[str] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class LoadTimes(_message.Message):
    __slots__ = ("reach", "bounds_seconds", "counts", "total_seconds")
    REACH_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reach: str
    bounds_seconds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total_seconds: float
    def __init__(self, reach: _Optional[str] = ..., bounds_seconds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class VolumeDescription(_message.Message):
    __slots__ = ("volume_id", "tier", "capacity_bytes", "used_bytes", "blocks", "read_only", "quarantined_blocks", "tenants")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    tier: _common_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    read_only: str
    quarantined_blocks: int
    tenants: _containers.RepeatedCompositeFieldContainer[_metadata_pb2.TenantUsage]
    def __init__(self, volume_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., read_only: _Optional[str] = ..., quarantined_blocks: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[_metadata_pb2.TenantUsage, _Mapping]]] = ...) -> None: ...

class StagingDescription(_message.Message):
    __slots__ = ("name", "used_bytes", "waiting_loads")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_LOADS_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    waiting_loads: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., waiting_loads: _Optional[int] = ...) -> None: ...

class DescribeUsageRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class DescribeUsageResponse(_message.Message):
    __slots__ = ("usages",)
    USAGES_FIELD_NUMBER: _ClassVar[int]
    usages: _containers.RepeatedCompositeFieldContainer[NamespaceUsage]
    def __init__(self, usages: _Optional[_Iterable[_Union[NamespaceUsage, _Mapping]]] = ...) -> None: ...

class NamespaceUsage(_message.Message):
    __slots__ = ("namespace_id", "volume_id", "tier", "blocks", "bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    volume_id: str
    tier: _common_pb2.Tier
    blocks: int
    bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ListSlowLoadsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListSlowLoadsResponse(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[SlowLoad]
    def __init__(self, loads: _Optional[_Iterable[_Union[SlowLoad, _Mapping]]] = ...) -> None: ...

class SlowLoad(_message.Message):
    __slots__ = ("request_id", "seconds", "blocks", "hit_blocks", "reason", "figures", "ago_seconds", "action")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    AGO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seconds: float
    blocks: int
    hit_blocks: int
    reason: str
    figures: _containers.ScalarMap[str, float]
    ago_seconds: float
    action: str
    def __init__(self, request_id: _Optional[str] = ..., seconds: _Optional[float] = ..., blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ..., ago_seconds: _Optional[float] = ..., action: _Optional[str] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("operation_id", "volume_id", "namespace_id", "down_to_bytes")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DOWN_TO_BYTES_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    volume_id: str
    namespace_id: bytes
    down_to_bytes: int
    def __init__(self, operation_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., down_to_bytes: _Optional[int] = ...) -> None: ...

class EvictBlocksResponse(_message.Message):
    __slots__ = ("evicted_blocks", "kept_blocks", "used_bytes")
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    kept_blocks: int
    used_bytes: int
    def __init__(self, evicted_blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class InvalidateNamespaceRequest(_message.Message):
    __slots__ = ("operation_id", "namespace_id", "wait_ms")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    namespace_id: bytes
    wait_ms: int
    def __init__(self, operation_id: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class InvalidateNamespaceResponse(_message.Message):
    __slots__ = ("dropped_blocks", "kept_blocks")
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    kept_blocks: int
    def __init__(self, dropped_blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ...) -> None: ...

class HintSessionRequest(_message.Message):
    __slots__ = ("namespace_id", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hint: _node_pb2.HintRequest
    def __init__(self, namespace_id: _Optional[bytes] = ..., hint: _Optional[_Union[_node_pb2.HintRequest, _Mapping]] = ...) -> None: ...

class HintSessionResponse(_message.Message):
    __slots__ = ("known", "result")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    known: bool
    result: _node_pb2.HintResponse
    def __init__(self, known: _Optional[bool] = ..., result: _Optional[_Union[_node_pb2.HintResponse, _Mapping]] = ...) -> None: ...

class CheckVolumeRequest(_message.Message):
    __slots__ = ("operation_id", "volume_id", "bytes_per_s")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    volume_id: str
    bytes_per_s: int
    def __init__(self, operation_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class DescribeCheckRequest(_message.Message):
    __slots__ = ("volume_id",)
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    def __init__(self, volume_id: _Optional[str] = ...) -> None: ...

class CancelCheckRequest(_message.Message):
    __slots__ = ("volume_id",)
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    def __init__(self, volume_id: _Optional[str] = ...) -> None: ...

class VolumeCheck(_message.Message):
    __slots__ = ("volume_id", "state", "blocks", "checked_blocks", "good_blocks", "bad_blocks", "unreadable_blocks", "gone_blocks", "rewritten_blocks", "checked_bytes", "bytes_per_s", "began_ago_ms", "took_ms", "why")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GOOD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GONE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AGO_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    state: CheckState
    blocks: int
    checked_blocks: int
    good_blocks: int
    bad_blocks: int
    unreadable_blocks: int
    gone_blocks: int
    rewritten_blocks: int
    checked_bytes: int
    bytes_per_s: int
    began_ago_ms: int
    took_ms: int
    why: str
    def __init__(self, volume_id: _Optional[str] = ..., state: _Optional[_Union[CheckState, str]] = ..., blocks: _Optional[int] = ..., checked_blocks: _Optional[int] = ..., good_blocks: _Optional[int] = ..., bad_blocks: _Optional[int] = ..., unreadable_blocks: _Optional[int] = ..., gone_blocks: _Optional[int] = ..., rewritten_blocks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., began_ago_ms: _Optional[int] = ..., took_ms: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class SetTrafficCapRequest(_message.Message):
    __slots__ = ("bytes_per_s", "expected")
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    expected: int
    def __init__(self, bytes_per_s: _Optional[int] = ..., expected: _Optional[int] = ...) -> None: ...

class SetTrafficCapResponse(_message.Message):
    __slots__ = ("bytes_per_s", "before")
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    before: int
    def __init__(self, bytes_per_s: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class CompareIndexRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompareIndexResponse(_message.Message):
    __slots__ = ("repaired_ranges",)
    REPAIRED_RANGES_FIELD_NUMBER: _ClassVar[int]
    repaired_ranges: int
    def __init__(self, repaired_ranges: _Optional[int] = ...) -> None: ...
