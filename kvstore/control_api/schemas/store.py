"""What the admin REST answers and takes, as JSON. Every field has an example: the OpenAPI document is made of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
Bytes = Annotated[int, Field(ge=0, examples=[68719476736])]
Count = Annotated[int, Field(ge=0, examples=[1600])]
Rate = Annotated[float, Field(ge=0, examples=[3125000000.0])]
Seconds = Annotated[float, Field(ge=0, examples=[0.134])]


class Shown(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")


_MOST_FIELDS = 64


class Taken(BaseModel):
    """A request's body; a field it does not know is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: object) -> object:
        """Each unknown field would be told as an error of its own: of 300,000 of them, for ten seconds."""
        if isinstance(body, dict) and len(body) > _MOST_FIELDS:
            raise ValueError(f"no request has more than {_MOST_FIELDS} fields")
        return body


class Unreached(Shown):
    """A node that did not answer, or could not do what was asked."""

    node_id: NodeName
    kind: str = Field(description="of the error", examples=["unavailable"])
    detail: str = Field(description="why", examples=["the node does not report to the metadata server"])


# ---- health ----
class Health(Shown):
    """That the server answers."""

    status: Literal["ok"] = Field(examples=["ok"])


# ---- cluster ----
class Cluster(Shown):
    """The store at a glance."""

    health: Literal["ok", "degraded"] = Field(description="degraded: see problems", examples=["degraded"])
    problems: list[str] = Field(
        description="what is wrong, at most 100",
        examples=[
            ["node host-2 was stopped: its blocks are not found until it reports again. If its process runs, its log says why"]
        ],
    )
    admin_version: str = Field(description="of this server", examples=["0.1.0"])
    metadata_version: str = Field(description="of the metadata server", examples=["0.1.0"])
    metadata_address: str = Field(description="of the metadata server", examples=["127.0.0.1:7400"])
    metadata_workers: Count = Field(description="its processes; each plans and counts for itself", examples=[1])
    metadata_uptime_s: Seconds = Field(description="since it began to serve this index", examples=[86400.0])
    index_epoch: HexId = Field(description="another value later: the index was made anew")
    index_blocks: Count = Field(description="keys in the index", examples=[1000000])
    index_bytes: Bytes = Field(description="that the index takes on disk", examples=[104857600])
    namespaces: Count = Field(description="known", examples=[3])
    nodes_alive: Count = Field(description="whose heartbeats arrive", examples=[3])
    nodes_silent: Count = Field(description="known, not heard of and not refused", examples=[1])
    nodes_refused: Count = Field(description="whose calls are refused for their tokens", examples=[0])
    live_plans: Count = Field(description="planned loads under way", examples=[12])
    path_policy: str = Field(description="where a request names none", examples=["split"])


class Index(Shown):
    """The prefix index of the metadata server. The ETag is its epoch."""

    epoch: HexId = Field(description="another value later: the index was made anew")
    blocks: Count = Field(description="keys", examples=[1000000])
    bytes: Bytes = Field(description="on disk", examples=[104857600])


# ---- nodes ----
BandwidthSource = Literal["configured", "measured", "link", "assumed"]


class Nic(Shown):
    """One of a node's links, as the planner sees it."""

    network: Literal["storage", "compute"] = Field(examples=["storage"])
    address: str = Field(description="of the data plane on it", examples=["10.0.1.1:7500"])
    configured_bytes_per_s: Bytes = Field(description="0: nobody said", examples=[3125000000])
    planned_bytes_per_s: Rate | None = Field(description="what the planner reckons with; null: it does not know the node")
    planned_source: BandwidthSource | None = Field(
        description="where that comes from: an operator, a measurement, the speed of the link as the kernel reports it, or it is"
        " assumed as nobody knows; null: the planner does not know the node",
        examples=["measured"],
    )
    pending_bytes: Bytes = Field(
        description="storage: planned reads; compute: of them, what goes out and comes in over it", examples=[0]
    )
    pending_tokens: Count | None = Field(description="of planned reads, storage only", examples=[0])


