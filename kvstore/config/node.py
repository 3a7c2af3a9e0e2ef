"""Configuration of the node daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field

from kvstore.config.base import (
    DEFAULT_METADATA_ADDRESS,
    INSECURE,
    INSECURE_METRICS,
    TOKENS_FILE,
    AddressOrNone,
    Section,
    TlsSection,
)
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
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.process.effective_config import EffectiveSetting
from kvstore.process.node_id import check_node_id
from kvstore.rpc.failover.addresses import MetadataAddresses

MIN_LEASE_MS: Final = 250
"""Clients stop trusting a lease some time before it ends. A shorter lease would make every load a miss."""
LEAST_VOLUME_BYTES: Final = 4096


class VolumeSection(Section):
    """One NVMe volume."""

    path: Path
    """Folder of slab, catalog and lock."""
    capacity_bytes: Size
    direct: bool = True
    """Use O_DIRECT if the file system supports it."""

    def __str__(self) -> str:
        return f"{self.path}:{format_size(self.capacity_bytes)}" + ("" if self.direct else " (buffered)")


class MountSection(Section):
    """Another node's volume on a file system that this host mounts too. It is read directly, and written only once adopted."""

    volume: Annotated[str, Field(min_length=1, max_length=512)]
    """Volume id, for example ``storage-1/nvme0``."""
    path: Path
    """Folder of the volume on this host."""
    direct: bool = True
    """Use O_DIRECT if the file system supports it."""

    def __str__(self) -> str:
        return f"{self.volume}={self.path}" + ("" if self.direct else " (buffered)")


_Volume = Annotated[VolumeSection, BeforeValidator(parse_volume)]
_Mount = Annotated[MountSection, BeforeValidator(parse_mount)]


def _check_lease(lease_ms: int) -> int:
    if lease_ms < MIN_LEASE_MS:
        raise ValueError(f"a lease must last {MIN_LEASE_MS}ms or more, or it ends before an engine has copied its blocks")
    return lease_ms


def _check_zone(zone: str) -> str:
    if len(zone.encode()) > MAX_NAME_BYTES or not zone.isprintable():
        raise ValueError(f"a zone must be printable text of at most {MAX_NAME_BYTES} bytes")
    return zone


