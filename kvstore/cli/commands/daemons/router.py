"""``kvstore router``: one OpenAI-compatible address in front of several engines."""

from __future__ import annotations

import click

from kvstore.cli.support.build_config import router_config
from kvstore.cli.support.config_options import setting_option, with_config
from kvstore.cli.support.help import Command
from kvstore.config.model import Config
from kvstore.core.errors import install_command


@click.command(cls=Command)
@setting_option("--engine", key="router.engines", metavar="[NAME=]URL[@NODE],…", help="Engines that serve whole requests.")
@setting_option("--prefill", key="router.prefill", metavar="[NAME=]URL[@NODE],…", help="Engines that compute prompts.")
@setting_option("--decode", key="router.decode", metavar="[NAME=]URL[@NODE],…", help="Engines that generate output.")
@setting_option("--listen", key="router.listen", metavar="HOST:PORT", help="Address of the HTTP service.")
@setting_option("--policy", key="router.policy", metavar="NAME", help="scheduler, least_loaded or round_robin.")
@setting_option("--metadata", key="router.metadata", metavar="HOST:PORT[,...]", help="Metadata servers, or none.")
@setting_option("--ready-file", key="router.ready_file", metavar="FILE", help="File written as JSON once the router serves.")
@with_config
def router(config: Config) -> None:
    """Run a router: one OpenAI-compatible address in front of several engines. It stops at SIGTERM or Ctrl-C.

    The router sends each request to an engine that holds its prefix and has capacity. The metadata server's scheduler decides;
    while it is down, the router does. Engines are checked, failing ones are ejected, and a failed request is retried on another
    engine until its first byte. URL is an engine's address without /v1. NODE is the id of the store's node on the engine's
    host: blocks in its DRAM count as close to the engine.

    Two engines that serve whole requests:
      kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002
      curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"model": "m", "prompt": "Once"}'

    One prefill engine and two decode engines, on hosts with nodes of the store:
      kvstore router --prefill http://p0:8000@host-p0 --decode http://d0:8000@host-d0,http://d1:8000@host-d1

    The baseline, without a scheduler and a store:
      kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002 --policy round_robin --metadata none

    Show its state:
      curl http://127.0.0.1:8000/router/engines
      curl http://127.0.0.1:8000/metrics
    """
    try:
        from kvstore.router.main import run  # a daemon imports only what it runs
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: {install_command('router')}") from error

    run(router_config(config))
