"""The root command: finds subcommands without importing all of them, and turns our errors into one line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

import click

import kvstore
from kvstore.cli.support.help import Command
from kvstore.cli.support.output import clean
from kvstore.core.errors import KVStoreError
from kvstore.rpc.grpc_io_mode import wait_in_callers_threads

_COMMANDS = {
    "up": "kvstore.cli.commands.daemons.up:up",
    "metadata": "kvstore.cli.commands.daemons.servers:metadata",
    "node": "kvstore.cli.commands.daemons.servers:node",
    "router": "kvstore.cli.commands.daemons.router:router",
    "admin": "kvstore.cli.commands.daemons.admin:admin",
    "events": "kvstore.cli.commands.daemons.events:events",
    "demo": "kvstore.cli.commands.workloads.demo:demo",
    "replay": "kvstore.cli.commands.workloads.replay:replay",
    "simulate": "kvstore.cli.commands.workloads.simulate:simulate",
    "status": "kvstore.cli.commands.store.status:status",
    "top": "kvstore.cli.top.command:top",
    "nodes": "kvstore.cli.commands.store.nodes:nodes",
    "volumes": "kvstore.cli.commands.store.nodes:volumes",
    "namespaces": "kvstore.cli.commands.store.namespaces:namespaces",
    "tenants": "kvstore.cli.commands.store.tenants:tenants",
    "blocks": "kvstore.cli.commands.store.blocks:blocks",
    "plans": "kvstore.cli.commands.store.plans:plans",
    "loads": "kvstore.cli.commands.store.plans:loads",
    "path-policy": "kvstore.cli.commands.store.plans:path_policy",
    "health": "kvstore.cli.commands.host.health:health",
    "drain": "kvstore.cli.commands.store.drain:drain",
    "undrain": "kvstore.cli.commands.store.drain:undrain",
    "remove": "kvstore.cli.commands.store.drain:remove",
    "doctor": "kvstore.cli.commands.host.doctor:doctor",
    "volume": "kvstore.cli.commands.host.volume:volume",
    "bench": "kvstore.cli.commands.workloads.bench:bench",
    "config": "kvstore.cli.commands.host.configuration:config",
    "completion": "kvstore.cli.commands.host.completion:completion",
}
"""A daemon starts in half the time if it does not import what only the others need."""

_SUMMARIES = {
    "up": "Runs the whole store on this machine, with nothing to configure.",
    "metadata": "Runs a metadata server.",
    "node": "Runs the node daemon of this host.",
    "router": "Runs a router: one OpenAI-compatible address before several engines.",
    "admin": "Runs an admin server: what the store does and how to change it, over HTTP.",
    "events": "Shows block events as they happen, or publishes them for routers in vLLM's format.",
    "demo": "Starts a small store, runs a workload on it and checks every byte.",
    "replay": "Replays a request trace against a store of its own.",
    "simulate": "Simulates a cluster: what it would gain from loading over both sides' storage links.",
    "status": "Shows a running store: nodes, volumes, fill.",
    "top": "Shows a running store live: loads, bytes by path and tier, hits, latency, nodes.",
    "nodes": "Lists nodes, and shows one.",
    "volumes": "Lists volumes of running nodes, and evicts from them.",
    "namespaces": "Lists cache domains, shows where their blocks lie, evicts and invalidates them.",
    "tenants": "Lists tenants with what they hold, and sets their quotas.",
    "blocks": "Tells which blocks of a prompt hit, where they lie, and why the rest misses.",
    "plans": "Shows planned loads, and the last decisions with their reasons.",
    "loads": "Shows the slowest loads of the last minute, and why they were.",
    "path-policy": "Shows which storage links loads are read over, or changes it.",
    "health": "Asks a daemon of this host whether it serves.",
    "drain": "Takes a node out of a running store, losing nothing.",
    "undrain": "Lets a drained node take part again.",
    "remove": "Forgets a node that is dead or drained.",
    "doctor": "Tells what this host has, what is in use, what is missing and what mends it.",
    "volume": "Looks after NVMe volumes offline.",
    "bench": "Runs the benchmarks of a source checkout.",
    "config": "Shows the configuration in force.",
    "completion": "Prints what makes a shell complete this command.",
}


class _Commands(Command, click.Group):
    """Subcommands by name, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name == "metadata":  # a server, and nobody's client
            wait_in_callers_threads()  # before the command imports gRPC
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            raise click.ClickException("\n".join(clean(line) for line in str(error).split("\n"))) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise  # click knows what to do when the reader of our output is gone
            where = f": {error.filename}" if error.filename else ""
            raise click.ClickException(f"{error.strerror or error}{where}") from error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(kvstore.__version__, prog_name="kvstore")
def root() -> None:
    """A tiered KV-cache store for LLM inference.

    Begin here:
      kvstore demo                  a store of four processes serves an agentic workload; every byte is checked
      kvstore up                    a store on this machine, until Ctrl-C
      kvstore replay TRACE          how a recorded workload would do, with real bytes
      kvstore simulate              what a cluster would gain, before it is bought
      kvstore top                   what a running store does
      kvstore config show           every setting, its value, and where that came from

    Settings come from flags, KVSTORE_SECTION__NAME variables and kvstore.toml: flags win over variables, variables over
    the file.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 well, 1 failed, 2 used wrongly; commands with further codes say so in their help."""
    # its core prints C++ file names and line numbers beside the errors that we report anyway
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    root.main(args=None if arguments is None else list(arguments), prog_name="kvstore")
    raise SystemExit(0)
