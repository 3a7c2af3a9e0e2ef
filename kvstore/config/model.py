"""The one configuration of all programs of the store: typed, frozen, and every value knows where it came from.

Rising precedence: built-in defaults, a TOML file, environment (``KVSTORE_NODE__DRAM=4GiB``: two underscores nest), flags.
Sizes are ``"64MiB"`` or bytes, durations ``"500ms"``; unknown keys are errors. Servers do not see this: the command line maps
it onto their own settings. Reading it needs pydantic, so no part of the client imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.config.values import (
    DurationMs,
    DurationMsIfSet,
    Memory,
    Size,
    SizeIfSet,
    format_size,
    parse_list,
    parse_mount,
    parse_volume,
)
from kvstore.process.node_id import check_node_id

DEFAULT_METADATA_ADDRESS = "127.0.0.1:7400"
MIN_LEASE_MS = 250
"""Clients stop trusting a lease some time before it ends: of a shorter one nothing would be left, and every load a miss."""


class Section(BaseModel):
    """A part of the configuration. Frozen; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TlsSection(Section):
    """PEM files; TLS is off while all are unset."""

    ca: Path | None = Field(default=None, description="certificates that the other side's must descend from")
    cert: Path | None = Field(default=None, description="this side's certificate chain")
    key: Path | None = Field(default=None, description="private key of the certificate")
    require_client_cert: bool = Field(default=False, description="servers: refuse clients without a certificate of the CA")
    server_name: str | None = Field(default=None, description="clients: name expected in the server's certificate")


_TOKENS = (
    "who may call what: lines of ROLE NAME TOKEN, roles read, operator, node, engine and tenant; read again when it changes."
    " Unset: whoever reaches it, everything"
)


class MetadataSection(Section):
    """The metadata server."""

    listen: str = Field(default=DEFAULT_METADATA_ADDRESS, description="address of its gRPC service; port 0: any free one")
    index_path: Path | None = Field(
        default=None, description="folder of the index; may be deleted while it is down. Unset: in data_dir"
    )
    index_size: Size = Field(default=16 << 30, description="the most that the index may grow to (address space until used)")
    heartbeat_interval: DurationMs = Field(default=500, description="how often nodes call")
    node_ttl: DurationMs = Field(default=2_500, description="silence after which a node is hidden")
    node_forget: DurationMs = Field(
        default=86_400_000, description="silence after which a node is forgotten, with what it published"
    )
    path_policy: Literal["prefill_only", "round_robin", "shorter_queue", "split"] = Field(
        default="split", description="which hosts' storage links a load is read over, where the client does not say"
    )
    alpha_tokens: int = Field(
        default=75_000,
        ge=1,
        description="a host's reading queue above this is long. Measure: bytes/s of its storage link when busy"
        " (25 Gbit/s: 3.1e9) x 3 s / KV bytes a token (Llama-3-8B: 131,072)",
    )
    beta_tokens: int = Field(
        default=100_000,
        ge=1,
        description="a prefill engine with more tokens than this gets no more. Measure: tokens/s of prompts, hits"
        " included, that one engine gets through under load x 5 s",
    )
    engine_ttl: DurationMs = Field(default=5_000, description="silence after which an engine group's requests go to others")
    request_ttl: DurationMs = Field(
        default=21_600_000, description="requests are forgotten so long after they came, if engines never said they are done"
    )
    max_requests: int = Field(default=100_000, ge=1, le=1_000_000, description="requests waiting or under way; more are refused")
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="server processes that share port and index; requests are scheduled only where it is one",
    )
    stop_grace: DurationMs = Field(default=5_000, description="how long calls under way may take when it ends")
    events_memory: Size = Field(
        default=32 << 20, ge=1 << 20, description="the most that past block events may take: how far a subscriber may fall behind"
    )
    max_subscribers: int = Field(default=64, ge=1, le=1_024, description="to block events, at once; one more is refused")
    tokens_file: Path | None = Field(default=None, description=_TOKENS)
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description="listen beyond this host without TLS")
    metrics_listen: str = Field(
        default="127.0.0.1:7401",
        description="address of /metrics, plain HTTP; worker N: N ports further; port 0: any free one; none: not served",
    )
    ready_file: Path | None = Field(default=None, description="written as JSON once the server answers")


