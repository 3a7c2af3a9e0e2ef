"""JSON schemas of the control API. Every field has an example, because the OpenAPI document is generated from them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from kvstore.control_api.schemas.base import RequestModel, ResponseModel
from kvstore.core import limits
from kvstore.core.keys import MAX_TOKEN

TierName = Literal["hbm", "dram", "nvme"]
PolicyName = Literal["prefill_only", "round_robin", "shorter_queue", "split"]
SideName = Literal["prefill", "decode", "relay"]
NodeStateName = Literal["active", "draining", "drained", "drain_blocked"]
ReachName = Literal["dram", "nvme", "peer", "none"]

HEX_ID = r"^[0-9a-f]{32}$"
_ID = "8c2f0d6e1b7a4c93a5d1e0f97b346c21"
_KEY = "03b1f2c4d5968778695a4b3c2d1e0f10"
HexId = Annotated[str, Field(pattern=HEX_ID, examples=[_ID])]
HexKey = Annotated[str, Field(pattern=HEX_ID, examples=[_KEY])]
NodeName = Annotated[str, Field(description="the node", examples=["host-1"])]
MAX_TOKENS: Final = 4_194_304
"""Tokens of one looked up chain."""
Bytes = Annotated[int, Field(ge=0, examples=[68719476736])]
Count = Annotated[int, Field(ge=0, examples=[1600])]
Rate = Annotated[float, Field(ge=0, examples=[3125000000.0])]
Seconds = Annotated[float, Field(ge=0, examples=[0.134])]


class UnreachableNode(ResponseModel):
    """A node that did not answer or that failed."""

    node_id: NodeName
    kind: str = Field(description="kind of the error", examples=["unavailable"])
    detail: str = Field(description="reason", examples=["the node does not report to the metadata server"])


# ---- health ----
class Health(ResponseModel):
    """The server answers."""

    status: Literal["ok"] = Field(description="always ok: a server that cannot answer returns an error instead", examples=["ok"])


# ---- index ----
class Index(ResponseModel):
    """The prefix index of the metadata server. The ETag is its epoch."""

    epoch: HexId = Field(description="epoch of the index; a new value means that the index was rebuilt")
    blocks: Count = Field(description="keys", examples=[1000000])
    bytes: Bytes = Field(description="size on disk", examples=[104857600])


# ---- nodes ----
BandwidthSource = Literal["configured", "measured", "link", "assumed"]


class Nic(ResponseModel):
    """A link of a node, as the planner sees it."""

    network: Literal["storage", "compute"] = Field(
        description="storage: used for reads of volumes; compute: used between engines", examples=["storage"]
    )
    address: str = Field(description="address of the data plane on this link", examples=["10.0.1.1:7500"])
    configured_bytes_per_s: Bytes = Field(description="configured bandwidth; 0: not configured", examples=[3125000000])
    planned_bytes_per_s: Rate | None = Field(
        description="bandwidth that the planner assumes; null: the planner does not know the node"
    )
    planned_source: BandwidthSource | None = Field(
        description="source of that bandwidth: configured, measured, link (speed reported by the kernel) or assumed;"
        " null: the planner does not know the node",
        examples=["measured"],
    )
    pending_bytes: Bytes = Field(
        description="planned bytes: on the storage link reads, on the compute link forwarded and received bytes", examples=[0]
    )
    pending_tokens: Count | None = Field(description="tokens of planned reads; storage link only", examples=[0])


class Drain(ResponseModel):
    """Progress of a drain."""

    move: bool = Field(description="move blocks that no other active node has on a volume to other nodes", examples=[False])
    waiting_blocks: Count = Field(description="blocks waiting for write-back", examples=[0])
    not_durable_blocks: Count = Field(description="blocks that would be lost if the node stopped now", examples=[0])
    left_blocks: Count = Field(description="with move: blocks still to be moved", examples=[0])
    moved_blocks: Count = Field(description="with move: moved blocks", examples=[1600])
    moved_bytes: Bytes = Field(description="with move: moved bytes")
    why: str | None = Field(description="reason of a wait; null: it does not wait", examples=["write-back: the disk is full"])


class Participation(ResponseModel):
    """State of a node in the store."""

    node_id: NodeName
    state: NodeStateName = Field(
        description="active: it accepts stores; draining: it accepts no stores and makes its blocks durable; drained: it may be"
        " stopped; drain_blocked: it cannot make progress, and stopping it would lose blocks",
        examples=["active"],
    )
    drain: Drain | None = Field(description="null: no drain was requested")


class SetDrain(RequestModel):
    """How a node drains."""

    move: bool = Field(
        default=False, description="move blocks that no other active node has on a volume to other nodes", examples=[False]
    )


class Node(Participation):
    """A node as the metadata server knows it."""

    alive: bool = Field(description="whether its heartbeats arrive", examples=[True])
    stopped: bool = Field(description="whether it was stopped gracefully and has not restarted", examples=[False])
    refused: str | None = Field(description="why the metadata server rejects its calls; null: it rejects none", examples=[None])
    heartbeat_age_s: Seconds = Field(description="time since the last heartbeat")
    boot_id: HexId = Field(description="id of this start; a new value means that the node was restarted")
    roles: list[str] = Field(
        description="prefill, decode: what engines of this host do; storage: it serves its volumes to other hosts",
        examples=[["prefill"]],
    )
    control_address: str = Field(description="address of the gRPC service", examples=["10.0.0.1:7481"])
    data_address: str = Field(description="address of the data plane on the compute network", examples=["10.0.0.1:7482"])
    storage_address: str = Field(description="address of the data plane on the storage network", examples=["10.0.1.1:7483"])
    nics: list[Nic] = Field(description="links of the node")
    volumes: list[str] = Field(description="volumes of the node", examples=[["host-1/dram", "host-1/nvme0"]])
    mounts: list[str] = Field(description="volumes of other nodes that it reads directly", examples=[[]])


class Staging(ResponseModel):
    """A staging buffer in the arena."""

    name: str = Field(description="prefill_buffer or decode_buffer", examples=["prefill_buffer"])
    used_bytes: Bytes = Field(description="bytes admitted for loads that are in progress", examples=[0])
    waiting_loads: Count = Field(description="loads that wait for space in the buffer", examples=[0])


class NodeProcess(ResponseModel):
    """State that the node reports about itself."""

    version: str = Field(description="version of the node daemon", examples=["0.2.0"])
    uptime_s: Seconds = Field(description="time since the node started", examples=[86400.0])
    sessions: Count = Field(description="engine sessions", examples=[2])
    blocks: Count = Field(description="blocks held in any tier")
    write_back_waiting_blocks: Count = Field(description="blocks waiting for write-back", examples=[0])
    publish_waiting_events: Count = Field(description="changes not yet published to the index", examples=[0])
    staging: list[Staging] = Field(description="staging buffers of layer-wise loads and awaited prompts")
    traffic_cap_bytes_per_s: Bytes | None = Field(
        description="limit of KV traffic; 0: no limit; null: the node was started without a limit and cannot get one",
        examples=[None],
    )
    io_engines: list[str] = Field(description="I/O engines in use", examples=[["host-1/nvme0: posix O_DIRECT"]])
    hints_off: bool = Field(description="whether node.hint_share = 0: hints about sessions are ignored", examples=[False])
    hinted_sessions: Count = Field(description="sessions whose blocks hints protect now", examples=[12])
    hinted_bytes: Bytes = Field(description="bytes that hints protect now")
    read_ahead_off: bool = Field(description="whether node.read_ahead = 0: nothing is read ahead", examples=[False])


class NodeDetail(Node):
    """A node with the state that it reports."""

    process: NodeProcess | None = Field(description="null: the node did not answer")
    unreached: str | None = Field(description="why the node did not answer", examples=[None])


# ---- activity ----
class LinkTraffic(ResponseModel):
    """Traffic of a NIC, all protocols."""

    network: Literal["storage", "compute"] = Field(
        description="storage: used for reads of volumes; compute: used between engines", examples=["storage"]
    )
    received_bytes: Bytes = Field(description="bytes received since the host started")
    sent_bytes: Bytes = Field(description="bytes sent since the host started")


class DataPlane(ResponseModel):
    """Payload bytes of a node's data plane since the node started."""

    served_bytes: Bytes = Field(description="bytes that engines and other nodes read from this node")
    taken_bytes: Bytes = Field(description="bytes that engines and other nodes wrote to this node")
    fetched_bytes: Bytes = Field(description="bytes that this node read from others")
    written_bytes: Bytes = Field(description="bytes that this node wrote to others")