class Drain(Shown):
    """That a node is to drain, and how far it is."""

    move: bool = Field(description="others take over what lies on no other active node's volume", examples=[False])
    waiting_blocks: Count = Field(description="that are being made durable", examples=[0])
    not_durable_blocks: Count = Field(description="that would be lost if it ended now", examples=[0])
    left_blocks: Count = Field(description="with move: still to be taken over", examples=[0])
    moved_blocks: Count = Field(description="with move: taken over so far", examples=[1600])
    moved_bytes: Bytes = Field(description="their bytes")
    why: str | None = Field(description="what it waits for; null: nothing", examples=["write-behind: the disk is full"])


class Participation(Shown):
    """Whether a node takes part."""

    node_id: NodeName
    state: NodeStateName = Field(
        description="active: it takes whatever comes; draining: nothing new, and sees to it that nothing is lost; drained: it may"
        " be stopped; drain_blocked: it can do no more for now, and stopping it would lose blocks",
        examples=["active"],
    )
    drain: Drain | None = Field(description="null: it is not to drain")


class SetDrain(Taken):
    """How it is to drain."""

    move: bool = Field(default=False, description="others take over what lies on no other active node's volume", examples=[False])


class Node(Participation):
    """A node as the metadata server knows it."""

    alive: bool = Field(description="its heartbeats arrive", examples=[True])
    stopped: bool = Field(description="it ended in order, and has not come back", examples=[False])
    refused: str | None = Field(
        description="why the metadata server refuses its calls; null: it does not, or nobody calls", examples=[None]
    )
    heartbeat_age_s: Seconds = Field(description="since the last one")
    boot_id: HexId = Field(description="another one later: it was started again")
    roles: list[str] = Field(examples=[["prefill"]])
    control_address: str = Field(description="its gRPC", examples=["10.0.0.1:7481"])
    data_address: str = Field(description="its data plane on the compute network", examples=["10.0.0.1:7482"])
    storage_address: str = Field(description="its data plane on the storage network", examples=["10.0.1.1:7483"])
    nics: list[Nic] = Field(description="its links")
    volumes: list[str] = Field(description="its volumes", examples=[["host-1/dram", "host-1/nvme0"]])
    mounts: list[str] = Field(description="other nodes' volumes that it reads directly", examples=[[]])


class Staging(Shown):
    """A budget of the arena, and who waits for it."""

    name: str = Field(examples=["prefill_buffer"])
    used_bytes: Bytes = Field(examples=[0])
    waiting_loads: Count = Field(examples=[0])


class NodeProcess(Shown):
    """What the node says of itself."""

    version: str = Field(examples=["0.1.0"])
    uptime_s: Seconds = Field(examples=[86400.0])
    sessions: Count = Field(description="engines with a session", examples=[2])
    blocks: Count = Field(description="held, in whatever tier")
    write_behind_waiting_blocks: Count = Field(description="to become durable", examples=[0])
    publish_waiting_events: Count = Field(description="changes that the index does not know yet", examples=[0])
    staging: list[Staging] = Field(description="buffers of layer-wise loads and awaited prompts")
    traffic_cap_bytes_per_s: Bytes | None = Field(description="0: none; null: it cannot be given one", examples=[None])
    io_engines: list[str] = Field(description="what is really in use", examples=[["host-1/nvme0: posix O_DIRECT"]])


class NodeDetail(Node):
    """A node, and what it says of itself."""

    process: NodeProcess | None = Field(description="null: it does not answer")
    unreached: str | None = Field(description="why it does not", examples=[None])


# ---- activity ----
class LinkTraffic(Shown):
    """What a NIC has carried, all traffic."""

    network: Literal["storage", "compute"] = Field(examples=["storage"])
    received_bytes: Bytes = Field(description="since the host's start")
    sent_bytes: Bytes = Field(description="since the host's start")


class DataPlane(Shown):
    """What a node's data plane has carried, payload only, since it was started."""

    served_bytes: Bytes = Field(description="that engines and other nodes read here")
    taken_bytes: Bytes = Field(description="that they wrote here")
    fetched_bytes: Bytes = Field(description="that this node read of others")
    written_bytes: Bytes = Field(description="that it wrote to others")


class LoadBucket(Shown):
    """Loads that took so long."""

    up_to_s: float | None = Field(description="and longer than the bucket before; null: longer than all others", examples=[0.01])
    loads: Count