class VolumeSection(Section):
    """One NVMe volume."""

    path: Path
    capacity: Size
    direct: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{format_size(self.capacity)}" + ("" if self.direct else " (buffered)")


_Volume = Annotated[VolumeSection, BeforeValidator(parse_volume)]


class MountSection(Section):
    """Another node's volume, read directly."""

    volume: Annotated[str, Field(min_length=1, max_length=512)]
    path: Path
    direct: bool = True

    def __str__(self) -> str:
        return f"{self.volume}={self.path}" + ("" if self.direct else " (buffered)")


_Mount = Annotated[MountSection, BeforeValidator(parse_mount)]


def _check_lease(lease_ms: int) -> int:
    if lease_ms < MIN_LEASE_MS:
        raise ValueError(f"a lease takes {MIN_LEASE_MS}ms or more, or it ends before an engine has copied its blocks")
    return lease_ms


class NodeSection(Section):
    """The node daemon."""

    node_id: Annotated[str, AfterValidator(check_node_id)] | None = Field(
        default=None, description="stable name of the node; unset: the host's name"
    )
    roles: Annotated[tuple[Literal["prefill", "decode", "storage"], ...], BeforeValidator(parse_list)] = Field(
        default=("prefill",), description="what the host does: prefill, decode, storage"
    )
    listen: str = Field(default="127.0.0.1:0", description="address of its gRPC service; port 0: any free one")
    data_listen: str = Field(default="127.0.0.1:0", description="address of its data plane")
    advertise_host: str | None = Field(default=None, description="host that others reach it by; unset: the one listened on")
    run_dir: Path | None = Field(default=None, description="folder of its unix sockets (short path). Unset: one for each node id")
    metadata: str | None = Field(default=DEFAULT_METADATA_ADDRESS, description="address of the metadata server")
    dram: Memory = Field(default=1 << 30, gt=0, description="DRAM arena: a size, or a part of the host's memory such as 80%")
    huge_pages: bool | None = Field(
        default=None,
        description="back the arena with huge pages where there are any; unset: if it takes 32 GiB or more and the host has"
        " reserved enough of them",
    )
    prefault: bool = Field(default=True, description="take the arena's memory at start, in the background")
    nvme: Annotated[tuple[_Volume, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="NVMe volumes: PATH:SIZE, several with commas"
    )
    mounts: Annotated[tuple[_Mount, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="other nodes' volumes on a file system mounted here too, read directly: VOLUME=PATH, …"
    )
    write_behind_to: Annotated[str, AfterValidator(check_node_id)] | None = Field(
        default=None, description="node id of a storage node that completed blocks are written to"
    )
    policy: Literal["reuse-distance", "s3-fifo", "lru"] = Field(
        default="reuse-distance", description="eviction: reuse-distance (expected time of next use), s3-fifo or lru"
    )
    lease: Annotated[DurationMs, AfterValidator(_check_lease)] = Field(
        default=10_000, description="how long loaded blocks stay put"
    )
    prepare_ttl: DurationMs = Field(default=30_000, description="how long a store may take")
    load_window: SizeIfSet = Field(
        default=None, gt=0, description="read ahead at once for each load; unset: 32MiB for each volume, at least 64MiB"
    )
    load_threads: int | None = Field(
        default=None, ge=1, le=256, description="loads from NVMe and peers at once; unset: 4 for each volume, at least 8"
    )
    io_threads: int = Field(default=8, ge=1, le=256, description="I/O requests in flight on each NVMe volume")
    volume_stall: DurationMs = Field(
        default=1_000,
        gt=0,
        description="a volume that answers no I/O for so long is stalled: its blocks are misses until it answers",
    )
    gds: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="GPUDirect Storage: auto (where a measurement shows that it is real), required (or the node refuses to"
        " start) or off (kvikio is not touched)",
    )
    nixl: Literal["off", "auto", "required"] = Field(
        default="off",
        description="payload between nodes by NIXL (RDMA, or UCX over TCP and CMA): off, auto (between two that have it, else"
        " TCP) or required (or the node refuses to start)",
    )
    nixl_trusted_network: bool = Field(
        default=False,
        description="needed for nixl: whoever reaches this node's ports may read and write its memory and end it",
    )
    nixl_way: Literal["auto", "pull", "push"] = Field(
        default="auto",
        description="who moves the bytes of its reads: auto or pull (push where there is only TCP), or push",
    )
    nixl_service_level: int | None = Field(
        default=None, ge=0, le=15, description="InfiniBand service level of NIXL's traffic (UCX_IB_SL); unset: UCX's own"
    )
    nixl_devices: str = Field(default="", description="network devices of NIXL (UCX_NET_DEVICES), e.g. mlx5_0:1; unset: all")
    nixl_transports: str = Field(default="", description="UCX's transports (UCX_TLS), e.g. rc or tcp; unset: what UCX finds")
    storage_listen: str | None = Field(
        default=None, description="address of its data plane on the storage network; unset: data_listen serves both networks"
    )
    storage_advertise_host: str | None = Field(
        default=None, description="host that others reach it by on the storage network; unset: the one listened on"
    )
    storage_bandwidth: Size = Field(default=0, description="bytes a second of the storage link; 0: not known, measured")
    compute_bandwidth: Size = Field(default=0, description="bytes a second of the compute link; 0: not known")
    kv_dscp: int = Field(
        default=8, ge=0, le=63, description="mark of KV traffic (DSCP), for switches and NICs; 8 is CS1, a low class; 0: unmarked"
    )
    compute_cap: Size = Field(default=0, description="the most bytes a second of KV over the compute network; 0: no cap")
    prefill_buffer: Size = Field(default=0, description="the most that layer-wise loads may hold; 0: a quarter of the arena")
    decode_buffer: Size = Field(default=0, description="the most that awaited prompts may hold; 0: a quarter of the arena")
    keep_loaded: bool = Field(default=True, description="keep loaded and stored blocks in DRAM as a cache; no: only stage them")
    peer_streams: int = Field(default=4, ge=1, le=64, description="connections of a fetch from a peer")
    anti_entropy_interval: DurationMs = Field(default=30_000, description="how often it compares notes with the index")
    stop_grace: DurationMsIfSet = Field(
        default=None,
        description="how long its end in order may take: stores finished, blocks written behind, reads answered; unset: as long"
        " as writing three quarters of the arena takes at 1 GB/s for each volume, 10s to 10m",
    )
    move_bandwidth: SizeIfSet = Field(
        default=None,
        description="the most bytes a second that others copy from it while it drains (kvstore drain --move); 0: no bound;"
        " unset: a quarter of the link, 256MiB where its speed is not known",
    )
    move_window: SizeIfSet = Field(
        default=None,
        gt=0,
        description="bytes that others copy from it at once while it drains; unset: 1/32 s of move_bandwidth, at least 32MiB",
    )
    tokens_file: Path | None = Field(default=None, description=_TOKENS)
    token_file: Path | None = Field(
        default=None, description="file with the token that it shows to the metadata server and other nodes: role node"
    )
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description="listen beyond this host without TLS")
    metrics_listen: str = Field(
        default="127.0.0.1:7480",
        description="address of /metrics and /loads, plain HTTP; each node on a host takes one of its own; port 0: any free;"
        " none: not served",
    )
    ready_file: Path | None = Field(default=None, description="written as JSON once the node answers")