class LoadBucket(ResponseModel):
    """One bucket of a latency histogram."""

    up_to_s: float | None = Field(description="upper bound of the bucket; null: no upper bound", examples=[0.01])
    loads: Count = Field(description="loads within the bounds of this bucket only")


class LoadTimes(ResponseModel):
    """Latency of loads since the node started, by the farthest source that they used."""

    reach: ReachName = Field(
        description="farthest source: dram, nvme (volumes of this node), peer (another node) or none (no hit)", examples=["nvme"]
    )
    total_s: Seconds = Field(description="sum of the load times")
    buckets: list[LoadBucket] = Field(description="histogram of the load times, shortest first; the counts are not cumulative")


class LoadedBytes(ResponseModel):
    """Bytes loaded for engines since the node started, by source."""

    dram: Bytes = Field(description="from DRAM of this node")
    nvme: Bytes = Field(description="from NVMe volumes of this node")
    peer: Bytes = Field(description="from other nodes")


class ReadAheadTotals(ResponseModel):
    """What a node read for requests that waited in the queue of their engine, since the node started."""

    read_bytes: Bytes = Field(description="bytes read from volumes and other nodes")
    unused_bytes: Bytes = Field(description="of these, bytes that no load asked for while they were held")
    refused: Count = Field(description="calls that read nothing, because the budget was full", examples=[0])


