"""Settings of one node daemon. Plain values: the command line fills them from file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.core.errors import InvalidArgument
from kvstore.process.effective_config import EffectiveSetting
from kvstore.process.node_id import check_node_id
from kvstore.process.tls import TlsConfig
from kvstore.tiers.io_engines.probe import GdsMode
from kvstore.transport.nixl.agent import NEEDS_TRUST, NixlOptions
from kvstore.transport.shaping.traffic import TrafficClass

LEAST_VOLUME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """One NVMe volume."""

    path: Path
    """Folder of the volume: slab, catalog, lock."""
    capacity_bytes: int
    direct: bool = True
    """O_DIRECT where the file system takes it."""


@dataclass(frozen=True, slots=True)
class MountConfig:
    """Another node's volume on a file system that this host mounts too: read directly, never written."""

    volume_id: str
    """As its owner names it, e.g. ``storage-1/nvme0``."""
    path: Path
    """Folder of the volume, as mounted here."""
    direct: bool = True
    """O_DIRECT where the file system takes it."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node daemon.

    Raises:
        InvalidArgument: settings that cannot be meant, each with its name and what to do.
    """

    node_id: str
    roles: tuple[str, ...] = ("prefill",)
    listen: str = "127.0.0.1:0"
    """gRPC of the Node service."""
    data_listen: str = "127.0.0.1:0"
    """Data plane."""
    advertise_host: str | None = None
    """Host that others reach this node by; None: the host listened on."""
    run_dir: Path = field(default_factory=lambda: Path("/tmp/kvstore"))  # noqa: S108 - replaced by the command line
    """Folder of the unix sockets; made with mode 0700. Socket paths are limited to 107 bytes."""
    metadata: str | None = None
    """Address of the metadata server; None: the node serves those who know it, and publishes nothing."""
    dram_bytes: int = 1 << 30
    huge_pages: bool = False
    prefault: bool = True
    """Take the arena's memory at start, in the background, rather than page by page at the first use."""
    nvme: tuple[NvmeConfig, ...] = ()
    mounts: tuple[MountConfig, ...] = ()
    """Volumes of other nodes that are read directly."""
    write_behind_to: str | None = None
    """Node id of a storage node that completed blocks are written to; None: own NVMe volumes, if any."""
    policy: str = "reuse-distance"
    lease_ms: int = 10_000
    """How long blocks answered by Load stay put for the engine to copy."""
    prepare_ttl_ms: int = 30_000
    """How long a store may take between Prepare and Complete."""
    load_window_bytes: int = 64 << 20
    """Bytes read ahead at once, for each load, from NVMe or a peer."""
    load_threads: int = 8
    io_threads: int = 8
    """I/O requests in flight on each NVMe volume."""
    volume_stall_s: float = 1.0
    """A volume, or mounted volume, that answers no I/O for so long is stalled: nobody waits for it any more."""
    gds: GdsMode = "auto"
    """GPUDirect Storage: ``auto``: where a measurement shows that it is real; ``required``: or the node does not start."""
    nixl: NixlOptions | None = None
    """Payload between nodes by one-sided transfers, where both sides can; None: all of it over TCP."""
    nixl_required: bool = False
    """The node does not start where NIXL does not work."""
    nixl_trusted_network: bool = False
    """Needed for ``nixl``: whoever reaches this node's ports may read and write its memory and end it."""
    storage_listen: str | None = None
    """Data plane on the storage network (SNIC); None: ``data_listen`` serves both networks."""
    storage_advertise_host: str | None = None
    """Host that others reach it by on the storage network; None: the host listened on."""
    storage_bytes_per_s: int = 0
    """Bandwidth of the storage link, for the planner; 0: not known, it is estimated from what is measured."""
    compute_bytes_per_s: int = 0
    """Bandwidth of the compute link; 0: not known."""
    storage_link_bytes_per_s: int = 0
    """Speed of the storage link as the kernel reports it, for the planner where nothing better is known; 0: it does not."""
    compute_link_bytes_per_s: int = 0
    """Likewise of the compute link."""
    traffic: TrafficClass = field(default_factory=TrafficClass)
    """DSCP mark of KV traffic, and its bandwidth cap on the compute network."""
    prefill_buffer_bytes: int = 0
    """The most that loads in layer groups may hold together; 0: a quarter of the arena."""
    decode_buffer_bytes: int = 0
    """The most that awaited prompts may hold together; 0: a quarter of the arena."""
    keep_loaded: bool = True
    """Keep what was loaded or stored in DRAM as a cache; False: it leaves once it is durable and nobody uses it."""
    peer_streams: int = 4
    """Connections of a peer fetch."""
    anti_entropy_interval_ms: int = 30_000
    stop_grace_s: float = 10.0
    """How long an end in order may take: stores finished, blocks written behind, reads answered."""
    move_bytes_per_s: int = 256 << 20
    """The most that others pull from this node while it drains; 0: no bound."""
    move_window_bytes: int = 32 << 20
    """Bytes that others pull from it at once."""
    tokens_file: Path | None = None
    """Who may call what (``kvstore.rpc.auth.tokens``); None: whoever reaches it."""
    token_file: Path | None = None
    """The token that it shows to the metadata server and other nodes; None: none."""
    tls: TlsConfig | None = None
    allow_insecure_remote: bool = False
    """Listen on other than loopback without TLS."""
    metrics_listen: str | None = None
    """Address of ``/metrics``, plain HTTP; None: not served."""
    slow_load_s: float = 1.0
    """A load that takes longer is logged with its breakdown."""
    ready_file: Path | None = None
    """Written, atomically, with the bound addresses as JSON once the node serves."""
    in_force: tuple[EffectiveSetting, ...] = ()
    """The configuration that all this was made of, for those who ask; shown, not used."""

    def __post_init__(self) -> None:
        check_node_id(self.node_id)
        named = [mount.volume_id for mount in self.mounts]
        if len(set(named)) != len(named) or any(name.startswith(f"{self.node_id}/") for name in named):
            raise InvalidArgument("mounts are volumes of other nodes, each named once", mounts=", ".join(named))
        if not self.roles:
            raise InvalidArgument("node.roles is empty: name at least one of prefill, decode and storage")
        if self.write_behind_to == self.node_id:
            raise InvalidArgument(
                "node.write_behind_to names this node itself: name a storage node, or leave it unset and give this one node.nvme",
                node_id=self.node_id,
            )
        if self.nixl is not None and not self.nixl_trusted_network:
            raise InvalidArgument(NEEDS_TRUST, option="node.nixl", needs="node.nixl_trusted_network=true")
        for name, size in (("prefill_buffer", self.prefill_buffer_bytes), ("decode_buffer", self.decode_buffer_bytes)):
            if size > self.dram_bytes:
                raise InvalidArgument(
                    f"node.{name} is a part of node.dram: make it smaller, or node.dram larger",
                    **{name: size, "dram": self.dram_bytes},
                )
        self._check_volumes()

    def _check_volumes(self) -> None:
        folders: set[Path] = set()
        for volume in self.nvme:
            if volume.capacity_bytes < LEAST_VOLUME_BYTES:
                raise InvalidArgument(
                    "a volume of node.nvme takes a page of 4096 bytes at least, and a real one gigabytes: write PATH:SIZE, e.g. "
                    f"{volume.path}:100GiB",
                    size=volume.capacity_bytes,
                )
            folder = volume.path.resolve()
            if folder in folders:
                raise InvalidArgument("node.nvme names a folder twice: give each volume a folder of its own", path=volume.path)
            if folder.exists() and not folder.is_dir():
                raise InvalidArgument("node.nvme names something that is not a folder", path=volume.path)
            folders.add(folder)
