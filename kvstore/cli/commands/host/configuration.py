"""``kvstore config``: the effective configuration and the named clusters."""

from __future__ import annotations

import click

from kvstore.cli.support import output, result
from kvstore.cli.support.config_options import CLUSTER_KEY, cluster_option, with_provenance
from kvstore.cli.support.help import ShownResource
from kvstore.cli.support.host_settings import settle
from kvstore.cli.support.result import CommandOutput
from kvstore.config.base import TlsSection
from kvstore.config.model import Config
from kvstore.config.sources import Provenance, leaves


@click.group(cls=ShownResource)
def config() -> None:
    """Show the effective configuration, or the named clusters. Without a command, show the configuration.

    Examples:
      kvstore config
      kvstore config clusters
    """


@config.command()
@cluster_option
@with_provenance
@result.prints
def show(config: Config, provenance: Provenance) -> CommandOutput:
    """Print every setting with its effective value and source. `derived` values follow from this host, with the reason.

    JSON: {key: {value, source, detail}}.

    Examples:
      kvstore config show
      KVSTORE_NODE__DRAM=4GiB kvstore config show --set node.policy=lru
      kvstore config show -o json | jq '."node.dram"'
    """
    rows = list(leaves(*settle(config, provenance)))

    def lines() -> None:
        key_width = max(len(row.key) for row in rows)
        value_width = min(40, max(len(row.text) for row in rows))
        for row in rows:
            click.echo(f"{row.key:<{key_width}}  {row.text or output.NOTHING:<{value_width}}  {row.origin}")

    shown = {row.key: {"value": row.value, "source": row.origin.source, "detail": row.origin.detail} for row in rows}
    return CommandOutput(shown, lines)


@config.command()
@cluster_option
@with_provenance
@result.prints
def clusters(config: Config, _provenance: Provenance) -> CommandOutput:
    """List the named clusters of the configuration. The column `used` marks the selected one.

    A section [clusters.NAME] has metadata, token_file, read_token_file, node and tls. Select one with --cluster NAME or
    KVSTORE_CLUSTER=NAME. It replaces these settings of [client].

    Examples:
      kvstore config clusters
      kvstore nodes --cluster staging
    """
    named = config.clusters
    used = click.get_current_context().meta.get(CLUSTER_KEY)
    return result.table(
        {"items": [{"name": name, "used": name == used, **one.model_dump(mode="json")} for name, one in named.items()]},
        ("cluster", "metadata", "tls", "token file", "used"),
        [
            (
                name,
                one.metadata,
                "no" if one.tls == TlsSection() else "yes",
                str(one.token_file or ""),
                "yes" if name == used else "",
            )
            for name, one in named.items()
        ],
    )
