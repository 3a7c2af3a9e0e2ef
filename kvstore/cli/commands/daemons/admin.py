"""``kvstore admin``: the admin server."""

from __future__ import annotations

import click

from kvstore.cli.support.build_config import admin_config
from kvstore.cli.support.config_options import setting_option, with_provenance
from kvstore.cli.support.help import Command
from kvstore.cli.support.logs import set_up_logs
from kvstore.config.model import Config
from kvstore.config.sources import Provenance
from kvstore.core.errors import install_command


@click.command(cls=Command)
@setting_option("--listen", key="admin.listen", metavar="HOST:PORT", help="Address of the HTTP service.")
@setting_option("--metadata", key="admin.metadata", metavar="HOST:PORT[,...]", help="Metadata servers.")
@setting_option("--tokens", key="admin.tokens_file", metavar="FILE", help="File with lines of ROLE NAME TOKEN.")
@setting_option("--ready-file", key="admin.ready_file", metavar="FILE", help="File written as JSON once the server answers.")
@with_provenance
def admin(config: Config, provenance: Provenance) -> None:
    """Run an admin server (REST API and web page) until SIGTERM or Ctrl-C.

    It is stateless: it queries the metadata server and its nodes, so any number of admin servers may run. On loopback every
    caller on this host may do everything. A remote address requires tokens (role read or operator) and TLS.

    Start it and query the store:
      kvstore admin
      curl 127.0.0.1:7470/v1/cluster
      curl 127.0.0.1:7470/v1/loads/slow

    Evict from a volume:
      curl -X POST 127.0.0.1:7470/v1/volumes/host-1/nvme0/evict -H 'content-type: application/json' -d '{"to_percent": 50}'

    Serve other hosts (a line of the file tokens: operator alice 6f1c…):
      kvstore admin --listen 0.0.0.0:7470 --tokens tokens --set admin.tls.cert=a.pem --set admin.tls.key=a.key
    """
    set_up_logs(config.log)
    try:
        from kvstore.admin.main import run  # a daemon imports only what it runs
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: {install_command('admin')}") from error

    run(admin_config(config, provenance))