class LoadTimes(Shown):
    """How long loads took, by the farthest that they reached, since the node was started."""

    reach: ReachName = Field(description="nvme: this node's volumes; peer: another node; none: nothing hit", examples=["nvme"])
    total_s: Seconds = Field(description="the sum of their times")
    buckets: list[LoadBucket]


class LoadedBytes(Shown):
    """What loads have brought to engines, by where it lay, since the node was started."""

    dram: Bytes = Field(description="in this node's DRAM")
    nvme: Bytes = Field(description="on this node's volumes")
    peer: Bytes = Field(description="on another node")


class Fault(Shown):
    """Something that went wrong on a node since it was started."""

    metric: str = Field(description="that counts it", examples=["kvstore_peer_fetch_failed_total"])
    what: str = Field(description="in words", examples=["fetches from other nodes that failed"])
    total: Count = Field(examples=[3])


class Activity(Shown):
    """What a node has done. Totals: the difference of two answers is a rate; smaller ones tell of another start."""

    node_id: NodeName
    uptime_s: Seconds = Field(examples=[86400.0])
    links: list[LinkTraffic] = Field(description="where the data plane of the storage network has none of its own: compute only")
    data_plane: DataPlane
    loads: list[LoadTimes]
    loaded: LoadedBytes
    faults: list[Fault] = Field(description="those that there were")


class Activities(Shown):
    """What the nodes of a page have done."""

    items: list[Activity]
    unreached: list[Unreached] = Field(description="nodes that did not answer, engines' pools of device memory among them")
    next_cursor: str | None = Field(description="for the next page; null: this is the last", examples=["bm9kZXMKaG9zdC0x"])


# ---- volumes ----
class VolumeTenant(Shown):
    """What a tenant holds on a volume."""

    tenant: str | None = Field(
        description="empty: the default tenant; null: of namespaces that nobody has shown the spec of",
        examples=["team-a"],
    )
    bytes: Bytes = Field(description="of payload", examples=[34359738368])


class Volume(Shown):
    """One place that holds blocks."""

    volume_id: str = Field(examples=["host-1/nvme0"])
    node_id: NodeName
    tier: TierName = Field(examples=["nvme"])
    node_alive: bool = Field(description="its node's heartbeats arrive", examples=[True])
    capacity_bytes: Bytes = Field(description="room for blocks")
    used_bytes: Bytes = Field(description="in slots that hold a block", examples=[34359738368])
    blocks: Count = Field(description="held")
    read_only: str | None = Field(description="why it takes no blocks; null: it does", examples=[None])
    quarantined_blocks: Count | None = Field(
        description="replicas that proved bad since the node was started; null: the node does not answer", examples=[0]
    )
    tenants: list[VolumeTenant] | None = Field(
        description="who holds it, the 1,024 that hold most; null: the node does not answer"
    )


class EvictVolume(Taken):
    """Down to what fill."""

    to_percent: int = Field(
        ge=0, le=100, description="evict the coldest blocks until no more of the capacity is used", examples=[50]
    )


class Evicted(Shown):
    """What an eviction brought."""

    evicted_blocks: Count = Field(description="replicas that left", examples=[800])
    kept_blocks: Count = Field(description="that were meant and stay: in use, or in DRAM and not durable yet", examples=[0])
    used_bytes: Bytes = Field(description="of the volume, afterwards", examples=[34359738368])


# ---- namespaces ----
class Spec(Shown):
    """What makes two KV caches interchangeable. The salt is never shown."""

    model: str = Field(examples=["meta-llama/Llama-3.1-8B"])
    weights_epoch: str = Field(description="changes with every weight update", examples=["2026-05-01"])
    dtype: str = Field(examples=["bf16"])
    block_tokens: Count = Field(examples=[64])
    layers: Count = Field(examples=[32])
    layer_block_bytes: Bytes = Field(examples=[262144])
    layout: str = Field(examples=["opaque"])
    layout_version: Count = Field(examples=[1])
    shard_rank: Count = Field(examples=[0])
    shard_count: Count = Field(examples=[1])
    hash_algorithm: str = Field(examples=["xxh3-128"])
    tenant: str = Field(examples=[""])
    salted: bool = Field(description="it has a salt", examples=[False])