class Fault(ResponseModel):
    """Number of errors of one kind since the node started."""

    metric: str = Field(description="name of the metric", examples=["kvstore_peer_fetch_failed_total"])
    what: str = Field(description="description of the error", examples=["fetches from other nodes that failed"])
    total: Count = Field(description="errors since the node started", examples=[3])


class TenantHints(ResponseModel):
    """Hints about sessions of one tenant at a node."""

    tenant: str = Field(description="tenant name; empty: the default tenant", examples=["team-a"])
    sessions: Count = Field(description="sessions whose blocks are protected now", examples=[12])
    protected_bytes: Bytes = Field(description="bytes that are protected now")
    keeps: Count = Field(description="hints since the node started that a session goes on", examples=[340])
    ends: Count = Field(description="hints since the node started that a session has ended", examples=[28])
    beyond_limit_blocks: Count = Field(
        description="blocks since the node started that were not protected because of the limit", examples=[0]
    )
    dropped_blocks: Count = Field(
        description="blocks of ended sessions since the node started, which are evicted first", examples=[5120]
    )


class Activity(ResponseModel):
    """Totals of a node since it started. Rates are differences of two responses; lower totals mean a restart."""

    node_id: NodeName
    uptime_s: Seconds = Field(description="time since the node started", examples=[86400.0])
    links: list[LinkTraffic] = Field(description="traffic by link; compute only if there is no separate storage network")
    data_plane: DataPlane = Field(description="payload bytes between this node and engines or other nodes")
    loads: list[LoadTimes] = Field(description="load times, one entry per farthest source")
    loaded: LoadedBytes = Field(description="bytes loaded for engines, by source")
    read_ahead: ReadAheadTotals = Field(description="bytes read ahead of loads")
    faults: list[Fault] = Field(description="errors that occurred")
    hints: list[TenantHints] = Field(description="hints about sessions, by tenant; the first 1,024 tenants that gave one")


class Activities(ResponseModel):
    """Totals of the nodes of one page."""

    items: list[Activity] = Field(description="totals of the nodes that answered, by node id")
    unreached: list[UnreachableNode] = Field(description="nodes that did not answer, including engine pools of device memory")
    next_cursor: str | None = Field(
        description="cursor of the next page; null: this is the last page", examples=["bm9kZXMKaG9zdC0x"]
    )


# ---- volumes ----
class VolumeTenant(ResponseModel):
    """Usage of a tenant on a volume."""

    tenant: str | None = Field(
        description="tenant name; empty: the default tenant; null: namespaces whose spec is unknown",
        examples=["team-a"],
    )
    bytes: Bytes = Field(description="payload bytes", examples=[34359738368])


