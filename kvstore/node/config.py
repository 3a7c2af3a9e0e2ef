"""Settings of one node daemon. Plain values: the command line fills them from file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.core.node_id import check_node_id
from kvstore.core.tls import TlsConfig


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """One NVMe volume."""

    path: Path
    """Folder of the volume: slab, catalog, lock."""
    capacity_bytes: int
    direct: bool = True
    """O_DIRECT where the file system takes it."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node daemon.

    Raises:
        InvalidArgument: ``node_id`` cannot name a node.
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
    write_behind_to: str | None = None
    """Node id of a storage node that completed blocks are written to; None: own NVMe volumes, if any."""
    policy: str = "gap"
    lease_ms: int = 10_000
    """How long blocks answered by Load stay put for the engine to copy."""
    prepare_ttl_ms: int = 30_000
    """How long a store may take between Prepare and Complete."""
    load_window_bytes: int = 64 << 20
    """Bytes read ahead at once, for each load, from NVMe or a peer."""
    load_threads: int = 8
    io_threads: int = 8
    """I/O requests in flight on each NVMe volume."""
    peer_streams: int = 4
    """Connections of a peer fetch."""
    anti_entropy_interval_ms: int = 30_000
    tls: TlsConfig | None = None
    allow_insecure_remote: bool = False
    """Listen on other than loopback without TLS."""
    ready_file: Path | None = None
    """Written, atomically, with the bound addresses as JSON once the node serves."""

    def __post_init__(self) -> None:
        check_node_id(self.node_id)
