from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_CORRUPT: _ClassVar[Outcome]
    OUTCOME_UNAVAILABLE: _ClassVar[Outcome]
    OUTCOME_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_NO_SPACE: _ClassVar[Outcome]

class StoreOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_OUTCOME_UNSPECIFIED: _ClassVar[StoreOutcome]
    STORE_OUTCOME_STORED: _ClassVar[StoreOutcome]
    STORE_OUTCOME_EXISTS: _ClassVar[StoreOutcome]
    STORE_OUTCOME_IN_PROGRESS: _ClassVar[StoreOutcome]
    STORE_OUTCOME_SKIPPED: _ClassVar[StoreOutcome]
    STORE_OUTCOME_CORRUPT: _ClassVar[StoreOutcome]
    STORE_OUTCOME_LOST: _ClassVar[StoreOutcome]

class BandwidthSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BANDWIDTH_SOURCE_UNSPECIFIED: _ClassVar[BandwidthSource]
    BANDWIDTH_SOURCE_CONFIGURED: _ClassVar[BandwidthSource]
    BANDWIDTH_SOURCE_MEASURED: _ClassVar[BandwidthSource]
    BANDWIDTH_SOURCE_LINK: _ClassVar[BandwidthSource]
    BANDWIDTH_SOURCE_ASSUMED: _ClassVar[BandwidthSource]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ACTIVE: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_DRAINED: _ClassVar[NodeState]
    NODE_STATE_DRAIN_BLOCKED: _ClassVar[NodeState]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_NVME: Tier
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_HIT: Outcome
OUTCOME_MISS: Outcome
OUTCOME_CORRUPT: Outcome
OUTCOME_UNAVAILABLE: Outcome
OUTCOME_TIMEOUT: Outcome
OUTCOME_NO_SPACE: Outcome
STORE_OUTCOME_UNSPECIFIED: StoreOutcome
STORE_OUTCOME_STORED: StoreOutcome
STORE_OUTCOME_EXISTS: StoreOutcome
STORE_OUTCOME_IN_PROGRESS: StoreOutcome
STORE_OUTCOME_SKIPPED: StoreOutcome
STORE_OUTCOME_CORRUPT: StoreOutcome
STORE_OUTCOME_LOST: StoreOutcome
BANDWIDTH_SOURCE_UNSPECIFIED: BandwidthSource
BANDWIDTH_SOURCE_CONFIGURED: BandwidthSource
BANDWIDTH_SOURCE_MEASURED: BandwidthSource
BANDWIDTH_SOURCE_LINK: BandwidthSource
BANDWIDTH_SOURCE_ASSUMED: BandwidthSource
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ACTIVE: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_DRAINED: NodeState
NODE_STATE_DRAIN_BLOCKED: NodeState

class CacheSpec(_message.Message):
    __slots__ = ("model", "weights_epoch", "dtype", "block_tokens", "layers", "layer_block_bytes", "layout", "layout_version", "shard_rank", "shard_count", "hash_algorithm", "tenant", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_epoch: str
    dtype: str
    block_tokens: int
    layers: int
    layer_block_bytes: int
    layout: str
    layout_version: int
    shard_rank: int
    shard_count: int
    hash_algorithm: str
    tenant: str
    salt: bytes
    def __init__(self, model: _Optional[str] = ..., weights_epoch: _Optional[str] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., layers: _Optional[int] = ..., layer_block_bytes: _Optional[int] = ..., layout: _Optional[str] = ..., layout_version: _Optional[int] = ..., shard_rank: _Optional[int] = ..., shard_count: _Optional[int] = ..., hash_algorithm: _Optional[str] = ..., tenant: _Optional[str] = ..., salt: _Optional[bytes] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("namespace_id", "parent", "depth", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    parent: bytes
    depth: int
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class VolumeInfo(_message.Message):
    __slots__ = ("volume_id", "tier", "capacity_bytes", "uid")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    tier: Tier
    capacity_bytes: int
    uid: bytes
    def __init__(self, volume_id: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., uid: _Optional[bytes] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "boot_id", "roles", "control_address", "data_address", "local_socket", "volumes", "storage_address", "storage_bytes_per_s", "compute_bytes_per_s", "mounts", "storage_source", "compute_source", "zone")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    roles: _containers.RepeatedScalarFieldContainer[str]
    control_address: str
    data_address: str
    local_socket: str
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeInfo]
    storage_address: str
    storage_bytes_per_s: int
    compute_bytes_per_s: int
    mounts: _containers.RepeatedScalarFieldContainer[str]
    storage_source: BandwidthSource
    compute_source: BandwidthSource
    zone: str
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., roles: _Optional[_Iterable[str]] = ..., control_address: _Optional[str] = ..., data_address: _Optional[str] = ..., local_socket: _Optional[str] = ..., volumes: _Optional[_Iterable[_Union[VolumeInfo, _Mapping]]] = ..., storage_address: _Optional[str] = ..., storage_bytes_per_s: _Optional[int] = ..., compute_bytes_per_s: _Optional[int] = ..., mounts: _Optional[_Iterable[str]] = ..., storage_source: _Optional[_Union[BandwidthSource, str]] = ..., compute_source: _Optional[_Union[BandwidthSource, str]] = ..., zone: _Optional[str] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("operation_id", "move")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    move: bool
    def __init__(self, operation_id: _Optional[bytes] = ..., move: _Optional[bool] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("code", "subject", "facts")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    code: str
    subject: str
    facts: str
    def __init__(self, code: _Optional[str] = ..., subject: _Optional[str] = ..., facts: _Optional[str] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("operation_id", "state", "waiting_blocks", "not_durable_blocks", "left_blocks", "moved_blocks", "moved_bytes", "why")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    operation_id: bytes
    state: NodeState
    waiting_blocks: int
    not_durable_blocks: int
    left_blocks: int
    moved_blocks: int
    moved_bytes: int
    why: str
    def __init__(self, operation_id: _Optional[bytes] = ..., state: _Optional[_Union[NodeState, str]] = ..., waiting_blocks: _Optional[int] = ..., not_durable_blocks: _Optional[int] = ..., left_blocks: _Optional[int] = ..., moved_blocks: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "retryable", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    retryable: bool
    fields: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., retryable: _Optional[bool] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...