class Namespace(Shown):
    """One cache domain, and how lookups in it fared since the metadata server began to serve."""

    namespace_id: HexId = Field(description="digest of the spec")
    spec: Spec
    lookups: Count = Field(description="answered", examples=[5200])
    asked_blocks: Count = Field(description="that they asked for", examples=[8320000])
    hit_blocks: Count = Field(description="of them found in the index", examples=[7904000])
    hit_ratio: float | None = Field(ge=0, le=1, description="null: nothing was asked for", examples=[0.95])
    ttl_s: float | None = Field(
        ge=0, description="blocks that nobody used for so long leave; null: never for that", examples=[604800.0]
    )
    pinned: bool = Field(description="its blocks are not evicted, up to half of each tier of a node", examples=[False])


class UsageEntry(Shown):
    """What a namespace has on one volume."""

    node_id: NodeName
    volume_id: str = Field(examples=["host-1/nvme0"])
    tier: TierName = Field(examples=["nvme"])
    blocks: Count
    bytes: Bytes = Field(description="of payload")


class TierTotal(Shown):
    """What it has in one tier, all nodes together. A block on several nodes counts on each."""

    tier: TierName = Field(examples=["nvme"])
    blocks: Count
    bytes: Bytes = Field(description="of payload")


class Usage(Shown):
    """Where a namespace's blocks lie, counted now by the nodes themselves."""

    namespace_id: HexId
    tiers: list[TierTotal] = Field(description="totals")
    volumes: list[UsageEntry] = Field(description="by volume")
    unreached: list[Unreached] = Field(description="nodes that are not counted")


class EvictNamespace(Taken):
    """From which tiers."""

    tiers: list[Literal["dram", "nvme"]] = Field(
        default=["dram", "nvme"], min_length=1, max_length=2, description="both, where nothing is said", examples=[["nvme"]]
    )


class NodeEvicted(Shown):
    """What one node did."""

    node_id: NodeName
    evicted_blocks: Count = Field(description="replicas that left", examples=[800])
    kept_blocks: Count = Field(description="that stay: in use, or (evict) in DRAM and not durable yet", examples=[0])


class NamespaceEvicted(Shown):
    """What evicting or invalidating a namespace brought."""

    namespace_id: HexId
    complete: bool = Field(
        description="every node did it, and nothing stays; if not, do it again once those nodes are there", examples=[True]
    )
    evicted_blocks: Count = Field(description="replicas that left, all nodes and tiers together", examples=[2400])
    kept_blocks: Count = Field(description="all nodes together", examples=[0])
    nodes: list[NodeEvicted] = Field(description="by node")
    unreached: list[Unreached] = Field(description="nodes that did not do it: what they hold, they still hold")


class BumpWeights(Taken):
    """The next weights epoch."""

    weights_epoch: str = Field(
        min_length=1, max_length=limits.MAX_NAME_BYTES, description="name of the new weights", examples=["2026-06-01"]
    )
    invalidate: bool = Field(default=True, description="drop every block of the old one", examples=[True])


class Bumped(Shown):
    """The namespace of the new weights."""

    namespace_id: HexId = Field(description="that engines of the new weights use: start them with this weights_epoch")
    spec: Spec
    invalidated: NamespaceEvicted | None = Field(description="what became of the old one's blocks; null: not asked for")


# ---- blocks ----
BlockStateName = Literal["held", "silent", "gone", "misplaced", "unknown"]


class Replica(Shown):
    """One volume's copy of the blocks of a run."""

    volume_id: str | None = Field(description="null: of a boot that is over", examples=["host-1/nvme0"])
    node_id: str | None = Field(examples=["host-1"])
    tier: TierName | None = Field(examples=["nvme"])
    visible: bool = Field(description="its node lives, or one that mounts the volume", examples=[True])
    run_start: Count = Field(description="depth from which the volume said that it holds the chain without a gap", examples=[0])