class Volume(ResponseModel):
    """A volume: DRAM arena, NVMe volume or device memory pool."""

    volume_id: str = Field(description="node id and name of the volume", examples=["host-1/nvme0"])
    node_id: NodeName
    tier: TierName = Field(
        description="hbm: GPU memory of an engine; dram: arena of a node; nvme: files of a node", examples=["nvme"]
    )
    node_alive: bool = Field(description="whether the heartbeats of its node arrive", examples=[True])
    capacity_bytes: Bytes = Field(description="capacity for blocks")
    used_bytes: Bytes = Field(description="bytes in slots that hold a block", examples=[34359738368])
    blocks: Count = Field(description="blocks held")
    arriving: bool = Field(description="whether its inventory, or a part of it, has yet to arrive", examples=[False])
    read_only: str | None = Field(description="why the volume is read-only; null: it is writable", examples=[None])
    quarantined_blocks: Count | None = Field(
        description="corrupt replicas found since the node started; null: the node did not answer", examples=[0]
    )
    tenants: list[VolumeTenant] | None = Field(description="usage by tenant, the 1,024 largest; null: the node did not answer")


class EvictVolume(RequestModel):
    """Eviction of a volume."""

    to_percent: int = Field(
        ge=0, le=100, description="evict the coldest blocks until at most this share of the capacity is used", examples=[50]
    )


class VolumeEviction(ResponseModel):
    """Result of an eviction."""

    evicted_blocks: Count = Field(description="replicas evicted", examples=[800])
    kept_blocks: Count = Field(description="replicas kept because they are in use, or not durable yet", examples=[0])
    used_bytes: Bytes = Field(description="bytes used on the volume afterwards", examples=[34359738368])


# ---- namespaces ----
class Spec(ResponseModel):
    """Specification of a namespace: KV caches with equal specs are interchangeable. The salt is never returned."""

    model: str = Field(description="name of the model, or an id of its configuration", examples=["meta-llama/Llama-3.1-8B"])
    weights_epoch: str = Field(description="version of the weights", examples=["2026-05-01"])
    dtype: str = Field(description="element type of the KV cache", examples=["bf16"])
    block_tokens: Count = Field(description="tokens per block", examples=[64])
    layers: Count = Field(description="layer blocks per block", examples=[32])
    layer_block_bytes: Bytes = Field(
        description="bytes per layer block; a block has layers x layer_block_bytes", examples=[262144]
    )
    layout: str = Field(
        description="id of the byte layout within a layer block; opaque: known only to the engine", examples=["opaque"]
    )
    layout_version: Count = Field(description="version of the layout", examples=[1])
    shard_rank: Count = Field(description="rank of this shard of the KV cache, from 0", examples=[0])
    shard_count: Count = Field(description="number of shards (tensor parallelism); 1: not sharded", examples=[1])
    hash_algorithm: str = Field(description="hash of the block keys: xxh3-128 or sha256-128", examples=["xxh3-128"])
    tenant: str = Field(description="owner of the namespace; empty: the default tenant", examples=[""])
    salted: bool = Field(description="whether the spec has a salt", examples=[False])


class Namespace(ResponseModel):
    """A namespace, with its lookups since the metadata server started."""

    namespace_id: HexId = Field(description="digest of the spec")
    spec: Spec = Field(description="specification that the id is a digest of")
    lookups: Count = Field(description="lookups answered", examples=[5200])
    asked_blocks: Count = Field(description="blocks looked up", examples=[8320000])
    hit_blocks: Count = Field(description="blocks found in the index", examples=[7904000])
    hit_ratio: float | None = Field(ge=0, le=1, description="share of hits; null: no block was looked up", examples=[0.95])
    ttl_s: float | None = Field(
        ge=0,
        description="time to live: blocks that were not used for this time are evicted; null: no time to live",
        examples=[604800.0],
    )
    kept: bool = Field(
        description="whether its blocks are protected from eviction, up to half of each tier of a node", examples=[False]
    )
    copies: int = Field(ge=1, description="number of nodes whose volumes hold each durable block", examples=[1])


class UsageEntry(ResponseModel):
    """Usage of a namespace on one volume."""

    node_id: NodeName
    volume_id: str = Field(description="volume that holds the blocks", examples=["host-1/nvme0"])
    tier: TierName = Field(description="tier of the volume", examples=["nvme"])
    blocks: Count = Field(description="blocks of the namespace on the volume")
    bytes: Bytes = Field(description="payload bytes")


class TierTotal(ResponseModel):
    """Usage of a namespace in one tier over all nodes. A block on several nodes counts once per node."""

    tier: TierName = Field(description="tier of the volumes", examples=["nvme"])
    blocks: Count = Field(description="blocks of the namespace in the tier")
    bytes: Bytes = Field(description="payload bytes")


