"""``kvstore doctor``: what this host has, what of it is in use, what is missing, and the command that mends it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.help import Command
from kvstore.cli.options import setting_option, with_quiet_config
from kvstore.cli.settings import tls, token
from kvstore.core.config import Config, NodeSection
from kvstore.core.errors import KVStoreError
from kvstore.doctor.facts import Wanted, WantedNixl, WantedVolume
from kvstore.doctor.findings import Finding, Level, findings, healthy
from kvstore.doctor.running import RunningNode, node_findings
from kvstore.rpc.address import stays_on_host
from kvstore.transport.nixl.agent import LOOPBACK

_NODE_S = 2.0
_MOST_NODES = 8
_STYLES = {Level.OK: "green", Level.INFO: "dim", Level.WARNING: "yellow", Level.MISSING: "bold red"}


@click.command(cls=Command)
@setting_option("--nvme", key="node.nvme", metavar="PATH:SIZE,…", help="NVMe volumes to look at.")
@setting_option("--dram", key="node.dram", metavar="SIZE", help="DRAM arena to look for room for.")
@setting_option("--metadata", key="client.metadata", metavar="HOST:PORT", help="Metadata server that knows running nodes.")
@setting_option("--node", key="client.node", metavar="ADDR", help="A running node: address, or unix:PATH.")
@click.option("--json", "as_json", is_flag=True, help="Prints JSON: facts and findings.")
@with_quiet_config
def doctor(config: Config, *, as_json: bool) -> None:
    """Tells what this host has, what of it is in use, what is missing and what mends it. Changes nothing.

    It looks at the GPU and its driver, GPUDirect Storage, the volumes of the configuration, memory, limits, networks, RDMA, and
    at the nodes that run on this host.

    Examples:
      kvstore doctor
      kvstore doctor --config /etc/kvstore/kvstore.toml
      kvstore doctor --nvme /mnt/nvme0/kvstore:1TiB --set node.gds=required
      kvstore doctor --json | jq '.findings[] | select(.level != "ok")'

    Exits with 1 where something is missing that the configuration requires; warnings exit with 0.
    """
    from kvstore.doctor.collect import collect

    wanted = wanted_of(config)
    facts = collect(wanted)
    nodes = running_nodes(config)
    found = findings(facts, wanted)
    for node in nodes:
        found += node_findings(node, gds_required=wanted.gds == "required")
    if not nodes:
        what = f"none runs on this host that {config.client.metadata} knows of"
        found.append(Finding("node", Level.INFO, what, "kvstore node   # starts one; others are looked at with --node HOST:PORT"))
    if as_json:
        sections = {name: {"error": section.error, **section.said} for name, section in facts.sections.items()}
        said: dict[str, Any] = {"ok": healthy(found), "findings": [asdict(finding) for finding in found], "facts": sections}
        click.echo(json.dumps(said | {"nodes": [asdict(node) for node in nodes]}, indent=2, default=str))
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        _print_lines(found)
    if not healthy(found):
        raise click.ClickException("something is missing that the configuration requires")


def wanted_of(config: Config) -> Wanted:
    """What the configuration asks of this host."""
    node = config.node
    return Wanted(
        dram_bytes=node.dram,
        huge_pages=node.huge_pages,
        gds=node.gds,
        volumes=tuple(WantedVolume(volume.path, volume.capacity, volume.direct) for volume in node.nvme),
        mounts=tuple(mount.path for mount in node.mounts),
        nixl=None if node.nixl == "off" else _wanted_nixl(node),
    )


def _wanted_nixl(node: NodeSection) -> WantedNixl:
    listens = (node.data_listen, node.storage_listen or node.data_listen)
    return WantedNixl(
        required=node.nixl == "required",
        trusted=node.nixl_trusted_network,
        ruled_out="tls" if tls(node.tls) is not None else "compute_cap" if node.compute_cap else None,
        devices=node.nixl_devices or (LOOPBACK if all(map(stays_on_host, listens)) else ""),
        transports=node.nixl_transports,
    )


def running_nodes(config: Config) -> list[RunningNode]:
    """What the nodes of this host say: the one that is named, else those that the metadata server knows here."""
    if config.client.node:
        return [_ask_node(config, config.client.node)]
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
    from kvstore.rpc.client import call, connect

    try:
        with connect(config.client.metadata, tls=tls(config.client.tls), token=token(config.client)) as channel:
            known = call(metadata_pb2_grpc.MetadataStub(channel).ListNodes, metadata_pb2.ListNodesRequest(), _NODE_S).nodes
    except (KVStoreError, OSError):
        return []  # nothing need run for a host to be looked at
    addresses = [node.node.control_address for node in known if node.alive]
    return [_ask_node(config, address) for address in addresses if _is_ours(address)][:_MOST_NODES]


def _ask_node(config: Config, address: str) -> RunningNode:
    from kvproto.v1 import node_pb2, node_pb2_grpc
    from kvstore.rpc.client import call, connect

    try:
        with connect(address, tls=tls(config.client.tls), token=token(config.client)) as channel:
            said = call(node_pb2_grpc.NodeStub(channel).GetNodeStats, node_pb2.GetNodeStatsRequest(), _NODE_S)
    except (KVStoreError, OSError) as error:
        return RunningNode(address, error=str(error))
    return RunningNode(address, said.node.node_id, tuple(said.io_engines), dict(said.counters))


def _is_ours(address: str) -> bool:
    """Whether an address is one of this host's: such can be bound to."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _print_table(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "area", "finding"):
        table.add_column(column, overflow="fold")
    for finding in found:
        what = Text(finding.what)
        if finding.mend:
            what.append(f"\n→ {finding.mend}", style="cyan")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), finding.area, what)
    Console().print(table)


def _print_lines(found: Sequence[Finding]) -> None:
    for finding in found:
        click.echo(f"{finding.level.value:<7}  {finding.area}: {finding.what}" + (f"  -> {finding.mend}" if finding.mend else ""))