class ClientSection(Section):
    """Programs that use the store: status, replay, demo."""

    metadata: str = Field(default=DEFAULT_METADATA_ADDRESS, description="address of the metadata server")
    node: str | None = Field(default=None, description="address or unix socket of the node on this host; unset: none")
    deadline: DurationMs = Field(default=10_000, gt=0, description="bound of a load or store")
    lookup_deadline: DurationMs = Field(default=1_000, gt=0, description="bound of a lookup")
    token_file: Path | None = Field(
        default=None,
        description="file with the token shown to metadata server and nodes, also by admin server and router",
    )
    read_token_file: Path | None = Field(
        default=None,
        description="file with a token of the role read, which the admin server and commands show to nodes that they only ask;"
        " unset: that of token_file",
    )
    tls: TlsSection = TlsSection()


_Engines = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


class RouterSection(Section):
    """The router: one OpenAI-compatible address in front of several engines."""

    listen: str = Field(default="127.0.0.1:8000", description="address of the HTTP service; port 0: any free port")
    engines: _Engines = Field(default=(), description="engines that serve whole requests: [NAME=]URL[@NODE], …")
    prefill: _Engines = Field(default=(), description="engines that compute prompts: [NAME=]URL[@NODE], …; requires decode")
    decode: _Engines = Field(default=(), description="engines that generate output: [NAME=]URL[@NODE], …; requires prefill")
    policy: Literal["scheduler", "least_loaded", "round_robin"] = Field(
        default="scheduler",
        description="choice of the engine: by the metadata server's scheduler, the least loaded engine, or in turn",
    )
    metadata: str = Field(
        default=DEFAULT_METADATA_ADDRESS, description="address of the metadata server; none: no scheduler and no lookups"
    )
    name: str = Field(default="router", description="name of this pool of engines at the scheduler")
    report: bool = Field(default=True, description="report engine load; if several routers share a pool, exactly one reports")
    lookup: bool = Field(default=True, description="look prompts up in the store to find nodes that hold their prefix")
    flow: Literal["concurrent", "sequential"] = Field(
        default="concurrent", description="call prefill and decode engine at once, or the decode engine after the prefill engine"
    )
    max_body: Size = Field(default=16 << 20, description="largest request body")
    max_inflight: int = Field(default=1_024, ge=1, le=1_000_000, description="concurrent requests; further ones are rejected")
    assign_timeout: DurationMs = Field(default=60_000, gt=0, description="how long a request waits for an engine with capacity")
    connect_timeout: DurationMs = Field(default=2_000, gt=0, description="timeout of a connection to an engine")
    first_byte_timeout: DurationMs = Field(
        default=600_000, gt=0, description="time from a request to the first byte of the response"
    )
    idle_timeout: DurationMs = Field(default=120_000, gt=0, description="longest pause within a response")
    client_timeout: DurationMs = Field(
        default=120_000, gt=0, description="how long a client may stop reading its response before it is disconnected"
    )
    retries: int = Field(default=2, ge=0, le=8, description="further attempts before the first byte of the response")
    expected_output_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="assumed output length if a request sets none, and the most that is reserved"
    )
    stop_grace: DurationMs = Field(default=10_000, description="time for requests in flight to finish when the router stops")
    check_interval: DurationMs = Field(default=1_000, gt=0, description="time between health checks of one engine")
    check_timeout: DurationMs = Field(default=2_000, gt=0, description="timeout of a health check")
    ejection_time: DurationMs = Field(
        default=1_000, gt=0, description="duration of an engine's first ejection; the n-th lasts n times as long"
    )
    max_ejection_time: DurationMs = Field(default=30_000, gt=0, description="longest ejection of an engine")
    engine_ca: Path | None = Field(default=None, description="PEM file with the CA of https engines")
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description="allow plain HTTP on an address that other hosts can reach")
    ready_file: Path | None = Field(default=None, description="file written as JSON once the router serves")