class Usage(ResponseModel):
    """Usage of a namespace, counted by the nodes at the time of the query."""

    namespace_id: HexId = Field(description="namespace that was counted")
    tiers: list[TierTotal] = Field(description="totals by tier")
    volumes: list[UsageEntry] = Field(description="usage by volume")
    unreached: list[UnreachableNode] = Field(description="nodes that did not answer and are not counted")


class EvictNamespace(RequestModel):
    """Eviction of a namespace."""

    tiers: list[Literal["dram", "nvme"]] = Field(
        default=["dram", "nvme"],
        min_length=1,
        max_length=2,
        description="tiers to evict from; both by default",
        examples=[["nvme"]],
    )


class NodeEvicted(ResponseModel):
    """Result of an eviction on one node."""

    node_id: NodeName
    evicted_blocks: Count = Field(description="replicas evicted", examples=[800])
    kept_blocks: Count = Field(description="replicas kept because they are in use, or (evict only) not durable yet", examples=[0])


class NamespaceEvicted(ResponseModel):
    """Result of evicting or invalidating a namespace."""

    namespace_id: HexId = Field(description="namespace whose blocks were dropped")
    complete: bool = Field(
        description="whether every node finished and kept no block; if not, repeat the request when all nodes are up",
        examples=[True],
    )
    evicted_blocks: Count = Field(description="replicas evicted over all nodes and tiers", examples=[2400])
    kept_blocks: Count = Field(description="replicas kept over all nodes", examples=[0])
    nodes: list[NodeEvicted] = Field(description="result by node")
    unreached: list[UnreachableNode] = Field(description="nodes that did not evict; they still hold their blocks")


class BumpWeights(RequestModel):
    """A new weights epoch."""

    weights_epoch: str = Field(
        min_length=1, max_length=limits.MAX_NAME_BYTES, description="name of the new weights", examples=["2026-06-01"]
    )
    invalidate: bool = Field(default=True, description="drop every block of the old namespace", examples=[True])


class WeightsBump(ResponseModel):
    """The namespace of the new weights."""

    namespace_id: HexId = Field(description="namespace of engines that start with this weights_epoch")
    spec: Spec = Field(description="specification of the namespace, with the new weights_epoch")
    invalidated: NamespaceEvicted | None = Field(description="result of invalidating the old namespace; null: not requested")


# ---- blocks ----
BlockStateName = Literal["held", "silent", "gone", "misplaced", "unknown"]


class Replica(ResponseModel):
    """Replicas of a run's blocks on one volume."""

    volume_id: str | None = Field(description="null: from a volume epoch that is over", examples=["host-1/nvme0"])
    node_id: str | None = Field(
        description="node that owns the volume; null: from a volume epoch that is over", examples=["host-1"]
    )
    tier: TierName | None = Field(description="tier of the volume; null: from a volume epoch that is over", examples=["nvme"])
    visible: bool = Field(description="whether its node is alive, or a node that mounts the volume", examples=[True])
    run_start: Count = Field(description="depth from which the volume holds the chain without a gap", examples=[0])


class BlockRun(ResponseModel):
    """Consecutive blocks with equal index records."""

    start: Count = Field(description="position of the first block in the request", examples=[0])
    count: Count = Field(description="number of blocks", examples=[156])
    hit: bool = Field(description="whether the run is in the prefix that a lookup returns", examples=[True])
    state: BlockStateName = Field(
        description="held: on a live node; silent: only on nodes without heartbeats; gone: all nodes that had it were restarted;"
        " misplaced: stored in another namespace or at another depth; unknown: never stored, or evicted everywhere",
        examples=["held"],
    )
    why: str = Field(description="why the run hits or misses", examples=["held by host-1"])
    namespace_id: HexId | None = Field(description="namespace of the blocks")
    depth: Count = Field(description="depth of the first block in its chain", examples=[0])
    replicas: list[Replica] = Field(description="replicas known to the index")


class Block(ResponseModel):
    """Index record of a block."""

    key: HexKey = Field(description="key of the block")
    state: BlockStateName = Field(description="as in a run: held, silent, gone, misplaced or unknown", examples=["held"])
    why: str = Field(description="reason of the state", examples=["held by host-1"])
    namespace_id: HexId | None = Field(description="namespace of the block; null: unknown")
    depth: Count | None = Field(description="depth in its chain; null: unknown", examples=[17])
    replicas: list[Replica] = Field(description="replicas known to the index; empty: none")


