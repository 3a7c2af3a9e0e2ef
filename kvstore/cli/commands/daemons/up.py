"""``kvstore up``: a whole store on this machine."""

from __future__ import annotations

import importlib.util
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from kvstore.cli.support import output, param_types
from kvstore.cli.support.config_options import handed_on, with_quiet_config
from kvstore.cli.support.folders import data_dir as configured_data_dir
from kvstore.cli.support.folders import make_run_dir, short_run_dirs
from kvstore.cli.support.help import Command
from kvstore.cli.support.scale_options import describe_metadata, scale_options
from kvstore.config.base import TlsSection
from kvstore.config.model import Config
from kvstore.core.errors import Internal, KVStoreError, install_command

if TYPE_CHECKING:
    from kvstore.embedded.cluster import Daemon, LocalCluster

_WATCH_S = 0.5
_OWN = "kvstore up sets this itself; run kvstore metadata and kvstore node to choose it"
_DECIDED = {
    "node.nvme": "use --nvme SIZE and --data-dir FOLDER",
    **dict.fromkeys(("node.roles", "node.run_dir", "node.metadata", "node.ready_file"), _OWN),
    **dict.fromkeys(("metadata.index_path", "metadata.ready_file"), _OWN),
    **dict.fromkeys(("admin.metadata", "admin.ready_file"), _OWN),
}
_DECIDED_WITH_SHARDS = {"metadata.engine": "--shards starts a Valkey Cluster; run kvstore metadata to use another one"}

_NO_PAGE = "(no web page)"
_EXAMPLE = """\
The store is up.  metadata {metadata}   node {socket}
Data lies in {data}. Stop with Ctrl-C.

From Python:

  from kvclient import CacheSpec, KVClient

  spec = CacheSpec(model="my-model", block_tokens=64, layers=32, layer_block_bytes=4096)
  client = KVClient.connect("{metadata}", spec, node="{socket}")

Look at it:  {page}
             kvstore status --metadata {metadata}
             kvstore stress --metadata {metadata}   loads and stores for some seconds
{metrics}REST:        {admin}   (changes are logged in {data}/admin.log)
"""


@click.command(cls=Command)
@click.option("--dram", callback=param_types.some_size, metavar="SIZE", help="Size of the DRAM arena (default: node.dram).")
@click.option(
    "--nvme",
    callback=param_types.volume_size,
    default="4GiB",
    metavar="SIZE",
    help="Size of the volume on disk (default: 4GiB; 0: no volume).",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of index and volume (default: ~/.local/share/kvstore).",
)
@scale_options
@with_quiet_config
def up(config: Config, *, dram: int | None, nvme: int, data_dir: Path | None, servers: int, shards: int) -> None:
    """Run a metadata server, a node with DRAM and a volume on disk, and an admin server, until Ctrl-C.

    Stored blocks survive a restart with the same folder. Settings apply to all daemons. Ports on 127.0.0.1: metadata 7400
    (metrics 7401), page and REST 7470, metrics of the node 7480. A second store on this machine requires other ports (0: any
    free one) and another --data-dir. A daemon that ends is started again, with a line that says why; after five ends within
    five minutes the store stops.

    With --servers, several metadata servers share the index; further ones use the next free ports after the first (7402, ...).
    With --shards, the index is in a Valkey Cluster, each shard a primary and a replica. It requires the program valkey-server or
    redis-server.

    Examples:
      kvstore up
      kvstore up --dram 8GiB --nvme 100GiB --data-dir /mnt/nvme0/kvstore
      kvstore up --servers 2 --shards 3
    """
    from kvstore.embedded.cluster import LocalCluster, NodeSpec
    from kvstore.embedded.restarts import ClusterSupervisor, SoleDaemon

    folder = data_dir or configured_data_dir(config)
    node_id = config.node.node_id or socket.gethostname()
    node = NodeSpec(
        node_id,
        roles=("prefill", "decode", "storage"),
        dram_bytes=config.node.dram_bytes if dram is None else dram,
        nvme_bytes=nvme,
        policy=config.node.policy,
        settings=(
            ("listen", config.node.listen),
            ("data_listen", config.node.data_listen),
            ("metrics_listen", config.node.metrics_listen or "none"),
        ),
    )
    socket_dir = short_run_dirs()
    make_run_dir(socket_dir)
    arguments = handed_on({**_DECIDED, **_DECIDED_WITH_SHARDS} if shards else _DECIDED)
    metadata_settings = (("listen", config.metadata.listen), ("metrics_listen", config.metadata.metrics_listen or "none"))
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a signal ignored by nohup stays ignored
        signal.signal(signal.SIGHUP, on_signal)
    output.note(f"starting {describe_metadata(servers, shards)}, a node and an admin server …")
    with LocalCluster(
        [node],
        folder,
        metadata_settings=metadata_settings,
        arguments=arguments,
        socket_dir=socket_dir,
        servers=servers,
        shards=shards,
    ) as cluster:
        metadata, node_daemon = cluster.node("metadata"), cluster.node(node_id)
        page, admin = _start_admin(cluster, config)
        click.echo(
            _EXAMPLE.format(
                metadata=cluster.metadata_address,
                socket=node_daemon.local_socket,
                data=folder,
                metrics=_metrics_lines(metadata, node_daemon),
                page=page,
                admin=admin,
            )
        )
        if servers > 1 or shards:
            _show_servers(cluster, node_daemon)
        sole = [SoleDaemon(node_id, "blocks that were only in DRAM are lost")]
        if servers == 1:
            sole.append(SoleDaemon("metadata", "lookups find nothing until it runs again"))
        if page != _NO_PAGE:
            sole.append(SoleDaemon("admin", "the page and the REST API are not served meanwhile", vital=False))
        # Ctrl-C reaches the daemons, too: their ends are expected then
        supervisor = ClusterSupervisor(cluster, lambda line: None if stop.is_set() else click.echo(line), sole)
        while not stop.wait(_WATCH_S):
            try:
                supervisor.poll()
            except Internal:
                if not stop.is_set():
                    raise
        click.echo("stopping …")


