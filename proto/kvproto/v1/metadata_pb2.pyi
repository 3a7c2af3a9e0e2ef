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
READ_SIDE_UNSPECIFIED: ReadSide
READ_SIDE_PREFILL: ReadSide
READ_SIDE_DECODE: ReadSide
READ_SIDE_RELAY: ReadSide

class RegisterNodeRequest(_message.Message):
    __slots__ = ("operation_id", "node")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node: _common_pb2.NodeInfo
    def __init__(self, operation_id: _Optional[bytes] = ..., node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("index_epoch", "heartbeat_interval_ms", "volume_needs")
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    VOLUME_NEEDS_FIELD_NUMBER: _ClassVar[int]
    index_epoch: bytes
    heartbeat_interval_ms: int
    volume_needs: _containers.RepeatedCompositeFieldContainer[VolumeNeed]
    def __init__(self, index_epoch: _Optional[bytes] = ..., heartbeat_interval_ms: _Optional[int] = ..., volume_needs: _Optional[_Iterable[_Union[VolumeNeed, _Mapping]]] = ...) -> None: ...

class VolumeNeed(_message.Message):
    __slots__ = ("volume_id", "inventory_needed")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_NEEDED_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    inventory_needed: bool
    def __init__(self, volume_id: _Optional[str] = ..., inventory_needed: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "boot_id", "usages")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    USAGES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    usages: _containers.RepeatedCompositeFieldContainer[VolumeUsage]
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., usages: _Optional[_Iterable[_Union[VolumeUsage, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("index_epoch", "register_again")
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    index_epoch: bytes
    register_again: bool
    def __init__(self, index_epoch: _Optional[bytes] = ..., register_again: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("node_id", "boot_id", "volume_id", "first_range", "digests", "counts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANGE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    volume_id: str
    first_range: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., first_range: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class CompareDigestsResponse(_message.Message):
    __slots__ = ("differing_ranges",)
    DIFFERING_RANGES_FIELD_NUMBER: _ClassVar[int]
    differing_ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, differing_ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class RepairRangeRequest(_message.Message):
    __slots__ = ("operation_id", "node_id", "boot_id", "volume_id", "range", "blocks")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    node_id: str
    boot_id: bytes
    volume_id: str
    range: int
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    def __init__(self, operation_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., volume_id: _Optional[str] = ..., range: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ...) -> None: ...

class RepairRangeResponse(_message.Message):
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
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "alive", "heartbeat_age_ms", "usages")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    USAGES_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    alive: bool
    heartbeat_age_ms: int
    usages: _containers.RepeatedCompositeFieldContainer[VolumeUsage]
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., alive: _Optional[bool] = ..., heartbeat_age_ms: _Optional[int] = ..., usages: _Optional[_Iterable[_Union[VolumeUsage, _Mapping]]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hit_blocks", "runs", "nodes")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[ReplicaRun]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeInfo]
    def __init__(self, hit_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[ReplicaRun, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeInfo, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("plan_id", "attempt", "parts", "policy", "reason")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    attempt: int
    parts: _containers.RepeatedCompositeFieldContainer[PlanPart]
    policy: str
    reason: str
    def __init__(self, plan_id: _Optional[int] = ..., attempt: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PlanPart, _Mapping]]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportLoadsRequest(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[LoadReport]
    def __init__(self, loads: _Optional[_Iterable[_Union[LoadReport, _Mapping]]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("plan_id", "parts", "finished")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    parts: _containers.RepeatedCompositeFieldContainer[PartReport]
    finished: bool
    def __init__(self, plan_id: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartReport, _Mapping]]] = ..., finished: _Optional[bool] = ...) -> None: ...

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

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