class LookupQuery(RequestModel):
    """A chain from its first block, given by keys or by tokens."""

    namespace_id: HexId = Field(description="namespace of the chain")
    # report only the first invalid entry of up to a million
    keys: list[HexKey] | None = Field(
        default=None,
        fail_fast=True,
        max_length=limits.MAX_KEYS_PER_CALL,
        description="block keys in chain order",
        examples=[[_KEY]],
    )
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]] | None = Field(
        default=None, fail_fast=True, max_length=MAX_TOKENS, description="token ids, instead of keys", examples=[[1, 2, 3, 4]]
    )
    text: str | None = Field(
        default=None,
        max_length=4_194_304,
        description="text of the prompt, instead of keys; requires `admin.tokenizer`",
        examples=[None],
    )


class LookupAnswer(ResponseModel):
    """Hit length of a chain, and the reason of the first miss."""

    blocks: Count = Field(description="blocks looked up; with tokens, full blocks only", examples=[200])
    hit_blocks: Count = Field(description="length of the longest prefix that can be served", examples=[156])
    first_miss: str | None = Field(
        description="reason of the first miss; null: all blocks hit", examples=["never stored, or evicted everywhere"]
    )
    runs: list[BlockRun] = Field(description="all blocks in chain order")
    tokens: Count | None = Field(description="number of tokens; null: keys were given", examples=[12800])


class Tokenizer(ResponseModel):
    """Tokenizer of the prefix explorer."""

    configured: bool = Field(description="whether `POST /v1/blocks/lookup` accepts `text`", examples=[False])


# ---- planning ----
class LivePart(ResponseModel):
    """A part of a plan in progress."""

    index: Count = Field(description="number of the part in reports, from 0", examples=[0])
    start: Count = Field(description="position of the first block", examples=[0])
    count: Count = Field(description="number of blocks", examples=[800])
    side: SideName = Field(description="role of the node for this request", examples=["decode"])
    node_id: NodeName
    left: Count = Field(description="blocks not yet reported as read", examples=[120])
    failed: bool = Field(description="whether the part failed and its missing blocks were planned again", examples=[False])


class LivePlan(ResponseModel):
    """A planned load in progress."""

    plan_id: str = Field(description="decimal plan id, as in logs", examples=["4611686018427387905"])
    attempt: Count = Field(description="number of times that a part was planned again", examples=[0])
    policy: str = Field(description="path policy of the plan", examples=["split"])
    prefill_node: str = Field(description="node of the engine that computes", examples=["host-1"])
    decode_node: str | None = Field(description="node of the engine that decodes; null: none was named", examples=["host-2"])
    blocks: Count = Field(description="blocks to load")
    block_bytes: Bytes = Field(description="bytes per block", examples=[8388608])
    parts: list[LivePart] = Field(description="parts of all attempts")
    expires_in_s: Seconds = Field(description="time until the plan is forgotten unless it is reported on", examples=[42.0])


class ReadQueue(ResponseModel):
    """Read queue of a node's storage link."""

    node_id: NodeName
    alive: bool = Field(description="whether the node gets new work", examples=[True])
    pending_bytes: Bytes = Field(description="planned reads that are not reported as finished", examples=[0])
    pending_tokens: Count = Field(description="the same in tokens", examples=[0])
    storage_bytes_per_s: Rate = Field(description="estimated bandwidth of the storage link")
    storage_source: BandwidthSource | None = Field(description="source of the estimate; null: past decision", examples=["link"])
    compute_bytes_per_s: Rate = Field(description="estimated bandwidth of the compute link")
    compute_source: BandwidthSource | None = Field(
        description="source of the estimate; null: past decision", examples=["assumed"]
    )
    sending_bytes: Bytes = Field(description="pending bytes that the node forwards to others", examples=[0])
    receiving_bytes: Bytes = Field(description="pending bytes that others forward to the node", examples=[0])


class DecidedPart(ResponseModel):
    """A part of a decision."""

    index: Count = Field(description="number of the part in reports, from 0", examples=[0])
    start: Count = Field(description="position of the first block", examples=[0])
    count: Count = Field(description="number of blocks", examples=[800])
    side: SideName = Field(description="role of the node for this request", examples=["prefill"])
    node_id: NodeName


