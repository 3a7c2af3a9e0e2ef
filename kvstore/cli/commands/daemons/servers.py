"""``kvstore metadata`` and ``kvstore node``: the daemons of the store."""

from __future__ import annotations

import click

from kvstore.cli.support.build_config import metadata_config, node_config, set_up_process, set_up_traces
from kvstore.cli.support.config_options import setting_option, with_provenance
from kvstore.cli.support.folders import make_run_dir
from kvstore.cli.support.help import Command
from kvstore.cli.support.logs import set_up_logs
from kvstore.config.model import Config
from kvstore.config.sources import Provenance


@click.command(cls=Command)
@setting_option("--listen", key="metadata.listen", metavar="HOST:PORT", help="Address of the gRPC service.")
@setting_option("--index", key="metadata.index_path", metavar="DIR", help="Folder of the index.")
@setting_option("--ready-file", key="metadata.ready_file", metavar="FILE", help="File written as JSON once the server answers.")
@with_provenance
def metadata(config: Config, provenance: Provenance) -> None:
    """Run a metadata server until SIGTERM or Ctrl-C.

    It knows which nodes are alive and which blocks they hold, and never reads blocks. Its index may be deleted while it is
    down: nodes tell it again what they hold.

    Examples:
      kvstore metadata
      kvstore metadata --listen 10.0.0.1:7400 --set metadata.tls.cert=m.pem --set metadata.tls.key=m.key
    """
    from kvstore.metadata.main import run  # a daemon imports only what it runs

    set_up_process(config, "kvstore-metadata")
    run(metadata_config(config, provenance))


@click.command(cls=Command)
@setting_option("--id", key="node.node_id", metavar="NAME", help="Stable name of this node.")
@setting_option("--roles", key="node.roles", metavar="ROLE,…", help="prefill, decode, storage.")
@setting_option("--metadata", key="node.metadata", metavar="HOST:PORT[,...]", help="Metadata servers.")
@setting_option("--dram", key="node.dram", metavar="SIZE", help="Size of the DRAM arena.")
@setting_option("--nvme", key="node.nvme", metavar="PATH:SIZE,…", help="NVMe volumes; created if missing.")
@setting_option("--policy", key="node.policy", metavar="NAME", help="Eviction policy.")
@setting_option("--listen", key="node.listen", metavar="HOST:PORT", help="Address of the gRPC service.")
@setting_option("--data-listen", key="node.data_listen", metavar="HOST:PORT", help="Address of the data plane.")
@setting_option("--ready-file", key="node.ready_file", metavar="FILE", help="File written as JSON once the server answers.")
@with_provenance
def node(config: Config, provenance: Provenance) -> None:
    """Run the node daemon of this host until SIGTERM or Ctrl-C.

    It owns the DRAM arena, which engines on the host map, and the NVMe volumes, and serves other hosts.

    Examples:
      kvstore node --dram 8GiB
      kvstore node --id storage-1 --roles storage --dram 1GiB --nvme /mnt/nvme0:200GiB,/mnt/nvme1:200GiB
    """
    from kvstore.node.main import run  # a daemon imports only what it runs

    set_up_logs(config.log)
    settings = node_config(config, provenance)
    if config.node.run_dir is None:
        make_run_dir(settings.run_dir)
    set_up_traces(config, "kvstore-node", node=settings.node_id)
    run(settings)