class BlockRun(Shown):
    """Consecutive blocks of which the index says the same."""

    start: Count = Field(description="position among the keys asked for", examples=[0])
    count: Count = Field(description="how many", examples=[156])
    hit: bool = Field(description="within the prefix that a lookup answers", examples=[True])
    state: BlockStateName = Field(
        description="held: a living node has it; silent: only nodes that are not heard of; gone: all who had it began anew;"
        " misplaced: of another namespace or depth; unknown: never stored, or evicted everywhere",
        examples=["held"],
    )
    why: str = Field(description="why it hits or misses, in words", examples=["held by host-1"])
    namespace_id: HexId | None = Field(description="whose they are")
    depth: Count = Field(description="of the first, in its chain", examples=[0])
    replicas: list[Replica] = Field(description="who holds them, as far as the index knows")


class Block(Shown):
    """One block, as the index knows it."""

    key: HexKey
    state: BlockStateName = Field(examples=["held"])
    why: str = Field(examples=["held by host-1"])
    namespace_id: HexId | None = Field(description="whose it is; null: not known")
    depth: Count | None = Field(description="its place in its chain", examples=[17])
    replicas: list[Replica]


class LookUp(Taken):
    """A chain from its head: by keys, or by the tokens that they are made of."""

    namespace_id: HexId
    # the first bad one is enough: all of a million would be told
    keys: list[HexKey] | None = Field(
        default=None, fail_fast=True, max_length=limits.MAX_KEYS_PER_CALL, description="in order", examples=[[_KEY]]
    )
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]] | None = Field(
        default=None, fail_fast=True, max_length=4_194_304, description="token ids; instead of keys", examples=[[1, 2, 3, 4]]
    )


class LookedUp(Shown):
    """How far a chain hits, and why no further."""

    blocks: Count = Field(description="asked for; of tokens, the full blocks", examples=[200])
    hit_blocks: Count = Field(description="the longest prefix that can be served", examples=[156])
    first_miss: str | None = Field(
        description="why it ends there; null: everything hits", examples=["never stored, or evicted everywhere"]
    )
    runs: list[BlockRun] = Field(description="all blocks, in order")


# ---- planning ----
class LivePart(Shown):
    """Who reads what of a plan under way."""

    index: Count = Field(examples=[0])
    start: Count = Field(description="first block", examples=[0])
    count: Count = Field(description="how many", examples=[800])
    side: SideName = Field(description="what the node is to the request", examples=["decode"])
    node_id: NodeName
    left: Count = Field(description="not reported read yet", examples=[120])
    failed: bool = Field(description="what was missing was planned anew", examples=[False])


class LivePlan(Shown):
    """A planned load under way."""

    plan_id: str = Field(description="decimal; names it in logs", examples=["4611686018427387905"])
    attempt: Count = Field(description="so many parts were planned anew", examples=[0])
    policy: str = Field(examples=["split"])
    prefill_node: str = Field(examples=["host-1"])
    decode_node: str | None = Field(examples=["host-2"])
    blocks: Count
    block_bytes: Bytes = Field(examples=[8388608])
    parts: list[LivePart]
    expires_in_s: Seconds = Field(description="forgotten by then, unless somebody reports on it", examples=[42.0])


class ReadQueue(Shown):
    """What waits to be read over a node's storage link."""

    node_id: NodeName
    alive: bool = Field(examples=[True])
    pending_bytes: Bytes = Field(examples=[0])
    pending_tokens: Count = Field(examples=[0])
    storage_bytes_per_s: Rate = Field(description="of its storage link, as estimated")
    storage_source: BandwidthSource | None = Field(
        description="where that comes from; null: of a past decision", examples=["link"]
    )
    compute_bytes_per_s: Rate = Field(description="of its compute link")
    compute_source: BandwidthSource | None = Field(description="likewise", examples=["assumed"])
    sending_bytes: Bytes = Field(description="of the pending ones, those it forwards", examples=[0])
    receiving_bytes: Bytes = Field(description="pending ones that others forward to it", examples=[0])


class DecidedPart(Shown):
    """A part of a decision."""

    index: Count = Field(examples=[0])
    start: Count = Field(examples=[0])
    count: Count = Field(examples=[800])
    side: SideName = Field(examples=["prefill"])
    node_id: NodeName