class Decision(ResponseModel):
    """A load decision, with its inputs."""

    plan_id: str = Field(description="decimal plan id", examples=["4611686018427387905"])
    attempt: Count = Field(description="0: first plan; above 0: a part had failed", examples=[0])
    ago_s: Seconds = Field(description="time since the decision", examples=[1.5])
    policy: str = Field(description="path policy of the decision", examples=["split"])
    prefill_node: str = Field(description="node of the engine that computes", examples=["host-1"])
    decode_node: str | None = Field(description="node of the engine that decodes; null: none was named", examples=["host-2"])
    blocks: Count = Field(description="blocks of the whole request")
    block_bytes: Bytes = Field(description="bytes per block", examples=[8388608])
    predicted_s: Seconds = Field(description="predicted time until the last part arrives")
    considered: list[ReadQueue] = Field(description="read queues of the candidates before the decision")
    excluded: list[str] = Field(description="candidates excluded because they were dead, unknown or had failed", examples=[[]])
    parts: list[DecidedPart] = Field(description="planned parts")


class Decisions(ResponseModel):
    """The last load decisions, newest first."""

    items: list[Decision] = Field(description="decisions, newest first")


class PathPolicy(ResponseModel):
    """Path policy: choice of storage links for loads whose request names no policy. The ETag is the policy."""

    policy: str = Field(description="policy in force", examples=["split"])
    configured: str = Field(description="configured policy, which applies again after a restart", examples=["split"])


class SetPathPolicy(RequestModel):
    """A new path policy."""

    policy: PolicyName = Field(
        description="prefill_only: the prefill host reads; round_robin: both hosts take turns; shorter_queue: the host with less"
        " to read; split: both and idle hosts, each a part",
        examples=["shorter_queue"],
    )


# ---- loads ----
class SlowLoad(ResponseModel):
    """Record of one load."""

    node_id: NodeName
    request_id: str = Field(description="request id from the client, as in logs and traces", examples=["engine-7f3a-12"])
    seconds: Seconds = Field(description="duration of the load")
    ago_s: Seconds = Field(description="time since the load ended", examples=[12.0])
    blocks: Count = Field(description="blocks requested")
    hit_blocks: Count = Field(description="blocks loaded")
    reason: str = Field(
        description="main cause of the duration, or of missing blocks",
        examples=["90 % of the time reading from node host-2"],
    )
    action: str | None = Field(
        description="what to do about the cause; null: nothing", examples=["Check node host-2: its process."]
    )
    figures: dict[str, float] = Field(description="wait times and blocks by source", examples=[{"peer_wait_s": 0.12}])


class SlowLoads(ResponseModel):
    """Slowest loads of the last minute over all nodes, slowest first."""

    items: list[SlowLoad] = Field(description="loads, slowest first; empty: no load in the last minute")
    unreached: list[UnreachableNode] = Field(description="nodes that did not answer")


class Overview(ResponseModel):
    """Nodes with activity, volumes and slow loads."""

    nodes: list[Node] = Field(description="nodes of this page, by id")
    activity: list[Activity] = Field(description="totals of the nodes that answered")
    volumes: list[Volume] = Field(description="volumes of these nodes, by id")
    slow_loads: list[SlowLoad] = Field(description="slowest loads of the last minute on these nodes, slowest first")
    unreached: list[UnreachableNode] = Field(description="nodes that did not answer, including engine pools of device memory")
    known_nodes: Count = Field(description="number of known nodes, over all pages", examples=[3])
    next_cursor: str | None = Field(
        description="cursor of the next page; null: this is the last page", examples=["bm9kZXMKaG9zdC0x"]
    )


# ---- changes at a node ----
class TrafficCap(ResponseModel):
    """Limit of KV traffic on a node's compute network. The ETag is the limit."""

    node_id: NodeName
    bytes_per_s: Bytes = Field(description="bytes per second in each direction; 0: no limit", examples=[2812500000])


class SetTrafficCap(RequestModel):
    """A new limit, valid until the node restarts."""

    bytes_per_s: int = Field(ge=0, le=2**53, description="bytes per second in each direction; 0: no limit", examples=[2812500000])


class DigestComparison(ResponseModel):
    """Result of one anti-entropy round."""

    node_id: NodeName
    repaired_ranges: Count = Field(description="repaired key ranges, of 4,096 per volume", examples=[0])


class IndexRebuild(ResponseModel):
    """Rebuild of the index: the index is dropped and filled again from the nodes' inventories."""

    dropped_epoch: HexId = Field(description="epoch of the dropped index; the rebuild has begun when /v1/index shows another one")
