"""``kvstore config``: the effective configuration."""

from __future__ import annotations

import json

import click

from kvstore.cli.support.config_options import with_provenance
from kvstore.cli.support.help import Command
from kvstore.cli.support.host_settings import settle
from kvstore.config.model import Config
from kvstore.config.sources import Provenance, leaves


@click.group()
def config() -> None:
    """Show the effective configuration."""


@config.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {key: {value, source, detail}}.")
@with_provenance
def show(config: Config, provenance: Provenance, *, as_json: bool) -> None:
    """Print every setting with its effective value and source. `derived` values follow from this host, with the reason.

    Examples:
      kvstore config show
      KVSTORE_NODE__DRAM=4GiB kvstore config show --set node.policy=lru
      kvstore config show --json | jq '."node.dram"'
    """
    rows = list(leaves(*settle(config, provenance)))
    if as_json:
        shown = {row.key: {"value": row.value, "source": row.origin.source, "detail": row.origin.detail} for row in rows}
        click.echo(json.dumps(shown, indent=2))
        return
    key_width = max(len(row.key) for row in rows)
    value_width = min(40, max(len(row.text) for row in rows))
    for row in rows:
        click.echo(f"{row.key:<{key_width}}  {row.text or '-':<{value_width}}  {row.origin}")