class Decision(Shown):
    """A load decision, and the figures it was taken on."""

    plan_id: str = Field(description="decimal", examples=["4611686018427387905"])
    attempt: Count = Field(description="0: first; else a part had failed", examples=[0])
    ago_s: Seconds = Field(examples=[1.5])
    policy: str = Field(examples=["split"])
    prefill_node: str = Field(examples=["host-1"])
    decode_node: str | None = Field(examples=["host-2"])
    blocks: Count
    block_bytes: Bytes = Field(examples=[8388608])
    predicted_s: Seconds = Field(description="until the last part is there")
    considered: list[ReadQueue] = Field(description="candidates, as they were before")
    excluded: list[str] = Field(description="candidates that were dead, unknown or had failed", examples=[[]])
    parts: list[DecidedPart]


class Decisions(Shown):
    """The last load decisions, newest first."""

    items: list[Decision]


class PathPolicy(Shown):
    """Which hosts' storage links loads are read over where a request names no policy. The ETag is the policy."""

    policy: str = Field(description="in force", examples=["split"])
    configured: str = Field(description="as the metadata server was started, and in force again when it is", examples=["split"])


class SetPathPolicy(Taken):
    """The policy to be."""

    policy: PolicyName = Field(examples=["shorter_queue"])


# ---- loads ----
class SlowLoad(Shown):
    """How one load of a node's went."""

    node_id: NodeName
    request_id: str = Field(description="the client's name for it, as in logs and traces", examples=["engine-7f3a-12"])
    seconds: Seconds
    ago_s: Seconds = Field(description="since it ended", examples=[12.0])
    blocks: Count = Field(description="asked for")
    hit_blocks: Count = Field(description="that came")
    reason: str = Field(
        description="what took the time, or why blocks are missing", examples=["waited 0.120 of 0.134 s for other nodes"]
    )
    figures: dict[str, float] = Field(description="waits and blocks by source", examples=[{"peer_wait_s": 0.12}])


class SlowLoads(Shown):
    """The slowest loads of the last minute, all nodes together, slowest first."""

    items: list[SlowLoad]
    unreached: list[Unreached] = Field(description="nodes that were not heard")


class Overview(Shown):
    """Some nodes, and all that a look at them shows."""

    nodes: list[Node]
    activity: list[Activity]
    volumes: list[Volume] = Field(description="of these nodes, in order of their ids")
    slow_loads: list[SlowLoad] = Field(description="the slowest of the last minute on these nodes, slowest first")
    unreached: list[Unreached] = Field(description="those of the nodes that did not answer, engines' pools among them")
    known_nodes: Count = Field(description="nodes there are, here or on other pages", examples=[3])
    next_cursor: str | None = Field(description="for the next page; null: this is the last", examples=["bm9kZXMKaG9zdC0x"])


# ---- configuration ----
class Setting(Shown):
    """One value in force. Secrets are masked."""

    key: str = Field(examples=["node.dram"])
    value: str = Field(examples=["64GiB"])
    source: str = Field(description="default, file, environment or flag", examples=["file"])
    detail: str = Field(description="the file, the variable, the flag", examples=["/etc/kvstore/kvstore.toml"])
    description: str = Field(examples=["DRAM arena"])


class Settings(Shown):
    """The configuration of a process, with the origin of each value."""

    process: str = Field(examples=["metadata"])
    settings: list[Setting]


class Configuration(Shown):
    """Of the metadata server and of this server; that of a node is below the node."""

    processes: list[Settings]


# ---- changes at a node ----
class TrafficCap(Shown):
    """The cap on KV over a node's compute network. The ETag is the cap."""

    node_id: NodeName
    bytes_per_s: Bytes = Field(description="each direction; 0: no cap", examples=[2812500000])


class SetTrafficCap(Taken):
    """The cap to be, until the node is started again."""

    bytes_per_s: int = Field(ge=0, le=2**53, description="each direction; 0: no cap", examples=[2812500000])


class Compared(Shown):
    """A round of anti-entropy."""

    node_id: NodeName
    repaired_ranges: Count = Field(
        description="ranges of key space, of 4,096 a volume, in which the index differed", examples=[0]
    )


class Rebuilding(Shown):
    """The index is dropped; a new one fills as nodes send their inventories."""

    dropped_epoch: HexId = Field(description="once /v1/index shows another one, the new index is there")
