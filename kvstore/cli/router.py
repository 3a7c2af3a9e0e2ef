"""``kvstore router``: the OpenAI-compatible front before several engines."""

from __future__ import annotations

import click

from kvstore.cli.help import Command
from kvstore.cli.options import setting_option, with_config
from kvstore.cli.settings import router_config
from kvstore.core.config import Config


@click.command(cls=Command)
@setting_option("--engine", key="router.engines", metavar="[NAME=]URL[@NODE],…", help="Engines that serve whole requests.")
@setting_option("--prefill", key="router.prefill", metavar="[NAME=]URL[@NODE],…", help="Engines that compute prompts.")
@setting_option("--decode", key="router.decode", metavar="[NAME=]URL[@NODE],…", help="Engines that generate.")
@setting_option("--listen", key="router.listen", metavar="HOST:PORT", help="Address of the HTTP service.")
@setting_option("--policy", key="router.policy", metavar="NAME", help="scheduler, least_loaded or round_robin.")
@setting_option("--metadata", key="router.metadata", metavar="HOST:PORT", help="Address of the metadata server; none: without.")
@setting_option("--ready-file", key="router.ready_file", metavar="FILE", help="Written as JSON once it answers.")
@with_config
def router(config: Config) -> None:
    """Runs a router until SIGTERM or Ctrl-C: one OpenAI-compatible address before several engines.

    It sends each request where its prefix lies and room is: by the metadata server's scheduler, which it tells how engines are;
    by itself while that is away. Engines are checked, failed ones are left out, and a request that no client has seen an answer
    of is tried elsewhere. URL is an engine's address without /v1; NODE is the id of the store's node on its host, so that what
    lies in its DRAM counts as near.

    Two engines that serve whole requests:
      kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002
      curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"model": "m", "prompt": "Once"}'

    One that prefills and two that decode, on hosts with nodes of the store:
      kvstore router --prefill http://p0:8000@host-p0 --decode http://d0:8000@host-d0,http://d1:8000@host-d1

    The baseline, without scheduler and store:
      kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002 --policy round_robin --metadata none

    Look at it:
      curl http://127.0.0.1:8000/router/engines
      curl http://127.0.0.1:8000/metrics
    """
    try:
        from kvstore.router.main import run  # a daemon imports only what it runs
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'kvstore-dualpath[router]'") from error

    run(router_config(config))