def _metrics_lines(metadata: Daemon, node: Daemon) -> str:
    """Addresses of the metrics of both, and the reason if they are not served."""
    lines = []
    for daemon, what in ((metadata, "the metadata server"), (node, "the node")):
        address = daemon.metrics_address
        lines.append(f"curl {address}/metrics" if address else f"(no metrics of {what}: {daemon.log_path} says why)")
    if node.metrics_address:
        lines.append(f"curl {node.metrics_address}/loads          the slowest loads of the last minute, and why")
    return "".join(f"             {line}\n" for line in lines)


def _show_servers(cluster: LocalCluster, node: Daemon) -> None:
    """Print the metadata servers, the node and the shards, with their process ids."""
    rows = [(name, address, cluster.node(name).process.pid) for name, address in cluster.metadata_addresses.items()]
    click.echo("Metadata servers:")
    for line in output.aligned([(f"  {name}", address, f"pid {pid}") for name, address, pid in rows]):
        click.echo(line)
    click.echo(f"Node:\n  {node.name}  {node.address}  pid {node.process.pid}")
    if cluster.valkey is None:
        return
    click.echo("Index: a Valkey Cluster, in memory only. After a restart of the store, the nodes fill it again.")
    for number, pair in enumerate(zip(cluster.valkey.primaries, cluster.valkey.replicas, strict=True)):
        primary, replica = (f"{server.address} pid {server.process.pid}" for server in pair)
        click.echo(f"  shard {number}   primary {primary}   replica {replica}")


def _start_admin(cluster: LocalCluster, config: Config) -> tuple[str, str]:
    """Start the admin server if possible.

    Returns:
        Addresses of its page and its OpenAPI document, or the reason why it does not run.
    """
    if config.admin.listen == "none":
        return _without("admin.listen is none")
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        return _without(f"{missing[0]} is missing: {install_command('admin')}")
    try:
        address = cluster.start_admin(("listen", config.admin.listen)).address
    except KVStoreError as error:
        return _without(str(error).splitlines()[0])
    scheme = "http" if config.admin.tls == TlsSection() else "https"
    return f"{scheme}://{address}/   in a browser", f"{scheme}://{address}/v1/openapi.json"


def _without(why: str) -> tuple[str, str]:
    return _NO_PAGE, f"(no admin server: {why})"
