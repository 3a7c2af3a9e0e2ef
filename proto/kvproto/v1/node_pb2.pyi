from kvproto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HintKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_KIND_UNSPECIFIED: _ClassVar[HintKind]
    HINT_KIND_KEEP: _ClassVar[HintKind]
    HINT_KIND_END: _ClassVar[HintKind]
HINT_KIND_UNSPECIFIED: HintKind
HINT_KIND_KEEP: HintKind
HINT_KIND_END: HintKind

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IssueTicketRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.CacheSpec
    def __init__(self, spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ...) -> None: ...

class IssueTicketResponse(_message.Message):
    __slots__ = ("ticket", "boot_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    boot_id: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_name", "spec", "remote")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    spec: _common_pb2.CacheSpec
    remote: bool
    def __init__(self, client_name: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ..., remote: _Optional[bool] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "arena_socket", "arena_bytes", "lease_ms", "node", "prefaulted", "arena_exposed", "stored_volumes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_FIELD_NUMBER: _ClassVar[int]
    ARENA_EXPOSED_FIELD_NUMBER: _ClassVar[int]
    STORED_VOLUMES_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    arena_socket: str
    arena_bytes: int
    lease_ms: int
    node: _common_pb2.NodeInfo
    prefaulted: bool
    arena_exposed: bool
    stored_volumes: _containers.RepeatedCompositeFieldContainer[StoredVolume]
    def __init__(self, session_id: _Optional[bytes] = ..., arena_socket: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., lease_ms: _Optional[int] = ..., node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., prefaulted: _Optional[bool] = ..., arena_exposed: _Optional[bool] = ..., stored_volumes: _Optional[_Iterable[_Union[StoredVolume, _Mapping]]] = ...) -> None: ...

class StoredVolume(_message.Message):
    __slots__ = ("volume_id", "path")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    path: str
    def __init__(self, volume_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("session_id", "operation_id", "blocks", "wait_ms", "heads")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    operation_id: bytes
    blocks: _common_pb2.BlockRun
    wait_ms: int
    heads: bool
    def __init__(self, session_id: _Optional[bytes] = ..., operation_id: _Optional[bytes] = ..., blocks: _Optional[_Union[_common_pb2.BlockRun, _Mapping]] = ..., wait_ms: _Optional[int] = ..., heads: _Optional[bool] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("outcomes", "offsets", "draining")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    offsets: bytes
    draining: bool
    def __init__(self, outcomes: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., draining: _Optional[bool] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("session_id", "operation_id", "keys", "checksums", "wait_visible_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WAIT_VISIBLE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    operation_id: bytes
    keys: bytes
    checksums: bytes
    wait_visible_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., operation_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., wait_visible_ms: _Optional[int] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "operation_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    operation_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., operation_id: _Optional[bytes] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session_id", "operation_id", "keys", "sources", "want_checksums", "parent", "depth", "layer_group", "first_layer", "heads")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    WANT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    operation_id: bytes
    keys: bytes
    sources: _containers.RepeatedCompositeFieldContainer[LoadSource]
    want_checksums: bool
    parent: bytes
    depth: int
    layer_group: int
    first_layer: int
    heads: bool
    def __init__(self, session_id: _Optional[bytes] = ..., operation_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[LoadSource, _Mapping]]] = ..., want_checksums: _Optional[bool] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., layer_group: _Optional[int] = ..., first_layer: _Optional[int] = ..., heads: _Optional[bool] = ...) -> None: ...

class LoadSource(_message.Message):
    __slots__ = ("start", "count", "node_id", "control_address", "data_address", "volume_id")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    node_id: str
    control_address: str
    data_address: str
    volume_id: str
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., node_id: _Optional[str] = ..., control_address: _Optional[str] = ..., data_address: _Optional[str] = ..., volume_id: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("runs", "lease_id", "granted_ms", "bytes_received")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTED_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[LoadedRun]
    lease_id: int
    granted_ms: int
    bytes_received: int
    def __init__(self, runs: _Optional[_Iterable[_Union[LoadedRun, _Mapping]]] = ..., lease_id: _Optional[int] = ..., granted_ms: _Optional[int] = ..., bytes_received: _Optional[int] = ...) -> None: ...

class LoadedRun(_message.Message):
    __slots__ = ("start", "count", "outcome", "tier", "source_node", "offsets", "checksums", "first_layer", "layer_count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    outcome: _common_pb2.Outcome
    tier: _common_pb2.Tier
    source_node: str
    offsets: bytes
    checksums: bytes
    first_layer: int
    layer_count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., source_node: _Optional[str] = ..., offsets: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., layer_count: _Optional[int] = ...) -> None: ...

class ReadAheadResponse(_message.Message):
    __slots__ = ("bytes_read",)
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    bytes_read: int
    def __init__(self, bytes_read: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("session_id", "session", "kind", "keys", "keep_ms", "next_turn_ms", "priority")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEEP_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TURN_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    session: str
    kind: HintKind
    keys: bytes
    keep_ms: int
    next_turn_ms: int
    priority: int
    def __init__(self, session_id: _Optional[bytes] = ..., session: _Optional[str] = ..., kind: _Optional[_Union[HintKind, str]] = ..., keys: _Optional[bytes] = ..., keep_ms: _Optional[int] = ..., next_turn_ms: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("protected_blocks", "dropped_blocks")
    PROTECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    protected_blocks: int
    dropped_blocks: int
    def __init__(self, protected_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("session_id", "keys")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    keys: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("runs", "lease_id")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[LocatedRun]
    lease_id: int
    def __init__(self, runs: _Optional[_Iterable[_Union[LocatedRun, _Mapping]]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class LocatedRun(_message.Message):
    __slots__ = ("start", "count", "volumes", "offsets", "generations")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    volumes: bytes
    offsets: bytes
    generations: bytes
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., volumes: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class AwaitPromptRequest(_message.Message):
    __slots__ = ("session_id", "operation_id", "keys", "want_checksums", "wait_ms", "transfer_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WANT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    operation_id: bytes
    keys: bytes
    want_checksums: bool
    wait_ms: int
    transfer_id: str
    def __init__(self, session_id: _Optional[bytes] = ..., operation_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., want_checksums: _Optional[bool] = ..., wait_ms: _Optional[int] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class AbandonPromptRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class AbandonPromptResponse(_message.Message):
    __slots__ = ("awaited",)
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    awaited: int
    def __init__(self, awaited: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("timeout_ms", "session_id", "keys")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    session_id: bytes
    keys: bytes
    def __init__(self, timeout_ms: _Optional[int] = ..., session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("durable_blocks", "dropped_blocks", "complete", "not_durable_blocks", "why")
    DURABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    durable_blocks: int
    dropped_blocks: int
    complete: bool
    not_durable_blocks: int
    why: str
    def __init__(self, durable_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., complete: _Optional[bool] = ..., not_durable_blocks: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("operation_id", "tier")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    tier: _common_pb2.Tier
    def __init__(self, operation_id: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_blocks",)
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ...) -> None: ...

class PullBlocksRequest(_message.Message):
    __slots__ = ("operation_id", "spec", "runs", "node_id", "control_address", "data_address", "second_copy", "may_evict")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECOND_COPY_FIELD_NUMBER: _ClassVar[int]
    MAY_EVICT_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    spec: _common_pb2.CacheSpec
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    node_id: str
    control_address: str
    data_address: str
    second_copy: bool
    may_evict: bool
    def __init__(self, operation_id: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.CacheSpec, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., node_id: _Optional[str] = ..., control_address: _Optional[str] = ..., data_address: _Optional[str] = ..., second_copy: _Optional[bool] = ..., may_evict: _Optional[bool] = ...) -> None: ...

class PullBlocksResponse(_message.Message):
    __slots__ = ("outcomes", "why")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    why: str
    def __init__(self, outcomes: _Optional[bytes] = ..., why: _Optional[str] = ...) -> None: ...

class GetNodeStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeStatsResponse(_message.Message):
    __slots__ = ("node", "counters", "tiers", "io_engines", "drain")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    IO_ENGINES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    counters: _containers.ScalarMap[str, int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    io_engines: _containers.RepeatedScalarFieldContainer[str]
    drain: _common_pb2.DrainProgress
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ..., io_engines: _Optional[_Iterable[str]] = ..., drain: _Optional[_Union[_common_pb2.DrainProgress, _Mapping]] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("volume_id", "tier", "capacity_bytes", "used_bytes", "blocks")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    tier: _common_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    def __init__(self, volume_id: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...