class NodeSection(Section):
    """The node daemon."""

    node_id: Annotated[str, AfterValidator(check_node_id)] | None = Field(
        default=None, description="stable name of the node; unset: host name"
    )
    roles: Annotated[tuple[Literal["prefill", "decode", "storage"], ...], BeforeValidator(parse_list)] = Field(
        default=("prefill",), description="roles of the host: prefill, decode, storage"
    )
    listen: str = Field(
        default="127.0.0.1:0",
        description="address at which clients and other nodes reach the node by gRPC; port 0: any free port",
    )
    data_listen: str = Field(default="127.0.0.1:0", description="address of the data plane")
    advertise_host: str | None = Field(
        default=None, description="host name or address for other hosts; unset: the host of the listen address"
    )
    run_dir: Path | None = Field(
        default=None, description="folder of the unix sockets; the path must be short. Unset: one folder per node id"
    )
    metadata: str | None = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="metadata servers that the node registers with: HOST:PORT, a list, or a DNS name",
    )
    zone: Annotated[str, AfterValidator(_check_zone)] = Field(
        default="",
        description="failure domain of the host, e.g. a rack; second copies go to another zone. Empty: to another host",
    )
    dram_bytes: Memory = Field(
        default=1 << 30, gt=0, description="size of the DRAM arena, in bytes or as a share of the host's memory such as 80%"
    )
    huge_pages: bool | None = Field(
        default=None,
        description="use reserved huge pages for the arena. Unset: if it has 32 GiB or more and the host has reserved enough",
    )
    prefault: bool = Field(
        default=True, description="fault in the arena's pages at start, in the background, and make them huge (Linux 6.1)"
    )
    nvme: Annotated[tuple[_Volume, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="NVMe volumes: PATH:SIZE, …"
    )
    mounts: Annotated[tuple[_Mount, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="volumes of other nodes on a shared file system, read directly: VOLUME=PATH, …"
    )
    adopt_mounts: bool = Field(
        default=False,
        description="adopt mounted volumes of absent owners: own, evict and publish their blocks; requires nvme and metadata",
    )
    adopt_after_ms: DurationMs = Field(
        default=10_000,
        gt=0,
        description="time for which the metadata server must see nothing of a volume's owner before this node adopts the volume",
    )
    write_back_to: Annotated[str, AfterValidator(check_node_id)] | None = Field(
        default=None,
        description="node id of the storage node to which a node without volumes writes back; unset: its own volumes",
    )
    policy: Literal["reuse-distance", "s3-fifo", "lru"] = Field(
        default="reuse-distance", description="eviction policy: reuse-distance (expected time of next use), s3-fifo or lru"
    )
    lease_ms: Annotated[DurationMs, AfterValidator(_check_lease)] = Field(
        default=10_000, description="how long loaded blocks are protected from eviction while the client copies them"
    )
    prepare_ttl_ms: DurationMs = Field(default=30_000, description="time limit of a store, from its start to its end")
    load_window_bytes: SizeIfSet = Field(
        default=None,
        gt=0,
        description="bytes that one load reads from volumes and peers at a time. Unset: 32MiB per volume, at least 64MiB",
    )
    load_threads: int | None = Field(
        default=None, ge=1, le=256, description="concurrent loads from NVMe and peers. Unset: 4 per volume, at least 8"
    )
    io_threads: int = Field(default=8, ge=1, le=256, description="concurrent I/O requests on each NVMe volume")
    volume_stall_ms: DurationMs = Field(
        default=1_000,
        gt=0,
        description="a volume without an I/O response for this time is stalled: its blocks are misses until it responds",
    )
    gds: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="test at start whether engines can read the volumes by GPUDirect Storage. auto: test and report; required:"
        " refuse to start if it does not work; off: no test. The node itself reads into host memory",
    )
    nixl: Literal["off", "auto", "required"] = Field(
        default="off",
        description="transfers between nodes over NIXL (RDMA, or UCX over TCP and CMA): off, auto (if both nodes have it, else"
        " TCP) or required (else the node does not start)",
    )
    nixl_trusted_network: bool = Field(
        default=False,
        description="required by nixl: everyone who reaches this node's ports may read and write its memory and stop it",
    )
    nixl_mode: Literal["auto", "pull", "push"] = Field(
        default="auto", description="side that moves the bytes of a read: auto or pull (push if there is only TCP), or push"
    )
    nixl_service_level: int | None = Field(
        default=None, ge=0, le=15, description="InfiniBand service level of NIXL traffic (UCX_IB_SL); unset: UCX's default"
    )
    nixl_devices: str = Field(default="", description="network devices of NIXL (UCX_NET_DEVICES), e.g. mlx5_0:1; unset: all")
    nixl_transports: str = Field(default="", description="transports of UCX (UCX_TLS), e.g. rc or tcp; unset: UCX's default")
    storage_listen: str | None = Field(
        default=None, description="address of the data plane on the storage network; unset: data_listen serves both networks"
    )
    storage_advertise_host: str | None = Field(
        default=None,
        description="host name or address for other hosts on the storage network; unset: the host of storage_listen",
    )
    storage_bandwidth: Size = Field(
        default=0, description="bandwidth of the storage link in bytes per second; 0: unknown, it is measured"
    )
    compute_bandwidth: Size = Field(default=0, description="bandwidth of the compute link in bytes per second; 0: unknown")
    kv_dscp: int = Field(
        default=8, ge=0, le=63, description="DSCP mark of KV traffic for switches and NICs; 8 is CS1, a low class; 0: unmarked"
    )
    compute_cap: Size = Field(
        default=0, description="limit of KV traffic on the compute network in bytes per second; 0: no limit"
    )
    prefill_buffer_bytes: Size = Field(
        default=0, description="arena bytes that layer-wise loads may hold together; 0: a quarter of the arena"
    )
    decode_buffer_bytes: Size = Field(
        default=0, description="arena bytes of awaited prompts that are incomplete; 0: a quarter of the arena"
    )
    read_ahead_bytes: Size | None = Field(
        default=None,
        description="arena bytes that may be read ahead and held for requests that wait; 0: none. Unset: a quarter of the arena",
    )
    hint_share: float = Field(
        default=0.5,
        ge=0,
        le=0.9,
        description="share of the volumes (without any: of DRAM) that hints of one tenant may protect while other tenants have"
        " blocks there; a tenant alone may protect 0.9; 0: hints are ignored",
    )
    cache_loads: bool = Field(
        default=True, description="keep blocks in DRAM after loads and stores; false: DRAM only buffers transfers"
    )
    peer_streams: int = Field(default=4, ge=1, le=64, description="connections per fetch from a peer")
    anti_entropy_interval_ms: DurationMs = Field(default=30_000, description="time between two comparisons with the index")
    stop_grace_ms: DurationMsIfSet = Field(
        default=None,
        description="time for a graceful stop: finish stores, write back, answer reads. Unset: the time to write three quarters"
        " of the arena at 1 GB/s per volume, 10s to 10m",
    )
    recopy_after_ms: DurationMs = Field(
        default=300_000,
        description="how long a node must be silent before other nodes make new second copies of its blocks",
    )
    move_bandwidth: SizeIfSet = Field(
        default=None,
        description="limit of reads from this node by drains with --move and for second copies, in bytes per second; 0: no limit."
        " Unset: a quarter of the link, or 256MiB if its speed is unknown",
    )
    move_window_bytes: SizeIfSet = Field(
        default=None,
        gt=0,
        description="bytes in flight from this node by drains and for second copies. Unset: 1/32 s of move_bandwidth, at least"
        " 32MiB",
    )
    tokens_file: Path | None = Field(default=None, description=f"who may call the node: {TOKENS_FILE}")
    token_file: Path | None = Field(
        default=None, description="file with this node's token for the metadata server and other nodes; role node"
    )
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description=f"node: {INSECURE}")
    allow_insecure_metrics: bool = Field(default=False, description=f"node: {INSECURE_METRICS}")
    metrics_listen: AddressOrNone = Field(
        default="127.0.0.1:7480",
        description="address of /metrics and /loads over plain HTTP, different for each node on a host; port 0: any free port;"
        " none: off",
    )
    ready_file: Path | None = Field(default=None, description="file written as JSON once the node answers")


