"""Root command. It imports subcommands lazily and prints errors as one line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

import click

import kvstore
from kvstore.cli.support.help import Group
from kvstore.cli.support.output import clean
from kvstore.core.errors import KVStoreError
from kvstore.process.gc_tuning import collect_rarely
from kvstore.rpc.grpc_io_mode import wait_in_callers_threads

_COMMANDS = {
    "up": "kvstore.cli.commands.daemons.up:up",
    "metadata": "kvstore.cli.commands.daemons.servers:metadata",
    "node": "kvstore.cli.commands.daemons.servers:node",
    "router": "kvstore.cli.commands.daemons.router:router",
    "admin": "kvstore.cli.commands.daemons.admin:admin",
    "events": "kvstore.cli.commands.daemons.events:events",
    "demo": "kvstore.cli.commands.workloads.demo:demo",
    "stress": "kvstore.cli.commands.workloads.stress:stress",
    "replay": "kvstore.cli.commands.workloads.replay:replay",
    "advise": "kvstore.cli.commands.workloads.advise:advise",
    "calibrate": "kvstore.cli.commands.workloads.calibrate:calibrate",
    "simulate": "kvstore.cli.commands.workloads.simulate:simulate",
    "status": "kvstore.cli.commands.store.status:status",
    "history": "kvstore.cli.commands.store.history:history",
    "top": "kvstore.cli.top.command:top",
    "nodes": "kvstore.cli.commands.store.nodes:nodes",
    "volumes": "kvstore.cli.commands.store.volumes:volumes",
    "namespaces": "kvstore.cli.commands.store.namespaces:namespaces",
    "tenants": "kvstore.cli.commands.store.tenants:tenants",
    "blocks": "kvstore.cli.commands.store.blocks:blocks",
    "plans": "kvstore.cli.commands.store.plans:plans",
    "loads": "kvstore.cli.commands.store.plans:loads",
    "policy": "kvstore.cli.commands.store.plans:policy",
    "health": "kvstore.cli.commands.host.health:health",
    "ping": "kvstore.cli.ping.command:ping",
    "doctor": "kvstore.cli.commands.host.doctor:doctor",
    "config": "kvstore.cli.commands.host.configuration:config",
    "completion": "kvstore.cli.commands.host.completion:completion",
}
"""Subcommands are imported on use, which halves the start time of a daemon."""

_SUMMARIES = {
    "up": "Run a whole store on this machine, without configuration.",
    "metadata": "Run a metadata server.",
    "node": "Run the node daemon of this host.",
    "router": "Run a router: one OpenAI-compatible address in front of several engines.",
    "admin": "Run an admin server: REST API and web page.",
    "events": "Show block events, or publish them for routers in vLLM's format.",
    "demo": "Start a small store, run a workload on it and check every byte.",
    "stress": "Load a running store, check every byte and measure its speed.",
    "replay": "Replay a request trace against a temporary store.",
    "advise": "Recommend prefill and decode nodes and a path policy.",
    "calibrate": "Fit scheduler limits and speeds to measured step times.",
    "simulate": "Simulate a cluster: the gain of loading over two storage links.",
    "status": "Show nodes, volumes and usage of a running store.",
    "history": "Show the cluster's events of the last 24 hours.",
    "top": "Show live statistics: loads, bytes by path and tier, hits, latency, nodes.",
    "nodes": "List, inspect, drain and remove nodes.",
    "volumes": "List, evict, check and repair volumes.",
    "namespaces": "List, inspect, evict, keep and invalidate namespaces.",
    "tenants": "List tenants with their usage, and set quotas.",
    "blocks": "Explain which blocks of a prompt hit, and why the others miss.",
    "plans": "Show planned loads and recent load decisions.",
    "loads": "Show the slowest loads of the last minute and their causes.",
    "policy": "Show or set the path policy: the choice of storage links.",
    "health": "Check whether a daemon of this host serves.",
    "ping": "Measure round trips to the servers of a store.",
    "doctor": "Check hardware, drivers and configuration of this host.",
    "config": "Show the effective configuration and the named clusters.",
    "completion": "Print a shell completion script.",
}


class _Commands(Group):
    """Group whose subcommands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name == "metadata":  # the command line is never a client
            wait_in_callers_threads()  # before the command imports gRPC
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def elsewhere(self, ctx: click.Context, name: str) -> list[str]:
        found = ((group, self.get_command(ctx, group)) for group in _COMMANDS)
        return [f"{group} {name}" for group, command in found if isinstance(command, click.Group) and name in command.commands]

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
                raise  # click handles a closed output pipe
            where = f": {error.filename}" if error.filename else ""
            raise click.ClickException(f"{error.strerror or error}{where}") from error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(kvstore.__version__, prog_name="kvstore")
def root() -> None:
    """A tiered KV-cache store for LLM inference.

    Start here:
      kvstore demo                  run an agentic workload on a store of four processes, and check every byte
      kvstore up                    run a store on this machine until Ctrl-C
      kvstore replay TRACE          replay a recorded workload with real bytes
      kvstore simulate              estimate the gain on a cluster
      kvstore status                show health, nodes and volumes of a running store
      kvstore top                   show its loads, hits and latency live
      kvstore stress                load it, check every byte and measure its speed
      kvstore doctor                check hardware, drivers and settings of this host
      kvstore config show           show every setting, its value and its source

    Settings come from flags, KVSTORE_SECTION__NAME variables and kvstore.toml, in this order of precedence.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 success, 1 failure, 2 usage error. Help texts list further exit codes."""
    collect_rarely()
    # gRPC prints C++ file names and line numbers beside the errors that we report
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    root.main(args=None if arguments is None else list(arguments), prog_name="kvstore")
    raise SystemExit(0)