class AdminSection(Section):
    """The admin server: what the store does and how to change it, over HTTP. Its channels are a client's (client.tls)."""

    listen: str = Field(
        default="127.0.0.1:7470", description="address of its HTTP service; port 0: any free one; none: kvstore up starts none"
    )
    metadata: str = Field(default=DEFAULT_METADATA_ADDRESS, description="address of the metadata server")
    tokens_file: Path | None = Field(
        default=None,
        description="who may do what: lines of ROLE NAME TOKEN, roles read and operator. Unset: all on this host, everything",
    )
    timeout: DurationMs = Field(default=3_000, gt=0, description="of a question to the metadata server or a node")
    change_timeout: DurationMs = Field(default=60_000, gt=0, description="of a change, such as an eviction")
    max_body: Size = Field(default=4 << 20, ge=1_024, description="of a request")
    max_inflight: int = Field(default=64, ge=1, le=10_000, description="requests at once; one more is refused")
    stop_grace: DurationMs = Field(default=5_000, description="how long requests may take when it ends")
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description="listen beyond this host without TLS; never without tokens")
    ready_file: Path | None = Field(default=None, description="written as JSON once it answers")


class EventsSection(Section):
    """A publisher of block events in vLLM's KV-event format."""

    metadata: str = Field(default=DEFAULT_METADATA_ADDRESS, description="address of the metadata server")
    zmq: str | None = Field(
        default=None, description="endpoint of its PUB socket: tcp://HOST:PORT or ipc://PATH; port *: any free"
    )
    connect: bool = Field(default=False, description="connect to a SUB socket that others have bound, instead of binding")
    replay: str | None = Field(
        default=None, description="endpoint of its ROUTER socket, for who missed something; unset: nobody is helped"
    )
    topic: str = Field(default="", description="first frame of each message")
    hashes: Literal["int64", "bytes"] = Field(
        default="int64", description="what stands for a block: its key's last 8 bytes as a number, or all 16 bytes"
    )
    namespaces: Annotated[tuple[str, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="blocks of these alone: 32 hexadecimal digits each; unset: of all"
    )
    nodes: Annotated[tuple[str, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="volumes of these nodes alone; unset: of all"
    )
    tiers: Annotated[tuple[Literal["hbm", "dram", "nvme"], ...], BeforeValidator(parse_list)] = Field(
        default=(), description="volumes of these tiers alone: hbm, dram, nvme; unset: of all"
    )
    rank: int = Field(default=0, ge=0, description="data_parallel_rank in each batch")
    replay_batches: int = Field(default=10_000, ge=1, description="the most past batches that are kept for replay")
    replay_memory: Size = Field(default=64 << 20, ge=1 << 20, description="the most memory that they may take")
    high_water: int = Field(default=1_000, ge=1, description="messages that wait for a slow subscriber; later ones it misses")
    heartbeat: DurationMs = Field(
        default=5_000, gt=0, description="an empty batch after so long without any: who missed the last one notices"
    )
    allow_insecure_remote: bool = Field(default=False, description="bind beyond this host: ZeroMQ is plain and checks nobody")
    metrics_listen: str = Field(
        default="127.0.0.1:7485", description="address of /metrics, plain HTTP; port 0: any free one; none: not served"
    )
    ready_file: Path | None = Field(default=None, description="written as JSON once everything that is stored is published")


class LogSection(Section):
    """Logs, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severity shown")
    format: Literal["console", "json"] = Field(default="console", description="for people, or one JSON object a line")


class ObserveSection(Section):
    """Seeing into the processes, beside logs and metrics."""

    slow_load: DurationMs = Field(default=1_000, description="a load of a node's that takes longer is logged with its breakdown")
    traces: Literal["off", "otlp", "file"] = Field(
        default="off", description="OpenTelemetry spans: to a collector over HTTP, or as JSON lines; takes the extra observe"
    )
    traces_endpoint: str | None = Field(
        default=None, description="of the collector, e.g. http://127.0.0.1:4318/v1/traces; unset: OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    traces_file: Path | None = Field(default=None, description="where traces = file appends")
    traces_share: float = Field(default=1.0, ge=0.0, le=1.0, description="of the traces that begin here; others' go on as begun")


class Config(Section):
    """Everything."""

    data_dir: Path | None = Field(
        default=None, description="folder of what outlives the processes; unset: ~/.local/share/kvstore"
    )
    metadata: MetadataSection = MetadataSection()
    node: NodeSection = NodeSection()
    client: ClientSection = ClientSection()
    router: RouterSection = RouterSection()
    admin: AdminSection = AdminSection()
    events: EventsSection = EventsSection()
    log: LogSection = LogSection()
    observe: ObserveSection = ObserveSection()