class NodeConfig(NodeSection):
    """Configuration of one node daemon, with the values that follow from the host.

    Attributes:
        storage_link_bytes_per_s: speed of the storage link as reported by the kernel; 0: unknown.
        compute_link_bytes_per_s: speed of the compute link as reported by the kernel; 0: unknown.
        slow_load_ms: a load that takes longer is logged with its breakdown.
        settings: effective settings, for callers that ask for them.
    """

    node_id: Annotated[str, AfterValidator(check_node_id)]
    run_dir: Path
    metrics_listen: AddressOrNone = None
    huge_pages: bool = False
    load_window_bytes: Annotated[Size, Field(gt=0)] = 64 << 20
    load_threads: Annotated[int, Field(ge=1, le=256)] = 8
    stop_grace_ms: DurationMs = 10_000
    move_bandwidth: Size = 256 << 20
    move_window_bytes: Annotated[Size, Field(gt=0)] = 32 << 20
    storage_link_bytes_per_s: int = 0
    compute_link_bytes_per_s: int = 0
    slow_load_ms: DurationMs = 1_000
    settings: tuple[EffectiveSetting, ...] = ()

    def check(self) -> Self:
        """This configuration, after checks that span several settings.

        Raises:
            InvalidArgument: settings that contradict each other.
        """
        self.tls.resolve()
        if self.metadata is not None:
            MetadataAddresses.parse(self.metadata)
        mounted = [mount.volume for mount in self.mounts]
        if len(set(mounted)) != len(mounted) or any(name.startswith(f"{self.node_id}/") for name in mounted):
            raise InvalidArgument("node.mounts must name volumes of other nodes, each once", mounts=", ".join(mounted))
        if self.adopt_mounts and (not self.nvme or self.metadata is None):
            raise InvalidArgument(
                "node.adopt_mounts requires volumes of this node and a metadata server; set node.nvme and node.metadata, or unset"
                " node.adopt_mounts",
                nvme=len(self.nvme),
                metadata=self.metadata,
            )
        if not self.roles:
            raise InvalidArgument("node.roles is empty; name at least one of prefill, decode and storage")
        if self.write_back_to == self.node_id:
            raise InvalidArgument(
                "node.write_back_to names this node itself; name a storage node, or unset it and set node.nvme",
                node_id=self.node_id,
            )
        if self.write_back_to is not None and self.nvme:
            raise InvalidArgument(
                "node.write_back_to is for nodes without volumes; unset it or node.nvme",
                write_back_to=self.write_back_to,
                nvme=len(self.nvme),
            )
        if self.nixl != "off" and not self.nixl_trusted_network:
            raise InvalidArgument(
                "node.nixl opens ports without authentication; set node.nixl_trusted_network if the network is trusted, or leave"
                " node.nixl off",
                nixl=self.nixl,
            )
        for name, size in (
            ("prefill_buffer", self.prefill_buffer_bytes),
            ("decode_buffer", self.decode_buffer_bytes),
            ("read_ahead", self.read_ahead_bytes or 0),
        ):
            if size > self.dram_bytes:
                raise InvalidArgument(
                    f"node.{name} exceeds node.dram; lower node.{name} or raise node.dram",
                    **{name: size, "dram": self.dram_bytes},
                )
        self._check_volumes()
        return self

    def _check_volumes(self) -> None:
        folders: set[Path] = set()
        for volume in self.nvme:
            if volume.capacity_bytes < LEAST_VOLUME_BYTES:
                raise InvalidArgument(
                    f"a volume of node.nvme must have at least {LEAST_VOLUME_BYTES} bytes; write PATH:SIZE, e.g. "
                    f"{volume.path}:100GiB",
                    size=volume.capacity_bytes,
                )
            folder = volume.path.resolve()
            if folder in folders:
                raise InvalidArgument("node.nvme names a folder twice; give each volume a folder of its own", path=volume.path)
            if folder.exists() and not folder.is_dir():
                raise InvalidArgument("node.nvme names a file; name a folder", path=volume.path)
            folders.add(folder)
